"""One command starts prefill and decode engines with different splits, and they answer like one engine.

tests/engine/test_handoff_splits.py has the other pairs of splits.
"""

import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import plain_http
import pytest
from harness import DEMO
from running_server import RunningServer, metrics_of, serving

from hotset import LLM, SamplingParams

SIZES = {"device_kv_tokens": 4096, "host_kv_tokens": 8192, "max_num_batched_tokens": 256}
LENGTHS = (1, 64, 65, 130, 257, 300)  # at and near the boundaries of pages (64) and of chunks (256)
PARAMS = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def flags_of(settings: dict[str, object]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def expected_tokens(prompts: list[list[int]]) -> list[list[int]]:
    """Returns the answers of one engine, in this process. In float64, no split rounds a sum so that a token changes."""
    llm = LLM(DEMO, device="cpu", dtype="float64", **SIZES)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], SamplingParams(**PARAMS))
    llm.close()
    return [list(answer.outputs[0].token_ids) for answer in answers]


def tokens_of(server: RunningServer, prompt: list[int]) -> list[int]:
    body = {"model": "demo-dsa", "prompt": prompt, "return_token_ids": True, **PARAMS}
    answer = plain_http.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


@pytest.mark.slow  # a minute on two busy cores: engines of two workers each, in float64
def test_engines_of_different_splits_answer_like_one_engine(tmp_path: Path) -> None:
    prefill_args, decode_args = ["--tensor-parallel-size 2", "--pipeline-parallel-size 2"], "--data-parallel-size 2"
    roles = [word for text in prefill_args for word in ("--prefill-args", text)] + ["--decode-args", decode_args]
    settings = {"device": "cpu", "dtype": "float64", "drain_seconds": 5, **SIZES}
    tokens = random.Random(0)
    prompts = [[tokens.randrange(3, 203) for _ in range(length)] for length in LENGTHS]
    with serving(tmp_path, DEMO, "--disaggregate", "2P1D", *roles, *flags_of(settings)) as server:
        with ThreadPoolExecutor(len(prompts)) as threads:
            received = list(threads.map(lambda prompt: tokens_of(server, prompt), prompts))
        urls = re.findall(r"(\w+) worker (http://\S+) is up", server.log())
        handed_off = [metrics_of(url)["hotset_prompts_handed_off_total"] for role, url in urls if role == "prefill"]
        landed = [metrics_of(url)["hotset_handoffs_total/landed"] for role, url in urls if role == "decode"]
    assert received == expected_tokens(prompts)
    assert len(handed_off) == 2 and min(handed_off) > 0, "every prefill engine must have taken part"
    assert sum(handed_off) == sum(landed) == len(prompts)
    for number, text in enumerate(prefill_args, 1):
        assert re.search(rf"^prefill {number} starts: hotset serve .* {text} ", server.log(), re.MULTILINE)
