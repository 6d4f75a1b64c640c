"""Measures what the first requests after start-up pay: their time against the tenth, and kernels compiled meanwhile.

    python benchmarks/first_request.py --json first_request.json
    python benchmarks/first_request.py --config hotset/lab/plan/configs/dsa-50b.json --seconds 400

One engine is started. For each length of prompt, in random order, ten requests run one after the other; the next length
begins with its own first request. Then all seats are used at once, with log-probabilities and penalties. Bars (required
results): every first request takes at most 1.1x the median of the last five of its length, and no kernel is compiled.
The table also shows what start-up took, and the memory that is left on a GPU at the end.
"""

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from report import Bar, make_parser, report

from hotset.base.sampling import SamplingParams
from hotset.engine.llm import LLM

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo-dsa"
LENGTHS = (1, 3, 17, 64, 100, 250, 700, 1024, 3000, 9000)
REPEATS = 10
MAX_RATIO = 1.1
ANSWER = SamplingParams(max_tokens=4, temperature=0.8, top_p=0.95, ignore_eos=True)
COSTLY = SamplingParams(
    max_tokens=8,
    temperature=1.0,
    top_p=0.9,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    logprobs=20,
    ignore_eos=True,
)


class CompiledKernels:
    """Collects the names of Triton kernels that are compiled. It stays empty without a GPU."""

    def __init__(self) -> None:
        self.names: list[str] = []
        if torch.cuda.is_available():
            from triton import knobs

            knobs.runtime.jit_post_compile_hook = self._on_compile

    def _on_compile(self, **compiled: Any) -> None:
        self.names.append(str(compiled.get("repr", compiled.get("fn"))))


def prompt(length: int, seed: int, vocab: int) -> dict[str, list[int]]:
    draw = random.Random(f"{length}:{seed}")
    return {"prompt_token_ids": [draw.randrange(5, vocab) for _ in range(length)]}


def seconds_of(llm: LLM, prompts: list[dict[str, list[int]]], params: SamplingParams) -> float:
    began = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - began


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default=str(DEMO), help="model directory")
    parser.add_argument("--config", type=Path, help="config.json of a model with random weights, instead of --model")
    parser.add_argument("--seats", type=int, default=256, help="--max-num-seqs")
    parser.add_argument("--tiers", default="auto", choices=("auto", "off", "always"))
    parser.add_argument("--device-kv-gib", type=float, help="size of the device pool; default: all that is left")
    parser.add_argument("--seconds", type=float, default=500, help="lengths that begin later are left out")
    options = parser.parse_args()
    began = time.perf_counter()
    compiled = CompiledKernels()
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"model": options.model}
        if options.config is not None:
            Path(folder, "config.json").write_text(options.config.read_text())
            settings = {"model": folder, "load_format": "dummy"}
        llm = LLM(
            **settings, max_num_seqs=options.seats, tiers=options.tiers, device_kv_gib=options.device_kv_gib, seed=0
        )
    start_seconds, at_start = time.perf_counter() - began, len(compiled.names)
    print(f"started in {start_seconds:.1f} s, {at_start} kernels compiled", flush=True)
    vocab, longest = llm.card.vocab, llm.card.max_model_len - 8
    rows, bars = [], []
    lengths = [length for length in LENGTHS if length <= longest]
    random.Random(1).shuffle(lengths)
    for length in lengths:
        if time.perf_counter() - began > options.seconds:
            print(f"no time left for prompts of {length} tokens", flush=True)
            continue
        before = len(compiled.names)
        times = [seconds_of(llm, [prompt(length, seed, vocab)], ANSWER) for seed in range(REPEATS)]
        later, new = statistics.median(times[REPEATS // 2 :]), compiled.names[before:]
        bars.append(Bar(f"first / later, {length} tokens", times[0] / later, MAX_RATIO))
        rows.append({"prompt": length, "first ms": 1e3 * times[0], "later ms": 1e3 * later, "ratio": times[0] / later,
                     "compiled": len(new)})  # fmt: skip
        print(rows[-1], *new, flush=True)
    before = len(compiled.names)
    times = []
    for repeat in range(3):  # each with prompts of its own, so that none is in the prefix cache
        seeds = range(REPEATS + repeat * options.seats, REPEATS + (repeat + 1) * options.seats)
        times.append(seconds_of(llm, [prompt(100 + 7 * seed % 400, seed, vocab) for seed in seeds], COSTLY))
    rows.append({"prompt": f"{options.seats} x 100-500", "first ms": 1e3 * times[0], "later ms": 1e3 * times[-1],
                 "ratio": times[0] / times[-1], "compiled": len(compiled.names) - before})  # fmt: skip
    print(rows[-1], *compiled.names[before:], flush=True)
    bars.append(Bar("kernels compiled after start-up", len(compiled.names) - at_start, 0))
    left = f"; {torch.cuda.mem_get_info()[0] / 1e9:.1f} GB free at the end" if torch.cuda.is_available() else ""
    llm.close()
    notes = f"started in {start_seconds:.1f} s, {at_start} kernels compiled then{left}"
    report("First requests after start-up", rows, options.json, notes)
    report("Bars", [bar.row() for bar in bars], None)


if __name__ == "__main__":
    main()
