"""Measures prompts and mixed steps of a GQA model on one GPU, against the matrix rate of the same run.

    python benchmarks/gqa.py --json gqa.json

First, the attention kernel alone: one chunk of a prompt in one layer of Qwen3-8B (32 heads on 8 KV heads of 128). Then
a whole model of that shape with random weights: prompts of 8k and 32k tokens, computed in chunks of 8192, and a prompt
of 32k whose chunks of 2048 tokens share their steps with 128 requests that decode. FLOP count the matrix products of
all layers, and the positions that a token sees.

Bars (required results): a prompt reaches 70 % of the matrix rate; the steps that compute a prompt while requests decode
take at most 1.15 times as long as computing the prompt alone and running the same number of decode steps.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode_load import abort_all, timed_steps
from gpu_timing import matrix_rate, require_gpu, seconds_of
from report import Bar, make_parser, report

from hotset.base.config import EngineConfig
from hotset.base.sampling import SamplingParams
from hotset.engine.build import build_engine
from hotset.engine.core import Engine
from hotset.engine.input_processor import InputProcessor
from hotset.kernels.paged_attention import paged_attention
from hotset.kernels.rows import PagedRows, gqa_row
from hotset.kernels.segments import make_segments

CONFIG = Path(__file__).resolve().parents[1] / "hotset" / "lab" / "plan" / "configs" / "qwen3-8b.json"
CUDA = torch.device("cuda")
HEADS, KV_HEADS, DIM, PAGE_ROWS = 32, 8, 128, 64
LAYERS, HIDDEN, INTERMEDIATE = 36, 4096, 12288
CHUNKS = ((2048, 2048), (8192, 8192), (8192, 32_768))  # tokens of the chunk and of its context
PROMPTS = (8192, 32_768)
DECODING, DECODING_CONTEXT, MIXED_CHUNK = 128, 1024, 2048
PROMPT_BAR, MIXED_BAR = 0.7, 1.15


def attention_flop(tokens: int, context: int) -> float:
    """Returns the FLOP of one layer's attention for the newest `tokens` tokens of a context."""
    positions_seen = tokens * (context - tokens) + tokens * (tokens + 1) / 2
    return 4 * HEADS * DIM * positions_seen


def model_flop(prompt: int) -> float:
    """Returns the FLOP of all layers for a whole prompt. The head computes one token, which is not counted."""
    per_token = 2 * HIDDEN * ((2 * HEADS + 2 * KV_HEADS) * DIM + 3 * INTERMEDIATE)
    return LAYERS * (prompt * per_token + attention_flop(prompt, prompt))


def attention_row(tokens: int, context: int, rate: float) -> dict[str, Any]:
    layout = gqa_row(KV_HEADS, DIM, torch.bfloat16)
    pages = context // PAGE_ROWS
    blocks = torch.randn(1, pages, PAGE_ROWS, layout.stored_width, dtype=torch.bfloat16, device=CUDA)
    table = torch.randperm(pages, device=CUDA)[None]
    seat_of = torch.zeros(tokens, dtype=torch.int64, device=CUDA)
    rows = PagedRows(blocks, [], layout, table, seat_of)
    q = torch.randn(tokens, HEADS, DIM, dtype=torch.bfloat16, device=CUDA)
    segments = make_segments([context - tokens], [tokens], CUDA)
    seconds = seconds_of([partial(paged_attention, q, rows, segments, KV_HEADS, DIM**-0.5)])
    flop = attention_flop(tokens, context)
    return {
        "chunk": tokens,
        "context": context,
        "ms": seconds * 1e3,
        "TFLOP/s": flop / seconds * 1e-12,
        "of matrix": flop / seconds / rate,
    }


@contextmanager
def engine_of(chunk: int, context: int) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(CONFIG.read_text())
        engine = build_engine(
            EngineConfig(
                model=folder,
                load_format="dummy",
                device="cuda",
                dtype="bfloat16",
                tiers="off",
                max_num_seqs=DECODING + 1,
                max_num_batched_tokens=chunk,
                max_model_len=context + 512,
                device_kv_tokens=2 * context + DECODING * (DECODING_CONTEXT + 512),
            )
        )
        try:
            yield engine
        finally:
            engine.close()


def add_prompt(engine: Engine, name: str, length: int, answer: int) -> list[str]:
    ids = [(7 * position + 31 * len(name)) % 1000 + 10 for position in range(length)]
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    choices = InputProcessor(engine.card, seed=0).accept(name, ids, params)
    for choice in choices:
        engine.add(choice)
    return [choice.request_id for choice in choices]


def steps_of_prompt(engine: Engine, name: str, length: int) -> list[float]:
    """Adds a prompt and steps until it is computed. Returns the seconds of the steps."""
    add_prompt(engine, name, length, answer=1)
    steps = []
    while engine.stats().tokens_to_prefill or not steps:
        began = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - began)
    return steps


def drain(engine: Engine) -> float:
    began = time.perf_counter()
    while not engine.idle:
        engine.step()
    return time.perf_counter() - began


def prompt_rows(rate: float) -> list[dict[str, Any]]:
    rows = []
    with engine_of(max(PROMPTS[:1]), max(PROMPTS)) as engine:
        for prompt in PROMPTS:
            times = []
            for repeat in range(3):
                seconds = sum(steps_of_prompt(engine, f"{prompt}-{repeat}", prompt))
                times.append(seconds + drain(engine))
            best = statistics.median(times)
            rows.append(
                {
                    "prompt": prompt,
                    "s": best,
                    "tokens/s": prompt / best,
                    "TFLOP/s": model_flop(prompt) / best * 1e-12,
                    "of matrix": model_flop(prompt) / best / rate,
                }
            )
            print(rows[-1], flush=True)
    return rows


def mixed_row() -> dict[str, Any]:
    prompt = max(PROMPTS)
    with engine_of(MIXED_CHUNK, prompt) as engine:
        steps_of_prompt(engine, "warm-up", prompt)
        drain(engine)
        alone = sum(steps_of_prompt(engine, "alone", prompt)) + drain(engine)
        decoding = [
            request for n in range(DECODING) for request in add_prompt(engine, f"d{n}", DECODING_CONTEXT, answer=400)
        ]
        while engine.stats().tokens_to_prefill:
            engine.step()
        timed_steps(engine, 8)
        decode = statistics.mean(timed_steps(engine, 32))
        steps = steps_of_prompt(engine, "mixed", prompt)
        running = engine.stats().running
        abort_all(engine, decoding)
    if running < DECODING:
        raise SystemExit(f"error: only {running} requests ran at the end")
    return {
        "steps": len(steps),
        "mixed ms": 1e3 * sum(steps),
        "prompt alone ms": 1e3 * alone,
        "decode step ms": 1e3 * decode,
        "ratio": sum(steps) / (alone + len(steps) * decode),
    }


def main() -> None:
    options = make_parser(__doc__).parse_args()
    require_gpu()
    rate = matrix_rate()
    attention = [attention_row(*chunk, rate) for chunk in CHUNKS]
    report("Attention of a chunk in one layer", attention, None, f"matrix rate {rate * 1e-12:.0f} TFLOP/s")
    prompts = prompt_rows(rate)
    report("Prompts of the whole model", prompts, options.json)
    mixed = mixed_row()
    report(f"A prompt while {DECODING} requests decode", [mixed], None)
    bars = [Bar(f"prompt of {row['prompt']}", row["of matrix"], PROMPT_BAR, at_least=True) for row in prompts]
    report("Bars", [bar.row() for bar in [*bars, Bar("mixed steps", mixed["ratio"], MIXED_BAR)]], None)


if __name__ == "__main__":
    main()
