"""Decode steps of one request and of a few: how far from the time of their bytes, and where the time goes.

    python benchmarks/few_requests.py --json few_requests.json

dsa-50b (hotset/lab/plan/configs) with random weights, fp8 rows and keys, tiers off, contexts of 32k tokens that are not
computed and whose selections are synthetic, as in serving.py. The tables:

  Steps     the time of a step over that of the bytes that it reads, at the speed of a copy
  Groups    of one request: milliseconds per step by part of the model, from a profile
  Layer     of one request: the kernels of the layer of median length, with the time since its first kernel in
            microseconds. Kernels on a second stream (`models/beside.py`) overlap others. Kernels that are launched
            early count from the end of the kernel before them.

A profile slows steps down, by a fifth for one request, because it delays early launches.

Bar (required result): a step of one request takes at most 1.6 times the time of its bytes.

Requires a GPU with 141 GB (H200).
"""

import argparse
from itertools import pairwise
from typing import Any

import serving
from decode_load import abort_all, prefill, timed_steps
from gpu_timing import require_gpu
from report import Bar, make_parser, report
from serving import CountedWeights, ModelSetup, ServingMemory, load_spec, make_engine, measure
from step_profile import KernelRun, group_of, grouped_ms, profiled
from synthetic_prefill import SyntheticSelection

from hotset.base.sampling import SamplingParams
from hotset.models.decoder import Decoder
from hotset.models.spec import KvStorage

MODEL = "dsa-50b"
BAR = 1.6  # step over bytes of one request
PROFILED_STEPS = 4
FIRST_OF_LAYER = "score"  # the kernel at which the table of a layer begins
COLUMNS = ("requests", "step ms", "bytes ms", "step / bytes", "tokens/s", "replay ms")


def profile_one_request(setup: ModelSetup, context: int) -> list[KernelRun]:
    selection = SyntheticSelection.with_published_misses(setup.index.topk, context, serving.CUDA)
    engine, _runner = make_engine(setup, selection)
    params = SamplingParams(temperature=0, max_tokens=serving.ANSWER, ignore_eos=True)
    request_ids = prefill(engine, 1, context, params)
    timed_steps(engine, serving.WARM_UP_STEPS)
    runs = profiled(lambda: timed_steps(engine, PROFILED_STEPS))
    abort_all(engine, request_ids)
    return runs


def layer_rows(runs: list[KernelRun], first: str = FIRST_OF_LAYER) -> list[dict[str, Any]]:
    """Returns the kernels of one layer, from the kernel `first` to its next run.

    It is the layer of median length, and not one that ends a step: before the next step, tokens are sampled."""
    ordered = sorted(runs, key=lambda run: run.start_us)
    starts = [run.start_us for run in ordered if run.name == first]
    layers = sorted(pairwise(starts), key=lambda layer: layer[1] - layer[0])
    if not layers:
        return []
    begin, end = layers[len(layers) // 2]
    return [
        {
            "start us": run.start_us - begin,
            "us": run.end_us - run.start_us,
            "kernel": run.name[:60],
            "group": group_of(run.name),
        }
        for run in ordered
        if begin <= run.start_us < end
    ]


def measure_all(decoder: Decoder, weight_bytes: int, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each table, by its title."""
    memory = ServingMemory.make(decoder, options)
    try:
        setup = memory.setup(decoder, weight_bytes, "off")
        (context,) = options.contexts
        steps = measure(setup, context, options.requests, options.steps)
        runs = profile_one_request(setup, context)
    finally:
        memory.host.close()
    groups = grouped_ms(runs, PROFILED_STEPS)
    alone = [row["step / bytes"] for row in steps if row["requests"] == 1]
    return {
        "Steps": [{column: row[column] for column in COLUMNS} for row in steps],
        "Groups": [{"group": group, "ms": ms} for group, ms in groups.items()],
        "Layer": layer_rows(runs),
        "Bars": [Bar("one request: step / bytes", ratio, BAR).row() for ratio in alone],
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--contexts", nargs=1, type=int, default=[32768], help="context length in tokens")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4, 16], help="numbers of concurrent requests")
    parser.add_argument("--device-gib", type=float, default=16, help="GiB of device memory for KV")
    parser.add_argument("--host-gib", type=float, default=17, help="GiB of the host store, which is not used")
    parser.add_argument("--steps", type=int, default=48, help="timed steps per row of the table")
    options = parser.parse_args()
    require_gpu()
    weights = CountedWeights(serving.DTYPE, serving.CUDA)
    decoder = Decoder(load_spec(MODEL, 1), weights, KvStorage(fp8_rows=True, fp8_keys=True))
    tables = measure_all(decoder, weights.bytes, options)
    for title, rows in tables.items():
        if rows:
            path = options.json and options.json.with_name(f"{options.json.stem}-{title.lower()}.json")
            report(title, rows, path)


if __name__ == "__main__":
    main()
