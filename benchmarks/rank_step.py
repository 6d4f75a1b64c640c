"""Compares a decode step of two tensor parallel ranks on one GPU with the replays of their graphs alone.

    nvidia-cuda-mps-control -d
    python benchmarks/rank_step.py --json rank_step.json

The model has the shapes of a configuration in hotset/lab/plan/configs, random weights, fewer layers, and fewer experts.
All requests decode together in an engine with two workers, and whole steps are timed in the controller. When the
engine is closed, each worker replays the graph of its last step again and again, with the same input. The replays of
both workers run at the same time, because the graphs contain their collectives. What a step takes longer is everything
else: plans, messages, sampling and reports.

Bar (required result): the difference is at most 3 % of the step.
"""

import json
import statistics
import tempfile
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from decode_load import abort_all, timed_steps
from gpu_timing import replay_seconds, require_gpu
from report import Bar, make_parser, report

from hotset.base.config import EngineConfig
from hotset.base.sampling import SamplingParams
from hotset.engine.build import build_engine
from hotset.engine.core import Engine
from hotset.engine.decode_graphs import DecodeGraphs, StepGraph
from hotset.engine.input_processor import InputProcessor
from hotset.engine.progress import Progress
from hotset.engine.workers import launcher
from hotset.engine.workers.worker import Worker, main

CONFIGS = Path(__file__).parents[1] / "hotset" / "lab" / "plan" / "configs"
RANKS = 2
REPLAYS, ROUNDS = 10, 5
WARM_UP_STEPS = 16
MAX_SHARE = 0.03


def timing_main(folder: str, pipe: Connection, progress: Progress) -> None:
    """Runs a worker process that times the graph of its last step before it ends, and writes the result to `folder`."""
    run, close = DecodeGraphs.run, Worker.close
    replayed: list[tuple[DecodeGraphs, StepGraph]] = []

    def recording_run(graphs: DecodeGraphs, graph: StepGraph, *arguments: Any) -> Any:
        replayed[:] = [(graphs, graph)]
        return run(graphs, graph, *arguments)

    def timing_close(worker: Worker) -> None:
        if replayed:
            (graphs, graph) = replayed[0]
            captured = graphs.get_or_capture(graph)
            replay_seconds(captured, REPLAYS)  # waits until the other workers do the same
            seconds = statistics.median(replay_seconds(captured, REPLAYS) for _ in range(ROUNDS))
            found = {"size": graph.size, "seconds": seconds}
            (Path(folder) / f"rank-{worker._rank.number}.json").write_text(json.dumps(found))
        close(worker)

    with mock.patch.object(DecodeGraphs, "run", recording_run), mock.patch.object(Worker, "close", timing_close):
        main(pipe, progress)


def add_requests(engine: Engine, requests: int, context: int, answer: int) -> list[str]:
    """Adds requests, and steps until all of them decode. Returns their ids."""
    request_ids = []
    processor = InputProcessor(engine.card, seed=0)
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=1, max_tokens=answer, ignore_eos=True)
    for number in range(requests):
        prompt = [(7 * position + 31 * number) % 1000 + 10 for position in range(context)]
        for choice in processor.accept(str(number), prompt, params):
            engine.add(choice)
            request_ids.append(choice.request_id)
    while engine.stats().tokens_to_prefill:
        engine.step()
    return request_ids


def measure(model: str, folder: str, requests: int, context: int, steps: int) -> dict[str, Any]:
    prefill_steps = requests * (context // 1024 + 1)
    answer = prefill_steps + WARM_UP_STEPS + steps + 64  # so that all requests decode while steps are timed
    config = EngineConfig(
        model=model,
        load_format="dummy",
        device="cuda",
        gpus="0",
        ranks_per_gpu=RANKS,
        tensor_parallel_size=RANKS,
        tiers="off",
        speculate=0,
        kv_dtype="fp8",
        index_dtype="fp8",
        max_num_seqs=requests,
        max_num_batched_tokens=1024,
        max_model_len=context + answer + 1,
        device_kv_tokens=requests * (context + answer + 128),
    )
    with mock.patch.object(launcher, "main", partial(timing_main, folder)):
        engine = build_engine(config)
    try:
        request_ids = add_requests(engine, requests, context, answer)
        timed_steps(engine, WARM_UP_STEPS)
        step = statistics.mean(timed_steps(engine, steps))
        running = engine.stats().running
        abort_all(engine, request_ids)  # workers that stop in the middle of a step could not replay their graphs
    finally:
        engine.close()
    graphs = [json.loads(path.read_text()) for path in Path(folder).glob("rank-*.json")]
    if running != requests or len(graphs) != RANKS or any(graph["size"] != requests for graph in graphs):
        raise SystemExit(f"error: {running} of {requests} requests ran at the end, and the ranks timed {graphs}")
    replay = max(graph["seconds"] for graph in graphs)
    return {
        "requests": requests,
        "context": context,
        "step ms": step * 1e3,
        "replay ms": replay * 1e3,
        "share": (step - replay) / step,
    }


def main_of_benchmark() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="deepseek-v3.2", help="a configuration in hotset/lab/plan/configs")
    parser.add_argument("--layers", type=int, default=30, help="layers of the model")
    parser.add_argument("--experts", type=int, default=64, help="routed experts of each layer")
    parser.add_argument("--requests", type=int, default=16, help="requests that decode together; a captured size")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=64, help="timed steps")
    options = parser.parse_args()
    require_gpu()
    fields = json.loads((CONFIGS / f"{options.model}.json").read_text())
    fields |= {"num_hidden_layers": options.layers, "n_routed_experts": options.experts}
    with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as folder:
        (Path(model) / "config.json").write_text(json.dumps(fields))
        row = measure(model, folder, options.requests, options.context, options.steps)
    bar = Bar("share of a TP 2 step that is not the replay of both graphs", row["share"], MAX_SHARE)
    report(f"Two ranks of {options.model}, {options.layers} layers", [row | bar.row()], options.json)


if __name__ == "__main__":
    main_of_benchmark()
