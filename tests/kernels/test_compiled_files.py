"""Compiled kernels on disk: each is compiled once, and no damaged or foreign file is loaded."""

import errno
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hotset.kernels import cuda_source
from hotset.kernels.compiled_files import CompiledFiles, _with_included, key_of

SOURCE = '#include "rows.cu"\n#include <cuda_fp16.h>\nextern "C" __global__ void copy() {}\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "op"
    folder.mkdir()
    (folder / "rows.cu").write_text('#include "../block.cu"\n')
    (tmp_path / "block.cu").write_text("// block\n")
    (folder / "kernel.cu").write_text(SOURCE)
    return folder / "kernel.cu"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for cuda-core: `compiled` counts what it compiles."""
    state = SimpleNamespace(compiled=[], nvrtc=(0, 13, 0), driver=(0, 13000))

    def compile_source(source: Path, constants: dict[str, int], arch: str) -> Any:
        state.compiled.append(constants)
        return SimpleNamespace(code=f"cubin of {source.read_text()} {constants} {arch}".encode())

    class ObjectCode:
        @staticmethod
        def from_cubin(code: bytes) -> Any:
            return SimpleNamespace(code=code)

    cuda, core, bindings = ModuleType("cuda"), ModuleType("cuda.core"), ModuleType("cuda.bindings")
    core.__version__, core.ObjectCode = "1.2.0", ObjectCode  # type: ignore[attr-defined]
    bindings.nvrtc = SimpleNamespace(nvrtcVersion=lambda: state.nvrtc)  # type: ignore[attr-defined]
    bindings.driver = SimpleNamespace(cuDriverGetVersion=lambda: state.driver)  # type: ignore[attr-defined]
    cuda.core, cuda.bindings = core, bindings  # type: ignore[attr-defined]
    for module in (cuda, core, bindings):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(cuda_source, "compile_source", compile_source)
    return state


def load(source: Path, folder: Path, arch: str = "sm_90a", **constants: int) -> bytes:
    """Loads a kernel as a new process does."""
    code: bytes = cuda_source._load_or_compile(source, constants, arch, CompiledFiles(folder)).code
    return code


def test_a_second_process_compiles_nothing(source: Path, tmp_path: Path, compiler: SimpleNamespace) -> None:
    first = load(source, tmp_path / "cache", THREADS=128)
    assert load(source, tmp_path / "cache", THREADS=128) == first
    assert compiler.compiled == [{"THREADS": 128}]


def test_everything_that_changes_the_result_compiles_again(
    source: Path, tmp_path: Path, compiler: SimpleNamespace
) -> None:
    def compiles(arch: str = "sm_90a", **constants: int) -> bool:
        before = len(compiler.compiled)
        load(source, tmp_path / "cache", arch, **constants)
        return len(compiler.compiled) > before

    assert compiles() and not compiles()
    assert compiles(THREADS=1) and compiles(THREADS=2) and not compiles(THREADS=1)
    assert compiles(arch="sm_100a")
    for path in (source, source.parent / "rows.cu", tmp_path / "block.cu"):
        path.write_text(path.read_text() + "// changed\n")
        assert compiles() and not compiles(), path
    compiler.nvrtc = (0, 13, 1)
    assert compiles()
    compiler.driver = (0, 13010)
    assert compiles() and not compiles()


@pytest.mark.parametrize("damage", [b"", b"short", None], ids=["empty", "short", "one byte"])
def test_a_damaged_file_is_compiled_again(
    source: Path, tmp_path: Path, compiler: SimpleNamespace, damage: bytes | None
) -> None:
    folder = tmp_path / "cache"
    first = load(source, folder)
    (file,) = folder.iterdir()
    stored = file.read_bytes()
    file.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]) if damage is None else damage)
    assert load(source, folder) == first and len(compiler.compiled) == 2
    assert load(source, folder) == first and len(compiler.compiled) == 2


def test_folders_and_files_that_others_can_write_are_not_trusted(
    source: Path, tmp_path: Path, compiler: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    load(source, folder)
    (file,) = folder.iterdir()
    file.chmod(0o666)
    load(source, folder)
    assert len(compiler.compiled) == 2 and f"other users can write to {file}" in caplog.text
    load(source, folder)
    assert len(compiler.compiled) == 2, "the file was written again"
    folder.chmod(0o777)
    load(source, folder)
    assert len(compiler.compiled) == 3 and "other users can open" in caplog.text
    folder.chmod(0o700)
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    load(source, folder)
    assert len(compiler.compiled) == 4 and not file.is_symlink()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_reported_once_and_left_clean(
    source: Path,
    tmp_path: Path,
    compiler: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    folder, files = tmp_path / "cache", CompiledFiles(tmp_path / "cache")

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "rename", fail)
    with caplog.at_level(logging.WARNING):
        for threads in (1, 2, 1):
            cuda_source._load_or_compile(source, {"THREADS": threads}, "sm_90a", files)
    assert len(compiler.compiled) == 3 and not list(folder.iterdir())
    assert len(caplog.records) == 1 and os.strerror(number) in caplog.text


def test_a_file_in_the_place_of_the_folder_does_not_stop_the_start(
    source: Path, tmp_path: Path, compiler: SimpleNamespace
) -> None:
    (tmp_path / "cache").write_text("")
    assert load(source, tmp_path / "cache") and len(compiler.compiled) == 1


def test_readers_and_writers_at_once_see_whole_files(tmp_path: Path) -> None:
    """Every reader gets nothing, or all of what one of the writers has written."""
    versions = [bytes([number]) * (1 << 16) for number in range(8)]

    def use(number: int) -> list[bytes | None]:
        files = CompiledFiles(tmp_path / "cache")
        seen = []
        for _ in range(20):
            files.write("kernel.cubin", versions[number])
            seen.append(files.read("kernel.cubin"))
        return seen

    with ThreadPoolExecutor(8) as threads:
        seen = {value for values in threads.map(use, range(8)) for value in values}
    assert seen <= set(versions)
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["kernel.cubin"]


def test_the_key_contains_all_included_files_of_a_real_kernel() -> None:
    """`swap_in` includes files of its own folder and of the folder above, through other files."""
    kernels = Path(cuda_source.__file__).parent
    source = kernels / "swap_in" / "plan.cu"
    names = {str(path.relative_to(kernels)) for path in _with_included(source, (source.parent, kernels))}
    assert {"swap_in/plan.cu", "swap_in/victims.cu", "block.cu"} <= names
    assert key_of(source, (kernels,), ()).startswith("swap_in-plan-")


@pytest.mark.gpu
def test_a_kernel_from_disk_can_be_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, constants = (
        Path(cuda_source.__file__).parent / "page_copy" / "kernel.cu",
        {"THREADS": 256, "SHARED_BYTES": 7296},
    )
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    first = cuda_source._load_or_compile(source, constants, arch, CompiledFiles(tmp_path / "kernels"))
    assert first.get_kernel("copy_pieces") is not None
    monkeypatch.setattr(cuda_source, "compile_source", None)
    second = cuda_source._load_or_compile(source, constants, arch, CompiledFiles(tmp_path / "kernels"))
    assert second.get_kernel("copy_pieces") is not None and bytes(second.code) == bytes(first.code)
