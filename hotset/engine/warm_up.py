"""The steps that an engine runs before its first request, so that no request pays for what happens only once: kernels
are compiled, libraries start their threads and choose their algorithms."""

from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.engine.sizing import KvBudget
from hotset.engine.workers.executor import Executor
from hotset.schedule.plan import AssignSeat, Plan
from hotset.tiers.commands import Grant
from hotset.tiers.residence import PageUse

PROMPT_TOKENS = 32
SEAT = 0
PARAMS = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9, seed=0)


def run_first_steps(executor: Executor, budget: KvBudget, replicas: int) -> None:
    """Computes a prompt and decodes one token on every replica. No request may have been added yet.

    The pages are those of no request, and nothing is mirrored, because no page is filled. The seat is not released:
    assigning a seat clears its state.
    """
    tokens = min(PROMPT_TOKENS, budget.geometry.page_rows - 2, budget.max_model_len - 1)
    if tokens < 1 or budget.geometry.resident_pages(tokens + 1) > budget.device_pages:
        return  # the pages are tiny, which only tests use
    prompt = AssignSeat(SEAT, PromptSpec((0,) * tokens, PARAMS), ())
    grants = [Grant(SEAT, PageUse.ROWS, 0, (0,))]
    if key_pages := budget.geometry.key_pages(tokens + 1):
        grants.append(Grant(SEAT, PageUse.KEYS, 0, tuple(range(1, 1 + key_pages))))
    if budget.host_pages:
        grants.append(Grant(SEAT, PageUse.HOST, 0, (0,)))
    prefill = Plan(0, [prompt, *grants], seats=(SEAT,), starts=(0,), counts=(tokens,), sampled=(0,))
    decode = Plan(1, [], seats=(SEAT,), starts=(tokens,), counts=(1,), sampled=(0,))
    for plan in (prefill, decode):
        executor.submit([plan] * replicas).results()
