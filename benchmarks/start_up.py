"""How long an engine takes to start, and how fast a checkpoint is read.

    python benchmarks/start_up.py read --folder /models/tmp --gib 40      (a GPU, or --device cpu)
    python benchmarks/start_up.py start --model dsa-50b-dense             (GPU)
    python benchmarks/start_up.py start --model qwen3-8b -- --host-kv-gib 8

`read` writes files of random bytes, and reads them again with nothing in the page cache: with threads that only read
(direct I/O, as `dd iflag=direct` does, in one thread and in eight), then as an engine does, directly and through the
page cache, and from the page cache. It removes the files.

`start` starts an engine twice, with empty caches of compiled kernels and with full ones, each in a process of its own,
and a third time with a profile. It prints where the time went: until the modules are imported, and the parts that the
log names. Weights are random, unless --model is a directory with weights. Flags of `hotset serve` with values follow
after `--`.
"""

import argparse
import cProfile
import io
import json
import logging
import mmap
import os
import pstats
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[1] / "hotset" / "lab" / "plan" / "configs"
GIB = 1 << 30
FILE_BYTES = 4 * GIB
TENSOR_BYTES = 64 << 20
DIRECT_BYTES = 16 << 20  # as in dd bs=16M
PROFILE_LINES = 45
PROCESS = "HOTSET_START_UP_BENCHMARK"  # in the environment of the process that is timed: when it was started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    read = commands.add_parser("read")
    read.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    read.add_argument("--gib", type=float, default=40.0)
    read.add_argument("--device", default="cuda:0")
    start = commands.add_parser("start")
    start.add_argument("--model", required=True, help="a configuration in hotset/lab/plan/configs, or a directory")
    start.add_argument("--no-profile", action="store_true", help="leaves out the profile, which slows the start")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    options = parser.parse_args(own)
    flags = sys.argv[len(own) + 2 :]
    if options.command == "read":
        measure_reading(options.folder, int(options.gib * GIB), options.device)
    elif PROCESS in os.environ:
        start_engine(options.model, flags, profile=not options.no_profile)
    else:
        start_twice(options.model, flags, own)


def measure_reading(folder: Path, nbytes: int, device_name: str) -> None:
    import torch

    from hotset.models.checkpoint import parallel_reader

    device = torch.device(device_name)
    if device.type == "cuda":
        torch.empty(1, device=device)
    directory = Path(tempfile.mkdtemp(dir=folder))
    try:
        began = time.monotonic()
        files = write_files(directory, nbytes)
        total = sum(file.stat().st_size for file in files)
        print(f"wrote {total / 1e9:.1f} GB in {time.monotonic() - began:.1f} s", flush=True)
        for threads in (1, parallel_reader.THREADS):
            show_rate(f"direct reads of 16 MiB, {threads} threads", total, lambda n=threads: read_raw(files, n), files)
        for title, cached, drop in (
            ("direct", 0.0, True),
            ("page cache, empty", 1.0, True),
            ("page cache", 1.0, False),
        ):
            parallel_reader._cached_share = lambda *_, share=cached: share  # type: ignore[assignment]
            show_rate(f"as an engine, {title}", total, lambda: read_as_engine(files, device), files if drop else [])
    finally:
        shutil.rmtree(directory)


def write_files(directory: Path, nbytes: int) -> list[Path]:
    """Writes random bytes, which no disk can compress."""
    block, files = os.urandom(DIRECT_BYTES), []
    while nbytes > 0:
        path = directory / f"{len(files)}.bin"
        with path.open("wb", buffering=0) as file:
            for _ in range(0, min(nbytes, FILE_BYTES), len(block)):
                file.write(block)
            os.fsync(file.fileno())
        files.append(path)
        nbytes -= FILE_BYTES
    return files


def show_rate(title: str, nbytes: int, read: Callable[[], None], dropped: Sequence[Path]) -> None:
    """Times `read` after these files were dropped from the page cache."""
    for path in dropped:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    began = time.monotonic()
    read()
    seconds = time.monotonic() - began
    print(f"{title:45} {nbytes / seconds / 1e9:7.2f} GB/s  {seconds:6.1f} s", flush=True)


def read_raw(files: Sequence[Path], threads: int) -> None:
    buffers = threading.local()

    def read_block(descriptor: int, offset: int) -> None:
        if not hasattr(buffers, "own"):
            buffers.own = mmap.mmap(-1, DIRECT_BYTES)
        os.preadv(descriptor, [buffers.own], offset)

    descriptors = {os.open(path, os.O_RDONLY | os.O_DIRECT): path.stat().st_size for path in files}
    with ThreadPoolExecutor(threads) as pool:
        jobs = [
            pool.submit(read_block, descriptor, offset)
            for descriptor, size in descriptors.items()
            for offset in range(0, size, DIRECT_BYTES)
        ]
        for job in jobs:
            job.result()
    for descriptor in descriptors:
        os.close(descriptor)


def read_as_engine(files: Sequence[Path], device: Any) -> None:
    """Reads the files in pieces that are neither aligned nor of the size of the buffers, to the device."""
    import torch

    from hotset.models.checkpoint.parallel_reader import FileRange, ParallelReader

    ranges = [
        FileRange(path, first, min(TENSOR_BYTES + 1000, path.stat().st_size - first), f"{path}: {first}")
        for path in files
        for first in range(0, path.stat().st_size, TENSOR_BYTES + 1000)
    ]
    reader = ParallelReader(device)
    for wanted in ranges:
        reader.announce(wanted)
    for wanted in ranges:
        reader.release()
        reader.read(wanted)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    reader.close()


def start_twice(model: str, flags: Sequence[str], own: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as caches:
        environment = os.environ | {"HOTSET_CACHE_DIR": f"{caches}/hotset", "TRITON_CACHE_DIR": f"{caches}/triton"}
        for title in ("first start", "second start", "second start, with a profile"):
            profiled = title.endswith("profile")
            if profiled and "--no-profile" in own:
                continue
            unprofiled = [] if profiled or "--no-profile" in own else ["--no-profile"]
            command = [sys.executable, __file__, *own, *unprofiled, "--", *flags]
            print(f"== {model} {' '.join(flags)}: {title}", flush=True)
            began = time.time()
            subprocess.run(command, env=environment | {PROCESS: str(began)}, check=True)
            print(f"process: {time.time() - began:.1f} s", flush=True)
        for name in ("hotset/kernels", "triton"):
            files = [path for path in Path(caches, name).rglob("*") if path.is_file()]
            print(f"{name}: {len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB", flush=True)


def start_engine(model: str, flags: Sequence[str], *, profile: bool) -> None:
    from hotset.engine.build import build_engine

    imported = time.time() - float(os.environ[PROCESS])
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(relativeCreated)8.0f ms %(message)s")
    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(model, flags, Path(folder))
        profiler = cProfile.Profile()
        began = time.time()
        if profile:
            profiler.enable()
        engine = build_engine(config)
        profiler.disable()
        print(f"imports {imported:.1f} s, engine {time.time() - began:.1f} s", flush=True)
    if profile:
        for order in ("tottime", "cumulative"):
            report = io.StringIO()
            pstats.Stats(profiler, stream=report).strip_dirs().sort_stats(order).print_stats(PROFILE_LINES)
            print(re.sub(r"\n\s*\n", "\n", report.getvalue()), flush=True)
    engine.close()


def engine_config(model: str, flags: Sequence[str], folder: Path) -> Any:
    """Returns the configuration that flags like `--host-kv-gib 8` describe."""
    from hotset.base.config import EngineConfig

    settings: dict[str, Any] = {"model": model}
    if (CONFIGS / f"{model}.json").exists():
        shutil.copy(CONFIGS / f"{model}.json", folder / "config.json")
        settings = {"model": str(folder), "load_format": "dummy"}
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        try:
            settings[flag.removeprefix("--").replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            settings[flag.removeprefix("--").replace("-", "_")] = value
    return EngineConfig(**settings)


if __name__ == "__main__":
    main()
