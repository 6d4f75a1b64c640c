"""The demo model under Hotset and under transformers with its offloaded cache: same prompts, same GPU, one run.

    python benchmarks/against_transformers.py --json against.json

Both read the same long prompts and answer greedily, in bfloat16. transformers keeps its KV in host memory and brings a
whole layer to the GPU at a time; Hotset has every request tiered. Times are of whole answers, prompts included, and of
decoding alone (the difference to answers of one token), means of two rounds. There is no bar: the ratio is reported.
Each row is printed, and the JSON written, as soon as it is there. All prompts in one batch may be more than the GPU
holds, for transformers makes all scores of its indexer at once: that row then says so, and the others stand.

The offloaded cache of transformers (5.17 to 5.22) cannot run a sparse-attention model as it is: it sends a layer's
index keys to the host along with the KV, and the indexer then appends to them there. Here index keys stay on the GPU;
keys and values go and come as they would. Prefetches wait for what was sent before them, as in 5.22 but not in 5.17:
without that a layer may be read back before it has arrived. A transformers whose cache holds no index keys is run as
it is. The table says which it was.
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
from hotset.evaluate.tasks import make_questions

DEMO = str(Path(__file__).resolve().parents[1] / "models" / "demo-dsa")
ROUNDS = 2
OUT_OF_MEMORY = "out of memory"

Answers = list[list[int]]
Answer = Callable[[int], Answers]  # of so many tokens to each prompt
Engine = Callable[[], AbstractContextManager[Answer]]
Row = dict[str, Any]


def seconds(answer: Answer, tokens: int) -> tuple[float, float, Answers]:
    """Of answers of `tokens` tokens to all prompts, of their first token alone (means), and the answers."""
    answer(2)  # compiles, allocates
    spent: dict[int, list[float]] = {1: [], tokens: []}
    for _ in range(ROUNDS):
        for count, times in spent.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            answers = answer(count)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return statistics.mean(spent[tokens]), statistics.mean(spent[1]), answers


def index_keys_stay() -> type[cache_utils.DynamicLayer] | None:
    """A cache layer whose KV goes to the host and comes back while its index keys stay; None where caches hold none."""
    indexed: Any = getattr(cache_utils, "DynamicIndexedLayer", None)
    if indexed is None:
        return None

    class Layer(indexed):
        def offload(self) -> None:
            cache_utils.DynamicLayer.offload(self)

        def prefetch(self) -> None:
            # Called on the stream of prefetches; what was sent to the host, and what is overwritten, is on the default.
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            cache_utils.DynamicLayer.prefetch(self)

    return Layer


def offloaded_cache(config: transformers.PreTrainedConfig) -> DynamicCache:
    """What `cache_implementation="offloaded"` makes, but for layers with index keys."""
    cache = DynamicCache(config=config, offloading=True)
    stay = index_keys_stay()
    if stay is not None:
        cache.layers = [stay() if hasattr(layer, "update_indexer") else layer for layer in cache.layers]
    return cache


@contextmanager
def under_transformers(prompts: Answers, batch: int) -> Iterator[Answer]:
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16).cuda().eval()
    rows = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]

    def answer(tokens: int) -> Answers:
        answers: Answers = []
        for some in rows:
            ids = torch.tensor(some, device="cuda")
            options: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
            options["past_key_values"] = offloaded_cache(model.config)
            with torch.inference_mode():
                whole = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            answers += whole[:, ids.shape[1] :].tolist()
        return answers

    yield answer


@contextmanager
def under_hotset(prompts: Answers) -> Iterator[Answer]:
    longest = max(map(len, prompts))
    llm = LLM(
        model=DEMO,
        device="cuda",
        tiers="always",
        max_num_seqs=len(prompts),
        max_num_batched_tokens=longest,
        device_kv_tokens=(longest + 512) * len(prompts),
        host_kv_tokens=(longest + 512) * (len(prompts) + 1),
    )

    def answer(tokens: int) -> Answers:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [output.outputs[0].token_ids for output in outputs]

    with llm:  # unpins its host store at the end
        yield answer


def measure(make: Engine, tokens: int, right: Answers) -> Row:
    """What one engine takes for `tokens` tokens to each prompt; it is gone afterwards."""
    with make() as answer:
        whole, first, answers = seconds(answer, tokens)
    return {
        "answers s": whole,
        "decode tokens/s": len(right) * (tokens - 1) / (whole - first),
        "right": sum(got[: len(want)] == want for got, want in zip(answers, right, strict=True)),
    }


def measure_if_it_fits(make: Engine, tokens: int, right: Answers) -> Row:
    try:
        return measure(make, tokens, right)
    except torch.OutOfMemoryError as error:
        print(error, flush=True)
        return {"answers s": OUT_OF_MEMORY, "decode tokens/s": None, "right": None}


def make_prompts(length: int, count: int) -> tuple[Answers, Answers]:
    """Prompts of about `length` tokens, alike in length so that both may batch them, and the right answers."""
    tokenizer = LLM(model=DEMO, device="cpu", progress=False).tokenizer
    assert tokenizer is not None
    questions = make_questions(["lookup"], length, count, 1, lambda text: 1 + len(tokenizer.encode(text)))
    prompts = [tokenizer.encode("<|bos|>" + question.prompt) for question in questions]
    shortest = min(map(len, prompts))
    right = [tokenizer.encode(question.answer) for question in questions]
    return [prompt[len(prompt) - shortest :] for prompt in prompts], right


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    require_gpu()
    prompts, right = make_prompts(options.length, options.prompts)
    runs = {
        "hotset, all tiered": (partial(under_hotset, prompts), measure),
        "transformers, offloaded, one by one": (partial(under_transformers, prompts, 1), measure),
        "transformers, offloaded, batched": (partial(under_transformers, prompts, len(prompts)), measure_if_it_fits),
    }
    changed = "its index keys kept on the GPU" if index_keys_stay() is not None else "as it is"
    title = f"{len(prompts)} prompts of {len(prompts[0])} tokens, {options.tokens} tokens each"
    rows: list[Row] = []
    for name, (make, measured) in runs.items():
        row = {"engine": name} | measured(make, options.tokens, right)
        decoded = row["decode tokens/s"]
        rows.append(row)
        row["x of hotset"] = decoded and decoded / rows[0]["decode tokens/s"]
        report(f"{title}; transformers {transformers.__version__}, {changed}", rows, options.json)
        sys.stdout.flush()
        gc.collect()  # this one's weights and KV before those of the next
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
