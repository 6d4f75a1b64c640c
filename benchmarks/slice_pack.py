"""Packing and unpacking the heads that travel between unequal degrees of tensor parallelism, beside copy and wire.

A chunk of 8192 tokens of a model of 30 layers with 8 KV heads of 128 in bfloat16, between one rank of the source and
one of the target: 2 heads, 1024 bytes of each row, 252 MB. Packing reads and writes these once, so its limit is twice
that over the copy bandwidth of the same run (123 us at 4.1 TB/s); the wire takes 10 ms at 25 GB/s. The bars: packing
and unpacking in device memory each reach 70 % of the copy bandwidth, and together take at most 10 % of the wire's time.
Rows in pinned host memory, where contexts of several workers land, are shown as well: the bus is their limit.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_timing import Call, copy_bandwidth, require_gpu, seconds_of
from report import make_parser, report
from torch import Tensor

from hotset.kernels.fast_path import kernels_of
from hotset.kernels.slice_pack import RowSlices, slice_pack, slice_unpack

TOKENS, LAYERS, HEADS, HEAD_BYTES, PAGE_ROWS = 8192, 30, 8, 128 * 2, 64
INPUTS = 2  # that calls rotate among: contexts in pages of their own
WIRE = 25e9  # bytes per second
LEAST_OF_COPY, MAX_WIRE_SHARE = 0.7, 0.1


@dataclass(frozen=True)
class Passage:
    """What one rank of the source sends to one of the target: the heads of the smaller of the two."""

    source_ranks: int
    target_ranks: int

    @property
    def name(self) -> str:
        return f"TP{self.source_ranks} -> TP{self.target_ranks}"

    @property
    def heads(self) -> int:
        return HEADS // max(self.source_ranks, self.target_ranks)

    @property
    def nbytes(self) -> int:
        return LAYERS * TOKENS * 2 * self.heads * HEAD_BYTES

    def slices(self, ranks: int) -> RowSlices:
        """K and V of the last heads of a row that holds those of one rank of `ranks`."""
        held, moved = HEADS // ranks * HEAD_BYTES, self.heads * HEAD_BYTES
        return RowSlices(((held - moved, moved), (2 * held - moved, moved)))


@dataclass(frozen=True)
class Side:
    """The stores of one rank, and the pages in which its contexts lie."""

    stores: list[Tensor]
    contexts: list[Tensor]  # [pages] int64, on the device


def side(ranks: int, *, pinned: bool = False) -> Side:
    pages = TOKENS // PAGE_ROWS
    shape = (INPUTS * pages, PAGE_ROWS, 2 * HEADS // ranks * HEAD_BYTES)
    stores = []
    for _ in range(LAYERS):
        store = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        stores.append(torch.empty(shape, dtype=torch.uint8, pin_memory=True).copy_(store) if pinned else store)
    shuffled = torch.randperm(INPUTS * pages, device="cuda")
    return Side(stores, list(shuffled.split(pages)))


def check(passage: Passage, source: Side, target: Side) -> None:
    """What is timed does what it should: every byte that moves, and none beside them."""
    taken, put = passage.slices(passage.source_ranks), passage.slices(passage.target_ranks)
    packed = torch.empty(passage.nbytes, dtype=torch.uint8, device="cuda")
    here, there = source.contexts[0], target.contexts[-1]
    slice_pack(source.stores, here, 0, TOKENS, taken, packed)
    before = [store.clone() for store in target.stores]
    slice_unpack(packed, target.stores, there, 0, TOKENS, put)
    torch.cuda.synchronize()
    for store, old, sent in zip(target.stores, before, source.stores, strict=True):
        for (begin, nbytes), (first, _) in zip(put.spans, taken.spans, strict=True):
            moved = sent[here.to(sent.device)][..., first : first + nbytes]
            old[there.to(old.device), :, begin : begin + nbytes] = moved.to(old.device)
        assert torch.equal(store, old), f"{passage.name}: bytes went astray"


def packs(passage: Passage, of: Side, packed: Tensor) -> list[Call]:
    slices = passage.slices(passage.source_ranks)
    return [partial(slice_pack, of.stores, pages, 0, TOKENS, slices, packed) for pages in of.contexts]


def unpacks(passage: Passage, of: Side, packed: Tensor) -> list[Call]:
    slices = passage.slices(passage.target_ranks)
    return [partial(slice_unpack, packed, of.stores, pages, 0, TOKENS, slices) for pages in of.contexts]


def row(passage: Passage, op: str, memory: str, spent: float) -> dict[str, Any]:
    of_copy, of_wire = 2 * passage.nbytes / spent / copy_bandwidth(), spent * WIRE / passage.nbytes
    bar = "-"
    if memory == "device":
        met = of_copy >= LEAST_OF_COPY if "+" not in op else of_wire <= MAX_WIRE_SHARE
        bar = "met" if met else "MISSED"
    return {
        "passage": passage.name,
        "op": op,
        "rows in": memory,
        "MB": round(passage.nbytes / 1e6),
        "us": spent * 1e6,
        "GB/s moved": round(passage.nbytes / spent / 1e9),
        "of copy": of_copy if "+" not in op else "-",
        "of wire": of_wire,
        "bar": bar,
    }


def measure(passage: Passage, pinned: bool) -> list[dict[str, Any]]:
    source, target = (side(ranks, pinned=pinned) for ranks in (passage.source_ranks, passage.target_ranks))
    check(passage, source, target)
    packed = torch.randint(0, 256, (passage.nbytes,), dtype=torch.uint8, device="cuda")
    pack, unpack = (seconds_of(calls(passage, of, packed)) for calls, of in ((packs, source), (unpacks, target)))
    memory = "host" if pinned else "device"
    times = {"pack": pack, "unpack": unpack, "pack + unpack": pack + unpack}
    return [row(passage, op, memory, spent) for op, spent in times.items()]


@contextmanager
def constants(**changed: int) -> Iterator[None]:
    impl = kernels_of("slice_pack")
    before = {name: getattr(impl, name) for name in changed}
    for name, value in changed.items():
        setattr(impl, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(impl, name, value)


def sweep(passages: Sequence[Passage]) -> list[dict[str, Any]]:
    """The constants at the top of triton_impl: what else they could be."""
    results = []
    sides = {ranks: side(ranks) for passage in passages for ranks in (passage.source_ranks, passage.target_ranks)}
    for piece in (512, 1024, 256):
        for program in (16 << 10, 8 << 10, 32 << 10):
            for warps in (4, 8, 2):
                tried: dict[str, Any] = {"piece": piece, "program": program, "warps": warps}
                with constants(PIECE_BYTES=piece, PROGRAM_BYTES=program, WARPS=warps):
                    for passage in passages:
                        packed = torch.empty(passage.nbytes, dtype=torch.uint8, device="cuda")
                        for op, calls, ranks in (
                            ("pack", packs, passage.source_ranks),
                            ("unpack", unpacks, passage.target_ranks),
                        ):
                            spent = seconds_of(calls(passage, sides[ranks], packed))
                            tried[f"{passage.name} {op}"] = 2 * passage.nbytes / spent / copy_bandwidth()
                results.append(tried)
    return results


def draw(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [each for each in results if each["rows in"] == "device"]
    alone, together = ([each for each in shown if ("+" in each["op"]) == both] for both in (False, True))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), width_ratios=(2, 1))
    left.bar([f"{each['passage']}\n{each['op']}" for each in alone], [each["of copy"] for each in alone])
    left.axhline(LEAST_OF_COPY, color="black", linewidth=0.8)
    left.set(title="of the copy bandwidth", ylim=(0, 1.1))
    right.bar([each["passage"] for each in together], [each["of wire"] for each in together])
    right.axhline(MAX_WIRE_SHARE, color="black", linewidth=0.8)
    right.set(title="pack + unpack, of the wire's time")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


@torch.inference_mode()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--png", type=Path, help="also draw the results to this file")
    parser.add_argument("--quick", action="store_true", help="only what the bars are about")
    parser.add_argument("--sweep", action="store_true", help="instead: try other constants of the kernel")
    options = parser.parse_args()
    require_gpu()
    passages = (Passage(4, 2), Passage(2, 4))
    if options.sweep:
        report("Constants of the slice kernel: share of the copy bandwidth", sweep(passages), options.json)
        return
    places = (False,) if options.quick else (False, True)
    results = [each for pinned in places for passage in passages for each in measure(passage, pinned)]
    notes = (
        f"copy bandwidth {copy_bandwidth() * 1e-12:.2f} TB/s; bars: {LEAST_OF_COPY:.0%} of it each; "
        f"pack + unpack at most {MAX_WIRE_SHARE:.0%} of a wire of {WIRE * 1e-9:.0f} GB/s"
    )
    title = f"Slices of {TOKENS} tokens, {LAYERS} layers, {HEADS} KV heads of {HEAD_BYTES // 2}, bf16"
    report(title, results, options.json, notes)
    if options.png is not None:
        draw(results, options.png)


if __name__ == "__main__":
    main()
