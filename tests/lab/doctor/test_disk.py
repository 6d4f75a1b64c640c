"""How fast files are read: counted bytes, limits, and files without direct I/O."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from lab.doctor.subjects import subject

from hotset.base.units import MIB
from hotset.lab.doctor import disk
from hotset.lab.doctor.disk import CHUNK_BYTES, ReadRate, check_disk, judge_rate, read_rate


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    paths[0].write_bytes(bytes(2 * CHUNK_BYTES + 4097))
    paths[1].write_bytes(bytes(CHUNK_BYTES))
    return paths


def test_all_bytes_of_small_files_are_read(files: list[Path]) -> None:
    assert read_rate(files).nbytes == 3 * CHUNK_BYTES + 4097


def test_reading_stops_at_either_limit(files: list[Path]) -> None:
    assert read_rate(files, max_bytes=2 * CHUNK_BYTES).nbytes == 2 * CHUNK_BYTES
    assert read_rate(files, max_seconds=0.0).nbytes == 0


def test_file_systems_without_direct_io_are_read_through_the_cache(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_direct_io(path: Any, flags: int, *others: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *others)

    opened = os.open
    monkeypatch.setattr(disk.os, "open", refuse_direct_io)
    found = read_rate(files)
    assert (found.nbytes, found.direct) == (3 * CHUNK_BYTES + 4097, False)
    assert "no direct I/O" in judge_rate(found, 1).what


def test_a_checkpoint_that_takes_minutes_is_slow() -> None:
    read = ReadRate(2000 * MIB, 1.0, True)
    assert judge_rate(read, 590_000 * MIB).level == "good"
    slow = judge_rate(read, 610_000 * MIB)
    assert slow.level == "slow" and "take 5.1 min" in slow.what and "NVMe" in slow.mend


def test_the_disk_is_skipped_without_weights_and_judged_with_them(files: list[Path]) -> None:
    assert [finding.level for finding in check_disk(subject())] == ["skipped"]
    (found,) = check_disk(subject(weights=tuple(files)))
    assert found.level == "good" and "the weights, 24.0 MiB, take" in found.what
