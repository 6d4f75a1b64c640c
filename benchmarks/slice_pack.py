"""Measures packing and unpacking of heads for unequal tensor-parallel splits, against the copy bandwidth on one GPU.

    python benchmarks/slice_pack.py --json slice_pack.json --png slice_pack.png

A chunk of 8192 tokens of a model with 30 layers and 8 KV heads of 128 in bf16 goes from one source rank to one target
rank: 2 heads, 1024 bytes of each row, 252 MB. Packing reads and writes every byte once, so it takes at least the time
of 2 x 252 MB at the copy bandwidth of the same run (123 us at 4.1 TB/s). A network of 25 GB/s needs 10 ms for 252 MB.
Rows in pinned host memory, where contexts land in engines of several workers, are measured as well; the bus limits
their speed. Bars (required results), for rows in device memory: packing and unpacking each reach 70 % of the copy
bandwidth, and together take at most 10 % of the network's time.
"""

from dataclasses import dataclass
from functools import partial

import torch
from gpu_timing import Call, copy_bandwidth, seconds_of
from op_runner import OpBenchmark, run
from report import Bar, Row
from torch import Tensor

from hotset.base.paged_span import PagedSpan
from hotset.kernels.slice_pack import RowSlices, SlicedRows, copy_slices

TOKENS, LAYERS, HEADS, HEAD_BYTES, PAGE_ROWS = 8192, 30, 8, 128 * 2, 64
INPUTS = 2  # number of contexts, which have separate pages and are used in rotation
NETWORK_BANDWIDTH = 25e9  # bytes per second
MIN_COPY_SHARE, MAX_NETWORK_SHARE = 0.7, 0.1


@dataclass(frozen=True)
class SplitChange:
    """The heads that one source rank sends to one target rank: those of the smaller of the two shards."""

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
        """Returns the slices of the sent heads in a row of a rank, if the heads are split over `ranks` ranks.

        The sent heads are the last ones of the row's K and of its V.
        """
        shard_bytes, sent_bytes = HEADS // ranks * HEAD_BYTES, self.heads * HEAD_BYTES
        return RowSlices(((shard_bytes - sent_bytes, sent_bytes), (2 * shard_bytes - sent_bytes, sent_bytes)))


@dataclass(frozen=True)
class RankStores:
    """The stores of one rank, one per layer, and the pages of its contexts."""

    stores: list[Tensor]
    contexts: list[Tensor]  # for each context: its pages [pages] int64, on the device

    def rows(self, slices: RowSlices) -> list[SlicedRows]:
        page_bytes, row_bytes, _ = self.stores[0].stride()
        bases = tuple((store.data_ptr(),) for store in self.stores)
        return [SlicedRows(PagedSpan(bases, page_bytes, PAGE_ROWS, row_bytes), slices)]


def make_stores(ranks: int, *, pinned: bool = False) -> RankStores:
    pages = TOKENS // PAGE_ROWS
    shape = (INPUTS * pages, PAGE_ROWS, 2 * HEADS // ranks * HEAD_BYTES)
    stores = []
    for _ in range(LAYERS):
        store = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        stores.append(torch.empty(shape, dtype=torch.uint8, pin_memory=True).copy_(store) if pinned else store)
    shuffled = torch.randperm(INPUTS * pages, device="cuda")
    return RankStores(stores, list(shuffled.split(pages)))


def check(change: SplitChange, source: RankStores, target: RankStores) -> None:
    """Checks that pack and unpack copy the expected bytes and leave all other bytes unchanged."""
    source_slices, target_slices = change.slices(change.source_ranks), change.slices(change.target_ranks)
    packed = torch.empty(change.nbytes, dtype=torch.uint8, device="cuda")
    source_pages, target_pages = source.contexts[0], target.contexts[-1]
    piece = packed.data_ptr(), packed.device
    copy_slices(source.rows(source_slices), source_pages, 0, TOKENS, *piece, unpack=False)
    expected_stores = [store.clone() for store in target.stores]
    copy_slices(target.rows(target_slices), target_pages, 0, TOKENS, *piece, unpack=True)
    torch.cuda.synchronize()
    for store, expected, sent in zip(target.stores, expected_stores, source.stores, strict=True):
        for (start, nbytes), (first, _) in zip(target_slices.spans, source_slices.spans, strict=True):
            moved = sent[source_pages.to(sent.device)][..., first : first + nbytes]
            expected[target_pages.to(expected.device), :, start : start + nbytes] = moved.to(expected.device)
        assert torch.equal(store, expected), f"{change.name}: wrong bytes in the target store"


def pack_calls(change: SplitChange, rank: RankStores, packed: Tensor) -> list[Call]:
    rows, address, device = rank.rows(change.slices(change.source_ranks)), packed.data_ptr(), packed.device
    return [partial(copy_slices, rows, pages, 0, TOKENS, address, device, unpack=False) for pages in rank.contexts]


def unpack_calls(change: SplitChange, rank: RankStores, packed: Tensor) -> list[Call]:
    rows, address, device = rank.rows(change.slices(change.target_ranks)), packed.data_ptr(), packed.device
    return [partial(copy_slices, rows, pages, 0, TOKENS, address, device, unpack=True) for pages in rank.contexts]


@torch.inference_mode()
def measure(case: tuple[SplitChange, bool]) -> list[Row]:
    change, pinned = case
    source, target = (make_stores(ranks, pinned=pinned) for ranks in (change.source_ranks, change.target_ranks))
    check(change, source, target)
    packed = torch.randint(0, 256, (change.nbytes,), dtype=torch.uint8, device="cuda")
    pack_s = seconds_of(pack_calls(change, source, packed))
    unpack_s = seconds_of(unpack_calls(change, target, packed))
    times = {"pack": pack_s, "unpack": unpack_s, "pack + unpack": pack_s + unpack_s}
    return [
        {
            "split": change.name,
            "op": op,
            "rows in": "host" if pinned else "device",
            "MB": round(change.nbytes / 1e6),
            "us": seconds * 1e6,
            "GB/s": round(change.nbytes / seconds / 1e9),
            "of copy": 2 * change.nbytes / seconds / copy_bandwidth() if "+" not in op else "-",
            "of network": seconds * NETWORK_BANDWIDTH / change.nbytes,
        }
        for op, seconds in times.items()
    ]


def bars(rows: list[Row]) -> list[Bar]:
    results = []
    for row in rows:
        if row["rows in"] == "device":
            what = f"{row['split']}, {row['op']}"
            if row["of copy"] == "-":
                results.append(Bar(f"{what}: of the network's time", row["of network"], MAX_NETWORK_SHARE))
            else:
                results.append(Bar(f"{what}: of copy", row["of copy"], MIN_COPY_SHARE, at_least=True))
    return results


CHANGES = (SplitChange(4, 2), SplitChange(2, 4))
OP = OpBenchmark(
    doc=__doc__,
    title=f"Slices of {TOKENS} tokens, {LAYERS} layers, {HEADS} KV heads of {HEAD_BYTES // 2}, bf16",
    cases=[(change, pinned) for pinned in (False, True) for change in CHANGES],
    quick=[(change, False) for change in CHANGES],
    measure=measure,
    bars=bars,
    drawn=("of copy", "of network"),
)

if __name__ == "__main__":
    run(OP)
