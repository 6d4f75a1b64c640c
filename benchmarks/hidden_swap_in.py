"""Measures how much of swap-in is hidden if decode steps are selected in parts.

    python benchmarks/hidden_swap_in.py --json hidden_swap_in.json

As many contexts as fit decode with tiers auto, as in serving.py: dsa-50b-dense with random weights, synthetic
selections with the published miss rates, prompts that are not computed. In one part, a step waits in each layer until
all missing rows have been copied. In several parts, the rows of one are copied while others are selected and attended
to. Nothing else changes. What a step takes longer than one in which no row is missing is the swap-in that still shows:

    hidden = (step in one part - step in several parts) / (step in one part - step without misses)

"no misses ms" is a step without misses in the same parts: what several parts cost where nothing is left to hide.

--copies also varies the blocks and threads of the copies that run beside other kernels: fewer delay these less, but
copy more slowly. With 24x1024:alone, each of 24 blocks has a multiprocessor on which only kernels with little shared
memory run beside it, and scoring leaves as many free. --layers 10 measures a quarter of the model, with a quarter of
the KV memory: layers take as long, and the whole run a fraction of the time.

The same requests decode in all cases, one after another. Steps in one part and steps without misses are measured before
and after all others, and their means count. The first measurement of each engine is left out: contexts may still be
copied to the host then, which takes the bus from the steps. The table also has the tokens/s with tiers off.

Bars (required results): with the best ratio of parts, 35 % of swap-in is hidden at 32k tokens and 60 % at 128k, and
tokens/s are 2.5 and 3.8 times those with tiers off.

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

import serving
import torch
from decode_load import abort_all, prefill, timed_steps
from gpu_timing import require_gpu
from report import Bar, make_parser, report
from serving import ModelSetup, ServingMemory, load_spec, make_engine, max_requests
from synthetic_prefill import SyntheticPrefillModel, SyntheticSelection

from hotset.base.sampling import SamplingParams
from hotset.kernels.index_topk import cuda_score
from hotset.kernels.swap_in import cuda_impl
from hotset.models.decoder import Decoder
from hotset.models.spec import KvStorage, MlaSpec, ModelSpec

MODEL = "dsa-50b-dense"
ONE_PART = "1"
SHARED_ALONE = 200 << 10  # bytes of shared memory beside which scoring, selection and attention do not fit
TUNED_COPY = f"{cuda_impl.TUNED.copy_blocks}x{cuda_impl.TUNED.copy_threads}"
RATIOS = ["1:1", "3:2", "1:1:1", "1:2:1", "1:1:1:1", "1:2:3:2", "1:2:3:3:2:1"]
SETTLING_STEPS = 8  # before each case: the first one captures, the others follow the new selection
HIDDEN_BARS, SPEED_BARS = {32768: 0.35, 131072: 0.6}, {32768: 2.5, 131072: 3.8}  # by context


@contextmanager
def copies_by(shape: str) -> Iterator[None]:
    """Makes copies that run beside other kernels use so many blocks and threads per block, like 32x256. With
    24x1024:alone, scoring leaves as many multiprocessors free."""
    size, alone, _ = shape.partition(":alone")
    blocks, threads = map(int, size.split("x"))
    tuning = replace(
        cuda_impl.TUNED, copy_blocks=blocks, copy_threads=threads, copy_shared_bytes=SHARED_ALONE if alone else 0
    )
    launch, all_of = cuda_impl._launch_copy, cuda_score.multiprocessors

    def launch_by(*arguments: Any, **options: Any) -> None:
        launch(*arguments, **options | {"tuning": tuning})

    def for_scoring(device: torch.device) -> int:
        left = all_of(device) - (blocks if alone else 0)
        if left < 1:
            raise SystemExit(f"--copies {shape}: the GPU has {all_of(device)} multiprocessors; leave some for scoring")
        return left

    with (
        mock.patch.object(cuda_impl, "_launch_copy", launch_by),
        mock.patch.object(cuda_score, "multiprocessors", for_scoring),
    ):
        yield


def copy_shape(text: str) -> str:
    """Checks an argument of --copies."""
    shape = re.fullmatch(r"([1-9]\d*)x[1-9]\d*(:alone)?", text)
    if not shape:
        raise argparse.ArgumentTypeError(f"{text!r} must be blocks and threads, like {TUNED_COPY} or 24x1024:alone")
    if shape[2] and int(shape[1]) % cuda_impl.TUNED.copy_lists_at_once:
        at_once = cuda_impl.TUNED.copy_lists_at_once
        raise argparse.ArgumentTypeError(
            f"{text!r}: the number of blocks must be a multiple of {at_once}: as many requests share them equally"
        )
    return text


def load_layers(layers: int | None, share: int) -> ModelSpec:
    """Reads the configuration of the model's first `layers` layers, by default of all."""
    spec = load_spec(MODEL, share)
    layers = layers or spec.layers
    assert isinstance(spec.attention, MlaSpec)
    index = replace(spec.attention.index, full_layers=tuple(range(0, layers, share)))
    return replace(spec, layers=layers, attention=replace(spec.attention, index=index))


class Case:
    """Requests that decode in one engine, whose steps can be selected in other parts."""

    def __init__(self, setup: ModelSetup, context: int) -> None:
        self._selection = SyntheticSelection.with_published_misses(setup.index.topk, context, serving.CUDA)
        self._constant = SyntheticSelection.constant(setup.index.topk, serving.CUDA)
        self._engine, self._runner = make_engine(setup, self._selection)
        self.requests, self._context = max_requests(setup, context), context
        params = SamplingParams(temperature=0, max_tokens=serving.ANSWER, ignore_eos=True)
        self._ids = prefill(self._engine, self.requests, context, params)
        timed_steps(self._engine, serving.WARM_UP_STEPS)

    def step_seconds(self, steps: int, parts: str = ONE_PART, *, misses: bool = True) -> float:
        """Returns the mean time of a step. Without `misses`, all steps select the same rows."""
        model, memory = self._runner._model, self._runner._memory
        assert isinstance(model, SyntheticPrefillModel)
        model._selection = self._selection if misses else self._constant
        memory.swap_parts = [(1, tuple(int(share) for share in parts.split(":")))]
        graphs = self._runner._graphs
        if graphs is not None:
            graphs._captured.clear()
            graphs._memory_pool = torch.cuda.graph_pool_handle()  # the old one went with its last graph
        timed_steps(self._engine, SETTLING_STEPS)
        before = self._missed_rows()
        seconds = statistics.mean(timed_steps(self._engine, steps)[1:])  # the first one was complete before
        assert not self._engine.idle, "the answers have ended; lower --steps"
        missed = self._missed_rows() > before
        assert missed == (misses and self._engine.stats().tiered > 0), f"rows were {'' if missed else 'not '}missing"
        return seconds

    def _missed_rows(self) -> int:
        return sum(self._engine.stats().slot_misses.values())

    def row(
        self,
        parts: str,
        seconds: float,
        *,
        hidden: float | None = None,
        without_misses: float | None = None,
        copies: str = "",
    ) -> dict[str, Any]:
        """Returns a row of the table."""
        return {
            "context": self._context,
            "requests": self.requests,
            "parts": parts,
            "copies": copies,
            "step ms": seconds * 1e3,
            "no misses ms": without_misses and without_misses * 1e3,
            "tokens/s": self.requests / seconds,
            "hidden": hidden,
        }

    def close(self) -> None:
        abort_all(self._engine, self._ids)


def measure(setup: ModelSetup, context: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row of the table for each ratio of parts and shape of copies, the first one for one part."""
    case, steps = Case(setup, context), options.steps

    def both(parts: str = ONE_PART) -> tuple[float, float]:
        return case.step_seconds(steps, parts), case.step_seconds(steps, parts, misses=False)

    case.step_seconds(steps)  # until contexts have been copied to the host
    before, seconds = both(), {}
    for shape in options.copies:
        with copies_by(shape):
            seconds |= {(ratio, shape): both(ratio) for ratio in options.parts}
    after = both()
    case.close()
    one_part, without_misses = (statistics.mean(times) for times in zip(before, after, strict=True))
    shown = one_part - without_misses
    rows = [case.row(ONE_PART, one_part, hidden=0, without_misses=without_misses)]
    for (ratio, shape), (taken, no_misses) in seconds.items():
        hidden = (one_part - taken) / shown
        rows.append(case.row(ratio, taken, hidden=hidden, without_misses=no_misses, copies=shape))
    return rows


def without_tiers(setup: ModelSetup, context: int, steps: int) -> dict[str, Any]:
    """Returns the row of as many resident requests as fit."""
    case = Case(setup, context)
    case.step_seconds(steps)
    row = case.row("tiers off", case.step_seconds(steps))
    case.close()
    return row


def measure_all(decoder: Decoder, weight_bytes: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    memory = ServingMemory.make(decoder, options)
    rows = []
    for tiers in ("off", "auto"):
        setup = memory.setup(decoder, weight_bytes, tiers)
        for context in options.contexts:
            if tiers == "off":
                measured = [without_tiers(setup, context, options.steps)]
            else:
                measured = measure(setup, context, options)
            print(*measured, sep="\n", flush=True)
            rows += measured
        del setup
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    memory.host.close()
    return rows


def bars(rows: list[dict[str, Any]]) -> list[Bar]:
    result = []
    for context in {row["context"]: None for row in rows}:
        of_context = [row for row in rows if row["context"] == context]
        off = next(row for row in of_context if row["parts"] == "tiers off")
        best = max((row for row in of_context if row["hidden"] is not None), key=lambda row: row["tokens/s"])
        what = f"{context} tokens, parts {best['parts']}" + (f", copies {best['copies']}" if best["copies"] else "")
        if context in HIDDEN_BARS:
            result.append(Bar(f"share of swap-in hidden, {what}", best["hidden"], HIDDEN_BARS[context], at_least=True))
            of_off = best["tokens/s"] / off["tokens/s"]
            result.append(Bar(f"tokens/s of those with tiers off, {what}", of_off, SPEED_BARS[context], at_least=True))
    return result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--contexts", nargs="+", type=int, default=[32768, 131072], help="context lengths in tokens")
    parser.add_argument("--parts", nargs="+", default=RATIOS, help="ratios of parts, like 3:2")
    parser.add_argument(
        "--copies",
        nargs="+",
        type=copy_shape,
        default=[TUNED_COPY],
        help=f"blocks and threads of copies, like {TUNED_COPY} or 24x1024:alone",
    )
    parser.add_argument("--layers", type=int, help="number of layers, with KV memory in proportion; default: all")
    parser.add_argument("--share", type=int, default=1, help="number of layers that use the selection of one indexer")
    parser.add_argument("--device-gib", type=float, default=16, help="GiB of device memory for KV")
    parser.add_argument("--host-gib", type=float, default=80, help="GiB of the host store")
    parser.add_argument("--steps", type=int, default=16, help="timed steps of each case")
    options = parser.parse_args()
    require_gpu()
    spec = load_layers(options.layers, options.share)
    fraction = spec.layers / load_spec(MODEL, options.share).layers
    options.device_gib, options.host_gib = options.device_gib * fraction, options.host_gib * fraction
    weights = serving.CountedWeights(serving.DTYPE, serving.CUDA)
    decoder = Decoder(spec, weights, KvStorage(fp8_rows=True, fp8_keys=True))
    rows = measure_all(decoder, weights.bytes, options)
    report("Swap-in behind other work", rows, options.json, "prompts are not computed; selections are synthetic")
    report("Bars", [bar.row() for bar in bars(rows)], None)


if __name__ == "__main__":
    main()
