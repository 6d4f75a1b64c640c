"""Measures the demo model on one GPU: Hotset with all requests tiered against transformers with an offloaded cache.

    python benchmarks/against_transformers.py --json against_transformers.json

Both engines answer the same long prompts greedily in bfloat16. transformers keeps its KV in host memory and loads a
whole layer at a time. The table shows the time of all answers including prompts, the decode rate (the time of answers
with one token is subtracted), and the number of correct answers. Times are means of two rounds. No
ratio is required to pass. After each measurement, the table of all results so far is printed, and the JSON file is
overwritten.
transformers computes all indexer scores of a batch at once. A batch of all prompts can therefore exceed the GPU's
memory; the row of this batch then shows "out of memory".

The offloaded cache of transformers (5.17 to 5.22) cannot run a sparse-attention model unchanged: it offloads a layer's
index keys together with the KV, and the indexer then appends to the offloaded keys. This benchmark keeps index keys on
the GPU and offloads keys and values. Prefetches wait for earlier offloads, as in 5.22 but not in 5.17; otherwise a
layer could be loaded before its offload is complete. If the installed version of transformers has no index keys in its
cache, the cache is used unchanged. The table's title shows which variant ran.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_timing import require_gpu
from report import make_parser, report
from transformers import AutoModelForCausalLM, DynamicCache, cache_utils

from hotset.base.sampling import SamplingParams
from hotset.engine.llm import LLM
from hotset.lab.evaluate.tasks import make_questions

DEMO = str(Path(__file__).resolve().parents[1] / "models" / "demo-dsa")
ROUNDS = 2
OUT_OF_MEMORY = "out of memory"

Answers = list[list[int]]
Generate = Callable[[int], Answers]  # the argument is the number of tokens per prompt
Engine = Callable[[], AbstractContextManager[Generate]]
Row = dict[str, Any]


def measure_seconds(generate: Generate, tokens: int) -> tuple[float, float, Answers]:
    """Returns the mean seconds of answers with `tokens` tokens, the mean seconds of answers with one token, and the
    answers with `tokens` tokens."""
    generate(2)  # compiles and allocates
    seconds: dict[int, list[float]] = {1: [], tokens: []}
    for _ in range(ROUNDS):
        for count, times in seconds.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            answers = generate(count)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return statistics.mean(seconds[tokens]), statistics.mean(seconds[1]), answers


def layer_with_resident_index_keys() -> type[cache_utils.DynamicLayer] | None:
    """Returns a class of cache layers that offload KV but not index keys, or None if the cache has no index keys."""
    indexed: Any = getattr(cache_utils, "DynamicIndexedLayer", None)
    if indexed is None:
        return None

    class Layer(indexed):
        def offload(self) -> None:
            cache_utils.DynamicLayer.offload(self)

        def prefetch(self) -> None:
            # This runs on the prefetch stream. The offload of this layer, and the reads of the memory that the prefetch
            # overwrites, are on the default stream.
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            cache_utils.DynamicLayer.prefetch(self)

    return Layer


def offloaded_cache(config: transformers.PreTrainedConfig) -> DynamicCache:
    """Returns the cache of `cache_implementation="offloaded"`, changed as the module docstring describes."""
    cache = DynamicCache(config=config, offloading=True)
    layer_type = layer_with_resident_index_keys()
    if layer_type is not None:
        cache.layers = [layer_type() if hasattr(layer, "update_indexer") else layer for layer in cache.layers]
    return cache


@contextmanager
def transformers_engine(prompts: Answers, batch: int) -> Iterator[Generate]:
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16).cuda().eval()
    batches = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]

    def generate(tokens: int) -> Answers:
        answers: Answers = []
        for prompt_batch in batches:
            ids = torch.tensor(prompt_batch, device="cuda")
            options: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
            options["past_key_values"] = offloaded_cache(model.config)
            with torch.inference_mode():
                outputs = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            answers += outputs[:, ids.shape[1] :].tolist()
        return answers

    yield generate


@contextmanager
def hotset_engine(prompts: Answers) -> Iterator[Generate]:
    longest = max(map(len, prompts))
    llm = LLM(
        model=DEMO,
        device="cuda",
        tiers="always",
        speculate=0,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=longest,
        device_kv_tokens=(longest + 512) * len(prompts),
        host_kv_tokens=(longest + 512) * (len(prompts) + 1),
        prefix_cache=False,  # every repetition computes the prompts
    )

    def generate(tokens: int) -> Answers:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [output.outputs[0].token_ids for output in outputs]

    with llm:  # the host store is unpinned at the end
        yield generate


def measure(engine: Engine, tokens: int, correct: Answers) -> Row:
    """Opens an engine, measures answers of `tokens` tokens to every prompt, and closes the engine."""
    with engine() as generate:
        all_s, first_s, answers = measure_seconds(generate, tokens)
    return {
        "answers s": all_s,
        "decode tokens/s": len(correct) * (tokens - 1) / (all_s - first_s),
        "correct": sum(answer[: len(expected)] == expected for answer, expected in zip(answers, correct, strict=True)),
    }


def measure_if_it_fits(engine: Engine, tokens: int, correct: Answers) -> Row:
    try:
        return measure(engine, tokens, correct)
    except torch.OutOfMemoryError as error:
        print(error, flush=True)
        return {"answers s": OUT_OF_MEMORY, "decode tokens/s": None, "correct": None}


def make_prompts(length: int, count: int) -> tuple[Answers, Answers]:
    """Returns prompts of about `length` tokens, and the correct answers.

    Longer prompts are cut at their beginning so that all prompts have the same length and can form a batch.
    """
    tokenizer = LLM(model=DEMO, device="cpu", progress=False).tokenizer
    assert tokenizer is not None
    questions = make_questions(["lookup"], length, count, 1, lambda text: 1 + len(tokenizer.encode(text)))
    prompts = [tokenizer.encode("<|bos|>" + question.prompt) for question in questions]
    shortest = min(map(len, prompts))
    correct = [tokenizer.encode(question.answer) for question in questions]
    return [prompt[len(prompt) - shortest :] for prompt in prompts], correct


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--length", type=int, default=8192, help="tokens per prompt")
    parser.add_argument("--prompts", type=int, default=8, help="number of prompts")
    parser.add_argument("--tokens", type=int, default=64, help="generated tokens per prompt")
    options = parser.parse_args()
    require_gpu()
    prompts, correct = make_prompts(options.length, options.prompts)
    runs = {
        "hotset, all tiered": (partial(hotset_engine, prompts), measure),
        "transformers, offloaded, one by one": (partial(transformers_engine, prompts, 1), measure),
        "transformers, offloaded, batched": (partial(transformers_engine, prompts, len(prompts)), measure_if_it_fits),
    }
    variant = "unchanged" if layer_with_resident_index_keys() is None else "index keys kept on the GPU"
    title = f"{len(prompts)} prompts of {len(prompts[0])} tokens, {options.tokens} generated tokens each"
    rows: list[Row] = []
    for name, (engine, measure_engine) in runs.items():
        row = {"engine": name} | measure_engine(engine, options.tokens, correct)
        rate = row["decode tokens/s"]
        rows.append(row)
        row["of hotset"] = rate and rate / rows[0]["decode tokens/s"]
        report(f"{title}; transformers {transformers.__version__}, {variant}", rows, options.json)
        sys.stdout.flush()
        gc.collect()  # frees weights and KV before the next engine is loaded
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
