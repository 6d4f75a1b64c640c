"""Recommends splits for engines that compute only prompts (`--role prefill`) or only answers (`--role decode`)."""

from collections.abc import Mapping
from dataclasses import dataclass

from hotset.lab.plan.planner import Plan, SplitPlan

# Why a split that divides the model in one way only is slower than the best one.
PROMPTS_SLOWER = {
    "TP": "every layer waits for two all_reduces",
    "PP": "stages wait for the first chunk and for the slowest stage",
    "DP": "one rank computes all layers of a prompt",
}
ANSWERS_SLOWER = {
    "TP": "every layer waits for two all_reduces",
    "PP": "a stage reads its weights once for each of its batches",
    "DP": "every rank reads all weights outside the experts",
}
# The same for models with an indexer, which ranks do not divide.
SPARSE_PROMPTS_SLOWER = PROMPTS_SLOWER | {"TP": "every rank computes the whole indexer"}
SPARSE_ANSWERS_SLOWER = ANSWERS_SLOWER | {
    "TP": "every rank holds, fetches and reads the rows and index keys of all requests"
}


@dataclass(frozen=True, slots=True)
class Roles:
    """The best splits for prompts and for answers, at the longest context, and sentences that compare them."""

    prefill: SplitPlan
    decode: SplitPlan
    sentences: tuple[str, ...]


def best_roles(plan: Plan) -> Roles | None:
    """Returns the best split for each role. Returns None if there are not two splits to compare, and on a CPU."""
    context = f"{plan.contexts[-1]:,}"
    fitting = {split.name: split for split in plan.splits if split.reason is None and split.best(-1).prompt_s}
    seconds = {name: split.best(-1).prompt_s or 0.0 for name, split in fitting.items()}
    rates = {name: split.best(-1).tokens_per_s or 0.0 for name, split in fitting.items()}
    # `--role prefill` does not support data parallelism.
    for_prompts = [split for split in fitting.values() if split.config.data_parallel_size == 1]
    if len(fitting) < 2 or not for_prompts:
        return None
    prefill = min(for_prompts, key=lambda split: seconds[split.name])
    decode = max(fitting.values(), key=lambda split: rates[split.name])
    slower = {name: f"{value:,.1f} s" for name, value in seconds.items() if value > seconds[prefill.name]}
    fewer = {name: f"{value:,.0f}" for name, value in rates.items() if value < rates[decode.name]}
    answer = rates[decode.name] * plan.contexts[-1] / (prefill.best(-1).prompt_tokens_per_s or 1.0)
    return Roles(
        prefill,
        decode,
        (
            f"prompts of {context}: {prefill.name}, {seconds[prefill.name]:,.1f} s"
            + _comparison(slower, SPARSE_PROMPTS_SLOWER if plan.sparse else PROMPTS_SLOWER),
            f"answers: {decode.name}, {rates[decode.name]:,.0f} tokens/s"
            + _comparison(fewer, SPARSE_ANSWERS_SLOWER if plan.sparse else ANSWERS_SLOWER),
            f"two such machines, one for each role, are equally busy if answers to prompts of {context} have "
            f"{answer:,.0f} tokens; shorter answers need more machines for prompts",
        ),
    )


def _comparison(figures: Mapping[str, str], reasons: Mapping[str, str]) -> str:
    pure = [name for name in figures if " x " not in name]
    others = [f"{figures[name]} with {name}, where {reasons[name[:2]]}" for name in pure]
    return f"; {', and '.join(others)}" if others else ""
