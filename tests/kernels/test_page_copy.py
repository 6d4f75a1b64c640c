"""Compares page_copy with plain loops, over poisoned memory.

Most tests run with the reference and with the CUDA kernel, which a host compiler builds for the CPU.
"""

import random
from collections.abc import Callable
from unittest import mock

import cuda_on_cpu
import pytest
import torch
from kernel_tensors import all_bytes
from matrix import matrix
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels import cuda_source, page_copy
from hotset.kernels.page_copy import cuda_impl, reference

POISON = 0xAB
Copy = Callable[..., None]


def emulated_copy(pieces: Tensor, device_rows: Tensor, host_rows: Tensor, *, to_host: bool) -> None:
    with mock.patch.object(cuda_source, "kernel", cuda_on_cpu.kernel):
        tuning = cuda_impl.PageCopyTuning(blocks=3, threads=64)
        cuda_impl.copy(pieces, device_rows, host_rows, to_host=to_host, tuning=tuning)


with_each_op = pytest.mark.parametrize(
    "copy",
    [
        pytest.param(reference.copy, id="reference"),
        pytest.param(emulated_copy, id="cuda", marks=cuda_on_cpu.needs_compiler),
    ],
)
both_directions = pytest.mark.parametrize("to_host", [True, False], ids=["to host", "to device"])


def block_of_rows(layers: int, rows: int, width: int, gap: int, offset: int) -> Tensor:
    """Returns random bytes [layers, rows, width] with `gap` bytes after each row. The first row is at byte `offset`.

    If there are gaps, 3 more bytes follow each layer.
    """
    stride = width + gap
    layer = rows * stride + 3 * (gap > 0)
    flat = torch.randint(0, 256, (offset + layers * layer,), dtype=torch.uint8)
    return torch.as_strided(flat, (layers, rows, width), (layer, stride, 1), offset)


def draw_pieces(rows: int, count: int) -> list[tuple[int, int, int]]:
    """Draws pieces that overlap neither on the device nor on the host. Some are empty."""
    device, host = ([block * 8 for block in random.sample(range(rows // 8), count)] for _ in range(2))
    return [(device[i], host[i], random.choice([0, 1, 5, 8])) for i in range(count)]


def check_copy(
    copy: Copy, *, layers: int, width: int, gap: int = 0, offset: int = 0, pieces: int, to_host: bool
) -> None:
    torch.manual_seed(width)
    random.seed(width)
    rows = max(64, 8 * pieces)
    device, host = (block_of_rows(layers, rows, width, gap, offset) for _ in range(2))
    source, target = (device, host) if to_host else (host, device)
    before = all_bytes(source).clone()
    all_bytes(target).fill_(POISON)
    expected = torch.as_strided(all_bytes(target).clone(), target.shape, target.stride(), offset)
    drawn = draw_pieces(rows, pieces)
    for device_row, host_row, count in drawn:
        first_read, first_written = (device_row, host_row) if to_host else (host_row, device_row)
        for layer in range(layers):
            for i in range(count):
                expected[layer, first_written + i] = source[layer, first_read + i]
    copy(torch.tensor(drawn), device, host, to_host=to_host)
    assert torch.equal(all_bytes(target), all_bytes(expected)), "a piece is wrong, or other bytes changed"
    assert torch.equal(all_bytes(source), before)


@with_each_op
@pytest.mark.parametrize(
    ("to_host", "width", "gap", "offset"),
    matrix([True, False], [1, 3, 4, 16, 37, 132, 656, 1152, 20_000], [(0, 0), (0, 4), (16, 0), (7, 1)], together=1),
)
def test_pieces_of_every_layer_are_copied_exactly(copy: Copy, to_host: bool, width: int, gap: int, offset: int) -> None:
    check_copy(copy, layers=2, width=width, gap=gap, offset=offset, pieces=5, to_host=to_host)


@with_each_op
@both_directions
def test_more_pieces_than_a_block_has_threads_are_all_copied(copy: Copy, to_host: bool) -> None:
    check_copy(copy, layers=3, width=24, pieces=150, to_host=to_host)


@with_each_op
def test_a_long_piece_is_divided_among_blocks_and_copied_completely(copy: Copy) -> None:
    device, host = torch.randint(0, 256, (2, 500, 656), dtype=torch.uint8), torch.zeros(2, 500, 656, dtype=torch.uint8)
    copy(torch.tensor([[3, 1, 490]]), device, host, to_host=True)
    assert torch.equal(host[:, 1:491], device[:, 3:493])
    assert not host[:, 0].any() and not host[:, 491:].any()


@with_each_op
def test_index_keys_with_a_gap_after_every_page_are_copied_as_words(copy: Copy) -> None:
    """A page of 400 bytes holds 3 index keys of 132 bytes, so pages do not begin at multiples of 132 bytes."""
    pool, host = torch.randint(0, 256, (2, 5 * 400), dtype=torch.uint8), torch.zeros(2, 20 * 132, dtype=torch.uint8)
    pieces = [(page * 100, position * 33, 3 * 33) for page, position in ((4, 0), (1, 3), (2, 6))]
    copy(torch.tensor(pieces), pool.view(torch.int32)[:, :, None], host.view(torch.int32)[:, :, None], to_host=True)
    read = torch.cat([pool[:, page * 400 : page * 400 + 396] for page in (4, 1, 2)], dim=1)
    assert torch.equal(host[:, : 9 * 132], read) and not host[:, 9 * 132 :].any()


def test_an_empty_list_of_pieces_is_allowed() -> None:
    rows = torch.zeros(1, 4, 4)
    page_copy.to_host(torch.zeros(0, 3, dtype=torch.int64), rows, rows.clone())


def test_rows_of_any_dtype_are_copied_bit_by_bit() -> None:
    device = torch.randint(0, 256, (1, 4, 6), dtype=torch.uint8)  # any bits, which may be NaN
    host = torch.zeros_like(device)
    page_copy.to_host(torch.tensor([[0, 2, 2]]), device.view(torch.bfloat16), host.view(torch.bfloat16))
    assert torch.equal(host[:, 2:], device[:, :2])
    page_copy.to_device(torch.tensor([[3, 3, 1]]), device.view(torch.bfloat16), host.view(torch.bfloat16))
    assert torch.equal(device[:, 3], host[:, 3])


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (torch.zeros(1, 2, 5), "host rows have 5 values, but device rows have 6"),
        (torch.zeros(1, 2, 6).half(), "host rows have dtype torch.float16, but device rows have torch.float32"),
    ],
)
def test_rows_that_differ_between_the_tiers_are_refused(host: Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        page_copy.to_device(torch.tensor([[0, 0, 1]]), torch.zeros(1, 2, 6), host)


@pytest.mark.gpu
@both_directions
@pytest.mark.parametrize("pinned_pieces", [True, False])
@pytest.mark.parametrize(("width", "gap"), [(656, 0), (1152, 0), (132, 0), (37, 3)])
def test_on_a_gpu_pieces_equal_the_references(width: int, gap: int, to_host: bool, pinned_pieces: bool) -> None:
    rows, layers = 4000, 5
    device, host = (block_of_rows(layers, rows, width, gap, 0) for _ in range(2))
    pieces = torch.tensor([*draw_pieces(rows // 2, 200), (rows // 2, rows // 2 + 7, rows // 2 - 7)])
    on_gpu = torch.as_strided(all_bytes(device).cuda(), device.shape, device.stride())
    pinned = torch.as_strided(all_bytes(host).pin_memory(), host.shape, host.stride())
    copy = page_copy.to_host if to_host else page_copy.to_device
    copy(pieces.pin_memory() if pinned_pieces else pieces.cuda(), on_gpu, pinned)
    torch.cuda.synchronize()
    reference.copy(pieces, device, host, to_host=to_host)
    assert torch.equal(all_bytes(on_gpu).cpu(), all_bytes(device)) and torch.equal(all_bytes(pinned), all_bytes(host))
