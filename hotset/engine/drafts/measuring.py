"""Measures the time of steps with drafts at start-up, so that no more tokens are drafted than pay."""

import logging
import time
from collections.abc import Callable, Sequence
from statistics import median

from hotset.base.config import EngineConfig
from hotset.engine.drafts.costs import StepCosts, likely_shares
from hotset.engine.drafts.settings import DraftSettings
from hotset.engine.sizing import KvBudget
from hotset.engine.warm_up import PARAMS, admit, run_plans
from hotset.engine.workers.executor import Executor
from hotset.schedule.plan import DRAFTED, Plan
from hotset.tiers.residence import Residence

LOGGER = logging.getLogger(__name__)
MAX_CONTEXT = 4096  # tokens of each request
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REPEATS = 5  # steps per measurement


def measure_draft_costs(
    executor: Executor,
    config: EngineConfig,
    budget: KvBudget,
    replicas: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> StepCosts:
    """Measures decode steps of several numbers of requests with 0 to `config.max_drafts` drafts each.

    The steps overwrite the KV memory, so no request may have been added yet. Several plans are in flight, unless the
    drafts of a plan depend on the result of the plan before. `progress(done, total)` counts numbers of requests.
    """
    seats = config.max_num_seqs
    settings = DraftSettings.of(config)
    numbers = sorted({number for number in REQUESTS if number < seats} | {min(seats, REQUESTS[-1])})
    room = 2 * config.max_drafts + 1
    draft, measure = (DRAFTED, _overlapped_seconds) if settings.kept_in_worker else (0, _sequential_seconds)
    context = max(1, min(MAX_CONTEXT, budget.max_model_len - room) // config.page_rows * config.page_rows)
    commands = [
        command for seat in range(numbers[-1]) for command in admit(seat, budget, context, context + room, PARAMS)
    ]
    executor.submit([Plan(0, commands, (), (), (), ())] * replicas).results()
    plain: list[float] = []
    drafting: list[list[float]] = []
    for done, number in enumerate(numbers):
        progress(done, len(numbers))
        drafts = range(1, 1 + min(config.max_drafts, settings.max_verified // number - 1))
        plain.append(_overlapped_seconds(executor, _step(number, context, [], limit=None), replicas))
        without = _overlapped_seconds(executor, _step(number, context, [], limit=context + room), replicas)
        steps = [_step(number, context, [draft] * count, limit=context + room) for count in drafts]
        drafting.append([without, *(measure(executor, step, replicas) for step in steps)])
    progress(len(numbers), len(numbers))
    costs = StepCosts(numbers, plain, drafting)
    _log(costs, config.max_drafts)
    return costs


def _log(costs: StepCosts, max_drafts: int) -> None:
    shares = likely_shares(max_drafts)
    chosen = ", ".join(f"{number}: {costs.best_drafts(number, shares)}" for number in costs.requests)
    LOGGER.info("drafts of each request, by the number of requests that decode: %s", chosen)


def _step(requests: int, start: int, drafts: Sequence[int], limit: int | None) -> Plan:
    """Returns a step that verifies these drafts of each request, and drafts as many below position `limit`. If `limit`
    is None, the MTP layer computes nothing."""
    seats = range(requests)
    return Plan(
        number=0,
        commands=[],
        seats=seats,
        starts=[start] * requests,
        counts=[1 + len(drafts)] * requests,
        sampled=[seat for seat in seats for _ in range(1 + len(drafts))],
        residences=frozenset({Residence.RESIDENT}),
        drafts=dict.fromkeys(seats, drafts) if drafts else {},
        draft_limits=() if limit is None else [limit] * requests,
        num_drafts=len(drafts),
    )


def _overlapped_seconds(executor: Executor, plan: Plan, replicas: int) -> float:
    """Returns the mean time of steps while several are in flight."""
    executor.submit([plan] * replicas).results()
    start = time.perf_counter()
    run_plans(executor, [plan] * REPEATS, replicas)
    return (time.perf_counter() - start) / REPEATS


def _sequential_seconds(executor: Executor, plan: Plan, replicas: int) -> float:
    """Returns the median time of steps that are submitted one after the other has ended."""
    executor.submit([plan] * replicas).results()
    times: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        executor.submit([plan] * replicas).results()
        times.append(time.perf_counter() - start)
    return median(times)
