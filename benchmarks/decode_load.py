"""Requests that all decode at the same time, for benchmarks that time decode steps of an engine.

Their prompts can begin with the same tokens. An engine with a prefix cache computes these once, and the requests share
host pages and device pages of index keys.
"""

import time

import torch

from hotset.base.sampling import SamplingParams
from hotset.engine.core import Engine
from hotset.engine.input_processor import InputProcessor
from hotset.engine.sizing import KvBudget

PREFILL_TIMEOUT_S = 200.0
MAX_DRAIN_STEPS = 1000


def prefill(
    engine: Engine, requests: int, context: int, params: SamplingParams, shared_prefix: int | None = None
) -> list[str]:
    """Adds `requests` requests with prompts of `context` tokens and steps until all decode. Returns their ids.

    If `shared_prefix` is given, only that many first tokens are the same in all prompts.
    """
    shared = context if shared_prefix is None else shared_prefix
    prompts = [[0] * shared + [1 + number] * (context - shared) for number in range(requests)]
    input_processor = InputProcessor(engine.card, seed=0)
    choices = [choice for n, prompt in enumerate(prompts) for choice in input_processor.accept(str(n), prompt, params)]
    for choice in choices:
        engine.add(choice)
    start = time.perf_counter()
    while len(engine.step().token_ids) < requests:
        elapsed = time.perf_counter() - start
        assert elapsed < PREFILL_TIMEOUT_S, f"not all of the {requests} requests decode after {elapsed:.0f} s"
    return [choice.request_id for choice in choices]


def max_requests_with_prefix(budget: KvBudget, tokens: int, shared_prefix: int) -> int:
    """Returns how many requests of `tokens` tokens fit in the KV memory at the same time, if the first `shared_prefix`
    tokens are the same in all of them."""
    if not budget.tiers:
        return budget.requests(tokens)
    geometry = budget.geometry
    rows = shared_prefix // geometry.page_rows
    keys = geometry.whole_key_pages(rows * geometry.page_rows)
    workspace = geometry.streamed_pages(tokens) - geometry.tiered_pages(tokens)
    # Admission leaves one page of each pool free for every other request that can still grow.
    on_device = (budget.device_pages - workspace - keys + 1) // (geometry.tiered_pages(tokens) - keys + 1)
    on_host = (budget.host_pages - rows + 1) // (geometry.row_pages(tokens) - rows + 1)
    return max(budget.requests(tokens), min(on_device, on_host))


def timed_steps(engine: Engine, steps: int) -> list[float]:
    """Returns the seconds of each of `steps` steps."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return times


def abort_all(engine: Engine, request_ids: list[str]) -> None:
    """Aborts the requests and steps until the engine is idle."""
    for request_id in request_ids:
        engine.abort(request_id)
    for _ in range(MAX_DRAIN_STEPS):
        if engine.idle:
            return
        engine.step()
    raise AssertionError(f"{len(request_ids)} aborted requests did not end within {MAX_DRAIN_STEPS} steps")
