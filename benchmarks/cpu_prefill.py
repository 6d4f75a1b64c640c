"""Measures the demo model's prefill on the CPU: the CPU implementations of kernels against their references.

    python benchmarks/cpu_prefill.py --json cpu_prefill.json

Each prompt, a retrieval question, is computed in chunks of 1024 tokens and followed by 33 greedy tokens, by both
implementations in turn, in the same engine. Prefill ends with the first token; the other 32 tokens are decode. Times
are CPU time of one thread, which other load on the machine disturbs less than wall time. The table shows medians, the
ratios of times (reference / fast), and whether both implementations generate the same tokens. There is no required
result. A run takes many minutes (each round computes 15,000 tokens four times), --quick less than one.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from report import make_parser, report

from hotset.base.sampling import SamplingParams
from hotset.engine.llm import LLM
from hotset.kernels.index_topk import cpu_impl as index_cpu
from hotset.kernels.index_topk import reference as index_reference
from hotset.kernels.sparse_attention import cpu_impl as attention_cpu
from hotset.kernels.sparse_attention import reference as attention_reference
from hotset.lab.evaluate.tasks import TASKS, make_questions

DEMO = str(Path(__file__).resolve().parents[1] / "models" / "demo-dsa")
CHUNK = 1024
ANSWER = 32  # generated tokens after the first token
SEED = 0


@contextlib.contextmanager
def reference_kernels() -> Iterator[None]:
    with (
        mock.patch.object(index_cpu, "index_topk", index_reference.index_topk),
        mock.patch.object(attention_cpu, "sparse_attention", attention_reference.sparse_attention),
    ):
        yield


def make_prompt(llm: LLM, length: int) -> list[int]:
    """Returns the token ids of a question of about `length` tokens."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None

    def encode(text: str) -> list[int]:
        return tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}]), add_special=False)

    (question,) = make_questions(list(TASKS), length, 1, SEED, lambda text: len(encode(text)))
    return encode(question.prompt)


def generate(llm: LLM, prompt: list[int]) -> tuple[float, float, list[int]]:
    """Returns the CPU seconds until the first token, the CPU seconds of the later tokens, and all tokens."""
    greedy = SamplingParams(temperature=0, max_tokens=1 + ANSWER, ignore_eos=True)
    tokens: list[int] = []
    start = time.process_time()
    first = start
    for delta in llm.stream({"prompt_token_ids": prompt}, greedy):
        if not tokens:
            first = time.process_time()
        tokens.extend(delta.token_ids)
    return first - start, time.process_time() - first, tokens


def measure(llm: LLM, length: int, rounds: int) -> dict[str, Any]:
    prompt = make_prompt(llm, length)
    prefill: dict[str, list[float]] = {"reference": [], "fast": []}
    decode: dict[str, list[float]] = {"reference": [], "fast": []}
    answers = set()
    for _ in range(rounds):
        for name, kernels in (("reference", reference_kernels), ("fast", contextlib.nullcontext)):
            with kernels():
                first_s, later_s, tokens = generate(llm, prompt)
            prefill[name].append(first_s)
            decode[name].append(later_s)
            answers.add(tuple(tokens))
    prefill_s = {name: statistics.median(seconds) for name, seconds in prefill.items()}
    decode_s = {name: statistics.median(seconds) for name, seconds in decode.items()}
    return {
        "prompt": len(prompt),
        "reference tokens/s": len(prompt) / prefill_s["reference"],
        "fast tokens/s": len(prompt) / prefill_s["fast"],
        "prefill ratio": prefill_s["reference"] / prefill_s["fast"],
        "decode ratio": decode_s["reference"] / decode_s["fast"],
        "same tokens": len(answers) == 1,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one short prompt, one round")
    parser.add_argument("--rounds", type=int, default=3, help="measurements per prompt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths, rounds = ((1024,), 1) if options.quick else ((1024, 2048, 4096, 8192), options.rounds)
    rows = []
    for kv_dtype in ("auto", "fp8"):
        llm = LLM(
            DEMO,
            device="cpu",
            dtype="float32",
            kv_dtype=kv_dtype,
            max_num_batched_tokens=CHUNK,
            max_model_len=max(lengths) + 256,
            prefix_cache=False,  # both implementations compute the same prompts
            progress=False,
        )
        generate(llm, make_prompt(llm, 512))  # warm-up
        names = {"auto": "float32", "fp8": "fp8"}
        rows += [{"rows": names[kv_dtype], **measure(llm, length, rounds)} for length in lengths]
        llm.close()
    report("CPU prefill of the demo model, float32, tokens per second of CPU time", rows, options.json)


if __name__ == "__main__":
    main()
