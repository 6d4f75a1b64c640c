"""Measures what swap-in adds to decode steps, and how much of it is hidden behind other work.

    python benchmarks/hidden_swap_in.py --share 4 --json hidden_swap_in.json

As many contexts as fit decode with tiers auto. As in decode.py, the model is dsa-50b-dense with random weights,
selections are synthetic and have the published miss rates, and prompts are not computed. A layer that selects waits
until its missing rows have been copied. If other layers share its selection (--share), their rows are copied
meanwhile, beside other kernels. The same step is also measured without misses and, with --share, with all copies in
order, each before the next kernel:

    hidden = (step with copies in order - step) / (step with copies in order - step without misses)

--copies varies the blocks and threads of the copies beside other kernels: fewer blocks delay the kernels less, but copy
more slowly. --layers 10 measures a quarter of the model, with a quarter of the KV memory: each layer takes as long, but
the whole run only a fraction of the time.

The same requests decode in all cases, one after another. The first measurement of each engine is left out, because
contexts may still be copied to the host then, which slows the steps' own copies. The table also has the tokens/s with
tiers off.

Bars (required results) for layers that all select: 35 % of swap-in is hidden at 32k tokens and 60 % at 128k, and
tokens/s are 2.5 and 3.8 times those with tiers off. Nothing is hidden so far: docs/benchmarks-swap-in.md says why.

Requires a GPU with 141 GB (H200) and 80 GiB of host memory to pin.
"""

import argparse
import re
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from decode_cases import Rank
from decode_load import abort_all, prefill, timed_steps
from decode_server import RankServer, load_spec
from gpu_timing import require_gpu
from report import Bar, make_parser, report

from hotset.base.config import EngineConfig, TiersMode
from hotset.base.sampling import SamplingParams
from hotset.engine.sizing import kv_budget
from hotset.kernels.swap_in import cuda_impl
from hotset.memory.host_store import HostStore
from hotset.models.spec import ModelSpec
from hotset.models.split import WHOLE_MODEL
from hotset.tiers.hot_buffers import HotBuffers

MODEL = "dsa-50b-dense"
CHUNK = 16384  # prompt tokens per step
SEATS = 128
ANSWER = 512  # maximum number of generated tokens
WARM_UP_STEPS = 20  # enough for the LRU order to follow the selection
IN_ORDER = "132x512"  # copies that run alone may use the whole GPU
TUNED_COPY = f"{cuda_impl.TUNED.copy_blocks}x{cuda_impl.TUNED.copy_threads}"
SETTLING_STEPS = 8  # before each case: the first one captures, the others follow the new selection
HIDDEN_BARS, SPEED_BARS = {32768: 0.35, 131072: 0.6}, {32768: 2.5, 131072: 3.8}  # by context


@contextmanager
def copies_by(shape: str) -> Iterator[None]:
    """Sets the blocks and threads per block of copies in launches of their own, like 32x256."""
    blocks, threads = map(int, shape.split("x"))
    tuning = replace(cuda_impl.TUNED, copy_blocks=blocks, copy_threads=threads)
    launch = cuda_impl._launch_copy

    def launch_by(*arguments: Any, **options: Any) -> None:
        launch(*arguments, **options | {"tuning": tuning})

    with mock.patch.object(cuda_impl, "_launch_copy", launch_by):
        yield


@contextmanager
def copies_in_order() -> Iterator[None]:
    """Makes all copies run on the stream of the other kernels, each before the next kernel."""
    with copies_by(IN_ORDER), mock.patch.object(HotBuffers, "prefetch", HotBuffers.copy):
        yield


def copy_shape(text: str) -> str:
    """Checks an argument of --copies."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be blocks and threads, like {TUNED_COPY}")
    return text


class Case:
    """Requests that decode in one engine."""

    def __init__(self, rank: Rank, server: RankServer, context: int) -> None:
        self._rank, self._server, self._context = rank, server, context
        rank.select_in(context)
        self._engine, self._runner = server.engine(), server.runner
        self.requests = server.max_requests(context + ANSWER)
        params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
        self._ids = prefill(self._engine, self.requests, context, params)
        timed_steps(self._engine, WARM_UP_STEPS)

    def step_seconds(self, steps: int, *, misses: bool = True) -> float:
        """Returns the mean time of a step. Without `misses`, all steps select the same rows."""
        self._rank.select_in(self._context, misses=misses)
        graphs = self._runner._graphs
        if graphs is not None:
            graphs._captured.clear()
            graphs._memory_pool = torch.cuda.graph_pool_handle()  # the old pool was freed with its last graph
        timed_steps(self._engine, SETTLING_STEPS)
        before = self._missed_rows()
        seconds = statistics.mean(timed_steps(self._engine, steps)[1:])  # the first step ended before the timing began
        assert not self._engine.idle, "the answers have ended; lower --steps"
        missed = self._missed_rows() > before
        assert missed == (misses and self._engine.stats().tiered > 0), f"rows were {'' if missed else 'not '}missing"
        return seconds

    def _missed_rows(self) -> int:
        return sum(self._engine.stats().slot_misses.values())

    def row(self, tiers: str, seconds: float, **columns: Any) -> dict[str, Any]:
        """Returns a row of the table."""
        times = {"step ms": seconds * 1e3, "tokens/s": self.requests / seconds}
        return {"context": self._context, "requests": self.requests, "tiers": tiers} | times | columns

    def close(self) -> None:
        abort_all(self._engine, self._ids)


def measure(rank: Rank, server: RankServer, context: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row of the table for each shape of copies.

    If every layer selects for itself, no copies run beside other kernels. Steps with copies in order then launch the
    same kernels, and differences between rows are noise.
    """
    case, steps = Case(rank, server, context), options.steps
    case.step_seconds(steps)  # until all contexts have been copied to the host
    in_order = None
    if options.share > 1:
        with copies_in_order():
            in_order = case.step_seconds(steps)
    without_misses = case.step_seconds(steps, misses=False)
    rows = []
    for shape in options.copies:
        with copies_by(shape):
            seconds = case.step_seconds(steps)
        without_hiding = in_order or seconds
        times = {"in order ms": without_hiding * 1e3, "no misses ms": without_misses * 1e3}
        hidden = (without_hiding - seconds) / (without_hiding - without_misses)
        rows.append(case.row("auto", seconds, **times, copies=shape, hidden=hidden))
    case.close()
    return rows


def without_tiers(rank: Rank, server: RankServer, context: int, steps: int) -> dict[str, Any]:
    """Returns the row of as many resident requests as fit."""
    case = Case(rank, server, context)
    case.step_seconds(steps)
    row = case.row("off", case.step_seconds(steps))
    case.close()
    return row


def make_config(tiers: TiersMode, options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        tiers=tiers,
        max_num_seqs=SEATS,
        max_num_batched_tokens=CHUNK,
        device_kv_gib=options.device_gib,
        host_kv_gib=None if tiers == "off" else options.host_gib,
        max_model_len=max(options.contexts) + ANSWER,
        kv_dtype="fp8",
        index_dtype="fp8",
    )


def measure_all(rank: Rank, options: argparse.Namespace) -> list[dict[str, Any]]:
    decoder, device = rank.decoder, rank.decoder.device
    configs = {tiers: make_config(tiers, options) for tiers in ("off", "auto")}
    # Both budgets are computed before host memory is allocated, because they check how much of it is free.
    budgets = {
        tiers: kv_budget(config, decoder.kv_shape, rank.spec.context, device) for tiers, config in configs.items()
    }
    host = HostStore(decoder.kv_shape, budgets["auto"].host_pages, configs["auto"].page_rows, device)
    rows = []
    for tiers, config in configs.items():
        server = RankServer(rank.model, rank.spec, config, budgets[tiers], None if tiers == "off" else host)
        for context in options.contexts:
            if tiers == "off":
                measured = [without_tiers(rank, server, context, options.steps)]
            else:
                measured = measure(rank, server, context, options)
            print(*measured, sep="\n", flush=True)
            rows += measured
        del server
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    host.close()
    return rows


def bars(rows: list[dict[str, Any]]) -> list[Bar]:
    result = []
    for context in {row["context"]: None for row in rows}:
        of_context = [row for row in rows if row["context"] == context]
        off = next(row for row in of_context if row["tiers"] == "off")
        best = max((row for row in of_context if row["tiers"] == "auto"), key=lambda row: row["tokens/s"])
        what = f"{context} tokens, copies {best['copies']}"
        if context in HIDDEN_BARS:
            result.append(Bar(f"share of swap-in hidden, {what}", best["hidden"], HIDDEN_BARS[context], at_least=True))
            of_off = best["tokens/s"] / off["tokens/s"]
            result.append(Bar(f"tokens/s of those with tiers off, {what}", of_off, SPEED_BARS[context], at_least=True))
    return result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--contexts", nargs="+", type=int, default=[32768, 131072], help="context lengths in tokens")
    parser.add_argument(
        "--copies",
        nargs="+",
        type=copy_shape,
        default=[TUNED_COPY],
        help=f"blocks and threads of copies beside other kernels, like {TUNED_COPY}",
    )
    parser.add_argument("--layers", type=int, help="number of layers, with KV memory in proportion; default: all")
    parser.add_argument("--share", type=int, default=1, help="number of layers that use the selection of one indexer")
    parser.add_argument("--device-gib", type=float, default=16, help="GiB of device memory for KV")
    parser.add_argument("--host-gib", type=float, default=80, help="GiB of the host store")
    parser.add_argument("--steps", type=int, default=16, help="timed steps of each case")
    options = parser.parse_args()
    require_gpu()
    spec = load_spec(MODEL, layers=options.layers, layers_per_indexer=options.share)
    fraction = spec.layers / load_spec(MODEL).layers
    options.device_gib, options.host_gib = options.device_gib * fraction, options.host_gib * fraction
    rows = measure_all(load_rank(spec, torch.device("cuda"), torch.bfloat16), options)
    report("Swap-in behind other work", rows, options.json, "prompts are not computed; selections are synthetic")
    if options.share == 1:
        report("Bars", [bar.row() for bar in bars(rows)], None)


def load_rank(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Rank:
    return Rank.load(
        name=MODEL,
        split_name="one",
        spec=spec,
        split=WHOLE_MODEL,
        device=device,
        dtype=dtype,
        max_step_tokens=CHUNK + SEATS,
    )


if __name__ == "__main__":
    main()
