"""The steps that an engine runs before its first request, so that no request waits for one-time work, and so that the
memory of the largest step is known before the KV cache takes the rest.

A context of any length needs only a few pages here, because its page table repeats the same pages. The results of such
a step have no meaning, but it takes the same memory and the same kernels as a real one. Plans have draft limits, so
that a loaded MTP layer computes its rows too.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice

from hotset.base.config import EngineConfig
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.engine.drafts.settings import DraftSettings
from hotset.engine.sizing import KvBudget
from hotset.engine.workers.executor import Executor, StepFuture
from hotset.schedule.plan import AssignSeat, Plan, PromptRange
from hotset.tiers.commands import Command, Grant
from hotset.tiers.residence import PageUse, Residence

PROMPT_TOKENS = 32
PLANS_IN_FLIGHT = 2  # as in an engine: the buffers of two steps are in use at a time
SEAT = 0
PARAMS = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9, seed=0)
# Sampling with everything that takes memory: penalties count tokens, and log-probabilities rank the vocabulary.
COSTLY_PARAMS = SamplingParams(
    max_tokens=2,
    temperature=1.0,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    logprobs=20,
    seed=0,
)
# No request here is streamed. Plans claim it, so that no graph computes short prompts, and their kernels are compiled.
WITHOUT_GRAPH = frozenset({Residence.STREAMED})
ALTERNATIVES = 20  # of each token of a prompt whose log-probabilities are requested


def run_first_steps(executor: Executor, budget: KvBudget, replicas: int) -> None:
    """Computes a prompt and decodes one token on every replica. No request may have been added yet.

    The pages belong to no request, and nothing is mirrored, because no page is filled. The seat is not released:
    assigning a seat clears its state.
    """
    tokens = min(PROMPT_TOKENS, budget.geometry.page_rows - 2, budget.max_model_len - 1)
    if tokens < 1 or budget.geometry.resident_pages(tokens + 1) > budget.device_pages:
        return  # only tests use pages so small
    commands = admit(SEAT, budget, tokens, tokens + 1, PARAMS)
    prefill = Plan(0, commands, seats=(SEAT,), starts=(0,), counts=(tokens,), sampled=(0,))
    decode = Plan(1, [], seats=(SEAT,), starts=(tokens,), counts=(1,), sampled=(0,))
    for plan in (prefill, decode):
        executor.submit([plan] * replicas).results()


def run_largest_steps(
    executor: Executor, config: EngineConfig, budget: KvBudget, replicas: int, progress: Callable[[int, int], None]
) -> None:
    """Runs the steps that take the most memory, and prompts of many lengths, whose kernels differ.

    Kernels are compiled, and torch keeps the memory of these steps for later ones. `budget` is that of the executor.
    Its pages are overwritten, so no request may have been added yet. `progress(done, total)` counts steps.
    """
    plans = [*_largest_steps(config, budget), *_prompts(config, budget), *_uploads(budget)]
    plans += _verifications(config, budget)
    run_plans(executor, plans, replicas, progress)


def run_plans(
    executor: Executor,
    plans: Sequence[Plan],
    replicas: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Runs plans on all replicas, several in flight as in an engine. `progress(done, total)` counts them."""
    submitted: deque[StepFuture] = deque()
    for done, plan in enumerate(plans):
        progress(done, len(plans))
        submitted.append(executor.submit([plan] * replicas))
        if len(submitted) == PLANS_IN_FLIGHT:
            submitted.popleft().results()
    while submitted:
        submitted.popleft().results()
    progress(len(plans), len(plans))


def _largest_steps(config: EngineConfig, budget: KvBudget) -> Iterator[Plan]:
    """Yields the last chunk of the longest prompt, with log-probabilities, and a step in which all seats sample."""
    length, seats = budget.max_model_len - 1, config.max_num_seqs
    chunk = min(length, config.max_num_batched_tokens)
    commands: list[AssignSeat | Command] = admit(SEAT, budget, length, length, COSTLY_PARAMS)
    logprobs = PromptRange(0, length - chunk + 1, length, ALTERNATIVES)
    ranges = (logprobs,) if len(logprobs) else ()
    yield _plan(0, commands, seats=[SEAT], starts=[length - chunk], counts=[chunk], prompt_ranges=ranges)
    short = min(2, length)
    commands = [command for seat in range(1, seats) for command in admit(seat, budget, short, short, COSTLY_PARAMS)]
    chunk = max(1, min(length, config.max_num_batched_tokens - (seats - 1)))
    starts, counts = [length - chunk, *[short - 1] * (seats - 1)], [chunk, *[1] * (seats - 1)]
    yield _plan(1, commands, seats=range(seats), starts=starts, counts=counts)


def _verifications(config: EngineConfig, budget: KvBudget) -> Iterator[Plan]:
    """Yields the step in which requests with drafts sample the most tokens. Yields nothing without drafts."""
    if config.max_drafts == 0:
        return
    verified = DraftSettings.of(config).max_verified
    drafts = max(0, min(config.max_drafts, verified - 1, budget.max_model_len - 2))
    seats = range(min(config.max_num_seqs, verified // (1 + drafts)))
    commands = [command for seat in seats for command in admit(seat, budget, 1, 1 + drafts, COSTLY_PARAMS)]
    starts, counts = [0] * len(seats), [1 + drafts] * len(seats)
    yield _plan(4, commands, seats=seats, starts=starts, counts=counts, drafts={seat: [0] * drafts for seat in seats})


def _prompts(config: EngineConfig, budget: KvBudget) -> Iterator[Plan]:
    """Yields chunks of all orders of magnitude, at the beginning and at the end of the longest context.

    Our kernels depend on the order of magnitude of the number of tokens, and on whether 16 divides it. Libraries choose
    among many more kernels, also by smaller divisors, and take milliseconds to load each at its first use. Many other
    numbers of tokens therefore run too, once each. Layers of one kind have the same kernels, so one of them runs.
    """
    length = budget.max_model_len - 1
    largest = min(length, config.max_num_batched_tokens)
    powers = [1 << bits for bits in range(largest.bit_length())]
    at_both_ends = {size for size in (*powers, *(power + 1 for power in powers), largest) if size <= largest}
    for tokens in sorted({*at_both_ends, *range(64, min(largest, 1024), 64), *_growing_sizes(largest)}):
        for start in {0, length - tokens} if tokens in at_both_ends else {0}:
            yield _plan(2, [], seats=[SEAT], starts=[start], counts=[tokens], layers_once=True)


def _growing_sizes(largest: int) -> Iterator[int]:
    """Yields numbers of tokens, each about 1/25 larger than the one before, with all kinds of divisors."""
    size = PROMPT_TOKENS
    while size <= largest:
        yield size
        size += size // 25 + 1


def _uploads(budget: KvBudget) -> Iterator[Plan]:
    """Yields plans that compute nothing and upload prompts of all orders of magnitude, since torch allocates pinned
    memory for the first upload of each."""
    for bits in range(budget.max_model_len.bit_length()):
        prompt = PromptSpec((0,) * min(1 << bits, budget.max_model_len - 1), PARAMS)
        yield Plan(3, [AssignSeat(SEAT, prompt, ())], seats=(), starts=(), counts=(), sampled=())


def _plan(
    number: int,
    commands: Sequence[AssignSeat | Command],
    seats: Sequence[int],
    starts: Sequence[int],
    counts: Sequence[int],
    prompt_ranges: Sequence[PromptRange] = (),
    drafts: Mapping[int, Sequence[int]] | None = None,
    layers_once: bool = False,
) -> Plan:
    """Returns a plan that no graph computes, in which all seats sample after their last tokens, and after drafts."""
    drafts = drafts or {}
    return Plan(
        number=number,
        commands=commands,
        seats=seats,
        starts=starts,
        counts=counts,
        sampled=[segment for segment in range(len(seats)) for _ in range(1 + len(drafts.get(segment, ())))],
        prompt_ranges=prompt_ranges,
        residences=WITHOUT_GRAPH,
        drafts=drafts,
        draft_limits=[0] * len(seats),
        layers_once=layers_once,
    )


def admit(
    seat: int, budget: KvBudget, prompt_tokens: int, tokens: int, params: SamplingParams
) -> list[AssignSeat | Command]:
    """Returns the commands that give a seat a prompt and pages for `tokens` tokens. The pages may repeat."""
    geometry = budget.geometry
    wanted = {
        PageUse.ROWS: (geometry.row_pages(tokens), budget.device_pages),
        PageUse.KEYS: (geometry.key_pages(tokens), budget.device_pages),
        PageUse.HOST: (geometry.row_pages(tokens) if budget.host_pages else 0, budget.host_pages),
    }
    grants = [Grant(seat, use, 0, _pages(count, pool)) for use, (count, pool) in wanted.items() if count]
    return [AssignSeat(seat, PromptSpec((0,) * prompt_tokens, params), ()), *grants]


def _pages(count: int, pool: int) -> tuple[int, ...]:
    pages: Sequence[int] = range(pool)
    return tuple(islice(cycle(pages), count))
