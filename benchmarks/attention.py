"""Measures sparse MLA decode attention on one GPU against the copy bandwidth and the matrix rate of the same run.

    python benchmarks/attention.py --json attention.json --png attention.png

Each request has one query and selects 2048 random rows from a pool of about 2 GiB. MLA rows have 512 + 64 values, in
bf16 (1152 bytes) or fp8 (656 bytes). GB/s counts every selected row once per query; TFLOP/s counts the two matrix
products. "of copy" and "of matrix" are shares of a large copy's bandwidth and of a large matrix product's rate. The L2
is flushed before every call. Bars (required results), at batch 32 and 128: 60 % of the copy bandwidth with 16 heads;
50 % (bf16 rows) and 40 % (fp8 rows) of the matrix rate with 128 heads. Other combinations have no bar.

--peer FILE compares with another kernel, such as FlashMLA's: "speedup" is its time over ours. With 64 and 128 heads and
fp8 rows, Hotset must be as fast in every case, and 1.05 times as fast in the geometric mean. --sweep tries numbers of
splits: use its times to set HOPPER and the costs of splits in hotset/kernels/sparse_attention/launch.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from gpu_timing import copy_bandwidth, matrix_rate, seconds_of
from op_runner import OpBenchmark, PeerComparison, Sweep, run
from report import Bar, Row
from torch import Tensor

from hotset.kernels.rows import RowLayout, mla_row
from hotset.kernels.sparse_attention import sparse_attention
from hotset.kernels.sparse_attention.launch import (
    HOPPER,
    MAX_SPLITS,
    PORTABLE,
    AttentionShape,
    GpuTraits,
    LaunchConfig,
    choose_launch,
    with_splits,
)

TOPK, RANK, ROPE = 2048, 512, 64
SCALE = (RANK + ROPE) ** -0.5
POOL_BYTES = 2 << 30
ENCODED_ROWS = 1 << 16  # the pool repeats these rows, because only the addresses of rows affect the time
INPUTS = 3  # number of inputs, which are used in rotation
COPY_BAR = {16: 0.6}
MATRIX_BAR = {(128, "bf16"): 0.5, (128, "fp8"): 0.4}
BAR_BATCHES = (32, 128)


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One combination that is measured."""

    batch: int
    heads: int
    fp8: bool

    @property
    def layout(self) -> RowLayout:
        return mla_row(RANK, ROPE, torch.bfloat16, self.fp8)

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.batch, self.heads, TOPK, RANK, ROPE, self.fp8)

    @property
    def selected_bytes(self) -> int:
        return self.batch * TOPK * self.layout.row_bytes

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.heads * TOPK * (2 * RANK + ROPE)


ALL = [
    AttentionCase(batch, heads, fp8)
    for heads in (16, 32, 64, 128)
    for fp8 in (False, True)
    for batch in (1, 8, 32, 128)
]
QUICK = [case for case in ALL if case.heads != 64 and case.batch in BAR_BATCHES]


@cache
def pool(fp8: bool) -> Tensor:
    layout = mla_row(RANK, ROPE, torch.bfloat16, fp8)
    rows = layout.encode(torch.randn(ENCODED_ROWS, RANK + ROPE, dtype=torch.bfloat16, device="cuda"))
    return rows.repeat(POOL_BYTES // layout.stride_bytes // ENCODED_ROWS, 1)


def measure_seconds(case: AttentionCase, launch: LaunchConfig | None = None) -> float:
    """Returns the seconds of a call, with `launch` or with the launch that `sparse_attention` chooses."""
    rows = pool(case.fp8)
    inputs = [
        (
            torch.randn(case.batch, case.heads, RANK + ROPE, dtype=torch.bfloat16, device="cuda"),
            torch.randint(0, rows.shape[0], (case.batch, TOPK), device="cuda"),
        )
        for _ in range(INPUTS)
    ]

    def call(q: Tensor, row_ids: Tensor) -> object:
        if launch is None:
            return sparse_attention(q, rows, row_ids, case.layout, RANK, SCALE)
        from hotset.kernels.sparse_attention import triton_impl

        return triton_impl.sparse_attention(q, rows, row_ids, case.layout, RANK, SCALE, launch)

    return seconds_of([partial(call, q, row_ids) for q, row_ids in inputs])


def measure(case: AttentionCase) -> Row:
    seconds, launch = measure_seconds(case), choose_launch(case.shape, gpu_traits())
    return {
        "batch": case.batch,
        "heads": case.heads,
        "rows": "fp8" if case.fp8 else "bf16",
        "kernel": f"{launch.kernel} {launch.block_heads}x{launch.block_keys}",
        "splits": launch.splits,
        "us": seconds * 1e6,
        "GB/s": case.selected_bytes / seconds * 1e-9,
        "TFLOP/s": case.flops / seconds * 1e-12,
        "of copy": case.selected_bytes / seconds / copy_bandwidth(),
        "of matrix": case.flops / seconds / matrix_rate(),
    }


def bars(rows: list[Row]) -> list[Bar]:
    results = []
    for row in rows:
        if row["batch"] in BAR_BATCHES:
            what = f"{row['heads']} heads, {row['rows']} rows, batch {row['batch']}"
            if (limit := COPY_BAR.get(row["heads"])) is not None:
                results.append(Bar(f"{what}: of copy", row["of copy"], limit, at_least=True))
            if (limit := MATRIX_BAR.get((row["heads"], row["rows"]))) is not None:
                results.append(Bar(f"{what}: of matrix", row["of matrix"], limit, at_least=True))
    return results


def gpu_traits() -> GpuTraits:
    properties = torch.cuda.get_device_properties(0)
    return GpuTraits(properties.multi_processor_count, properties.major == 9)


def sweeps() -> Iterator[Sweep]:
    """Yields the launches of HOPPER and PORTABLE (the Triton kernel) with half, all and twice the splits chosen."""
    for heads in (16, 32):
        for fp8 in (False, True):
            for batch in (8, 16, 32, 128):
                case, tunings = AttentionCase(batch, heads, fp8), {}
                for launch in (HOPPER[fp8, heads], PORTABLE[fp8, heads]):
                    chosen = with_splits(launch, case.shape, gpu_traits()).splits
                    for splits in sorted({max(1, chosen // 2), chosen, min(MAX_SPLITS, 2 * chosen)}):
                        name = f"{launch.kernel} {launch.block_heads}x{launch.block_keys}, {splits} splits"
                        tunings[name + (" (chosen)" if splits == chosen else "")] = replace(launch, splits=splits)
                yield Sweep(f"{heads} heads, {'fp8' if fp8 else 'bf16'} rows", tunings, {
                    f"batch {batch}": partial(measure_seconds, case)
                })  # fmt: skip


OP = OpBenchmark(
    doc=__doc__,
    title=f"Sparse MLA decode attention, top-k {TOPK}",
    cases=ALL,
    quick=QUICK,
    measure=measure,
    bars=bars,
    peer=PeerComparison(
        columns=("batch", "heads", "rows"),
        mean=1.05,
        slowest=1.0,
        counts=lambda row: row["heads"] >= 64 and row["rows"] == "fp8",
    ),
    sweeps=sweeps,
    drawn=("us", "of copy", "of matrix"),
)

if __name__ == "__main__":
    run(OP)
