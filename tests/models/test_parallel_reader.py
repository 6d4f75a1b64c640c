"""Reading checkpoints in several threads: the bytes, the order, what is read from the disk, and what goes wrong."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models.test_loading_memory import save_checkpoint
from split_workers import on_ranks, parts_of

from hotset.base.errors import CheckpointError
from hotset.models.checkpoint import parallel_reader, weights
from hotset.models.checkpoint.files import find_model
from hotset.models.checkpoint.parallel_reader import ALIGNMENT, FileRange, ParallelReader, _Staging
from hotset.models.checkpoint.weights import open_weights
from hotset.models.decoder import Decoder
from hotset.models.spec import AS_COMPUTED
from hotset.models.split import WHOLE_MODEL, Split
from hotset.models.weight_plan import plan_weights

CPU = torch.device("cpu")
SMALL = {"threads": 3, "buffer_bytes": 2 * ALIGNMENT, "staging_bytes": 8 * ALIGNMENT}
RANGES = [
    (0, 1),
    (5, 0),
    (4095, 2),
    (17, 30_000),
    (40_000, 8),
    (4096, 4096),
    (99_990, 10),
    (3, 90_000),
    (50_000, 12_345),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(torch.randint(256, (100_000,), dtype=torch.uint8).tolist()))
    return path


@pytest.fixture(params=["direct", "cached"])
def cached(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system says that files are in its page cache, so that they are read through it."""
    monkeypatch.setattr(parallel_reader, "_cached_share", lambda *_: float(request.param == "cached"))
    return bool(request.param == "cached")


def file_range(path: Path, first: int, nbytes: int, *, shared: bool = False) -> FileRange:
    return FileRange(path, first, nbytes, f"{path}: tensor t{first}", shared)


@contextmanager
def recorded_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bool, int, int]]]:
    """Records the reads of files: whether they were direct, where they began, and how much they returned."""
    reads: list[tuple[bool, int, int]] = []
    preadv = os.preadv

    def recording(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        read = preadv(descriptor, buffers, offset, *flags)
        reads.append((bool(_flags(descriptor) & os.O_DIRECT), offset, read))
        return read

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", recording)
        yield reads


def _flags(descriptor: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("flags:")), 8)


@pytest.mark.parametrize("announced", [RANGES, RANGES[::2], [], RANGES[3:]], ids=["all", "some", "none", "later"])
def test_every_range_has_the_bytes_of_the_file(file: Path, announced: list[tuple[int, int]], cached: bool) -> None:
    """Ranges that are larger than the staging memory, empty ones, and the end of the file; announced ones or not."""
    stored = file.read_bytes()
    with closing(ParallelReader(CPU, **SMALL)) as reader:
        for first, nbytes in announced:
            reader.announce(file_range(file, first, nbytes))
        for first, nbytes in RANGES:
            reader.release()
            assert bytes(reader.read(file_range(file, first, nbytes)).tolist()) == stored[first : first + nbytes]


def test_several_ranges_stay_valid_until_they_are_released(file: Path) -> None:
    stored = file.read_bytes()
    with closing(ParallelReader(CPU, **SMALL)) as reader:
        for first in range(0, 90_000, 3000):
            reader.announce(file_range(file, first, 3000))
        for first in range(0, 90_000, 6000):
            reader.release()
            both = [reader.read(file_range(file, begin, 3000)) for begin in (first, first + 3000)]
            assert bytes(torch.cat(both).tolist()) == stored[first : first + 6000]


def test_announced_ranges_that_are_not_wanted_are_dropped(file: Path) -> None:
    stored = file.read_bytes()
    with closing(ParallelReader(CPU, **SMALL)) as reader:
        for first in range(0, 40_000, 4000):
            reader.announce(file_range(file, first, 4000))
        for first in (0, 20_000, 36_000):
            reader.release()
            assert bytes(reader.read(file_range(file, first, 4000)).tolist()) == stored[first : first + 4000]


def test_a_byte_is_read_once_and_directly_if_nobody_else_reads_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_reader, "_cached_share", lambda *_: 0.0)
    with recorded_reads(monkeypatch) as reads, closing(ParallelReader(CPU, **SMALL)) as reader:
        reader.read(file_range(file, 8192, 40_960))
        if not any(direct for direct, _, _ in reads):
            pytest.skip("the file system of the test has no direct I/O")
        del reads[0]  # the attempt when the file was opened
        assert all(direct for direct, _, _ in reads) and sum(read for _, _, read in reads) == 40_960
        reads.clear()
        reader.read(file_range(file, 8192, 40_960, shared=True))
        assert not any(direct for direct, _, _ in reads) and sum(read for _, _, read in reads) == 40_960


def test_a_file_system_without_direct_reads_is_named_once(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parallel_reader, "_cached_share", lambda *_: 0.0)
    monkeypatch.setattr(parallel_reader, "_without_direct", set())
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    caplog.set_level("INFO")
    second = file.with_name("second.safetensors")
    second.write_bytes(file.read_bytes())
    with closing(ParallelReader(CPU, **SMALL)) as reader:
        for path in (file, second):
            assert bytes(reader.read(file_range(path, 7, 50_000)).tolist()) == file.read_bytes()[7:50_007]
    assert caplog.text.count("is read through the page cache") == 1


def test_a_file_that_was_just_written_is_read_from_the_page_cache(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        assert parallel_reader._cached_share(descriptor, 100_000) == 1.0
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("staging", [0, 8 * ALIGNMENT])
def test_a_file_that_ends_early_or_changes_is_named_with_the_tensor(file: Path, staging: int, cached: bool) -> None:
    def fresh() -> ParallelReader:
        return ParallelReader(CPU, threads=2, buffer_bytes=ALIGNMENT, staging_bytes=staging)

    with (
        closing(fresh()) as reader,
        pytest.raises(CheckpointError, match=r"tensor t90000 is cut short: .* ends at 100000"),
    ):
        reader.read(file_range(file, 90_000, 10_001))
    with closing(fresh()) as reader:
        reader.read(file_range(file, 0, 10))
        file.write_bytes(file.read_bytes()[:50_000])
        with pytest.raises(CheckpointError, match=r"tensor t49000 (is cut short|was read while its file changed)"):
            reader.read(file_range(file, 49_000, 2000))
        with pytest.raises(CheckpointError, match="tensor t16 was read while its file changed"):
            reader.read(file_range(file, 16, 10))
    with closing(fresh()) as reader, pytest.raises(CheckpointError, match="tensor t0 cannot be read: No such file"):
        reader.read(file_range(file.with_name("missing"), 0, 1))


def test_a_read_error_names_the_tensor(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def failing(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        if offset >= 40_960:
            raise OSError(5, os.strerror(5))
        return preadv(descriptor, buffers, offset, *flags)

    with closing(ParallelReader(CPU, **SMALL)) as reader:
        for first in (0, 20_000, 50_000):
            reader.announce(file_range(file, first, 5000))
        monkeypatch.setattr(os, "preadv", failing)
        reader.read(file_range(file, 0, 5000))
        reader.read(file_range(file, 20_000, 5000))
        with pytest.raises(CheckpointError, match="tensor t50000 cannot be read: Input/output error"):
            reader.read(file_range(file, 50_000, 5000))


def test_staging_memory_is_never_given_out_twice() -> None:
    """The oldest of up to four pieces is freed at random."""
    staging, held = _Staging(10 * ALIGNMENT, CPU), []
    generator = torch.Generator().manual_seed(1)
    given = 0
    for number in range(2000):
        nbytes = int(torch.randint(1, 5 * ALIGNMENT, (), generator=generator))
        memory = staging.allocate(nbytes)
        if memory is not None:
            memory.fill_(number % 251)
            held.append((number % 251, memory))
            given += 1
        if memory is None or len(held) == 4:
            index = int(torch.randint(0, len(held), (), generator=generator))
            staging.free(held.pop(index)[1])
        assert all(bool((memory == value).all()) for value, memory in held)
    assert given > 800


@pytest.mark.parametrize("ranks", [1, 2])
def test_decoders_read_the_same_weights_with_a_reader(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All formats, slices of rows and of columns; each byte of a contiguous slice is read by one rank, once."""
    files = find_model(str(save_checkpoint(tmp_path)))
    splits = [Split(rank, ranks) for rank in range(ranks)] if ranks > 1 else [WHOLE_MODEL]

    class CpuReader(ParallelReader):
        """The reader that a GPU gets."""

        def __init__(self, device: torch.device) -> None:
            super().__init__(CPU, **SMALL)
            self.reads: list[FileRange] = []

        def read(self, wanted: FileRange) -> torch.Tensor:
            self.reads.append(wanted)
            return super().read(wanted)

    def decoder(peers: Any, reader: CpuReader | None) -> list[torch.Tensor]:
        split = splits[peers.rank]
        source = open_weights(files, torch.bfloat16, CPU, ranks=ranks)
        source.tensor_source._reader = reader  # type: ignore[attr-defined]
        plan_weights(files.spec, source, AS_COMPUTED, split)
        if reader is not None:
            announced = list(reader._announced)
        loaded = Decoder(files.spec, source, split=split, collectives=peers)
        if reader is not None:
            assert reader.reads == announced, "what is read differs from what was planned"
        source.finish()
        return [part for part in parts_of(loaded) if isinstance(part, torch.Tensor)]

    readers = [CpuReader(CPU) for _ in splits]
    expected = on_ranks(ranks, lambda peers: decoder(peers, None))
    found = on_ranks(ranks, lambda peers: decoder(peers, readers[peers.rank]))
    for of_rank, as_mapped in zip(found, expected, strict=True):
        assert len(of_rank) == len(as_mapped)
        for tensor, same in zip(of_rank, as_mapped, strict=True):
            assert torch.equal(tensor.view(torch.uint8), same.view(torch.uint8))
    own = [
        wanted
        for reader in readers
        for wanted in reader.reads
        if not wanted.shared and "_scale_inv" not in wanted.title
    ]
    assert len({(wanted.path, wanted.first) for wanted in own}) == len(own)
    shared = [
        [(wanted.path, wanted.first, wanted.nbytes) for wanted in reader.reads if wanted.shared] for reader in readers
    ]
    assert all(ranges == shared[0] for ranges in shared) and bool(shared[0]) == (ranks > 1)


def test_only_a_gpu_gets_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(weights, "ParallelReader", lambda device: made.append(device))
    files = find_model(str(save_checkpoint(tmp_path)))
    open_weights(files, torch.bfloat16, CPU)
    assert not made
    open_weights(files, torch.bfloat16, "cuda:1")
    assert made == [torch.device("cuda:1")]


@pytest.mark.gpu
@pytest.mark.parametrize("small", [True, False])
def test_a_gpu_gets_the_bytes_of_the_file_while_it_still_uses_the_ones_before(file: Path, small: bool) -> None:
    """Staging memory is used again for later ranges, while slow work on the earlier ones is queued."""
    device, stored = torch.device("cuda:0"), torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    slow = torch.randn(4096, 4096, device=device)
    ranges = [file_range(file, first, 9000 + 7 * first % 5000) for first in range(0, 84_000, 700)] * 5
    copies = []
    with closing(ParallelReader(device, **(SMALL if small else {}))) as reader:
        for wanted in ranges:
            reader.announce(wanted)
        for wanted in ranges:
            reader.release()
            read = reader.read(wanted)
            slow = slow @ slow * 1e-2
            copies.append(read.clone())
        torch.cuda.synchronize()
    for wanted, copy in zip(ranges, copies, strict=True):
        assert torch.equal(copy.cpu(), stored[wanted.first : wanted.first + wanted.nbytes])
