"""Measures sampling on one GPU: the kernel of `draw`, the torch ops that it replaces, and a whole call of the sampler.

    python benchmarks/sampling.py --json sampling.json

The logits are random numbers plus a few likely tokens. "bf16" logits are rounded to bfloat16, like those of an LM head
in bfloat16, and have many ties. Every case is checked first: the kernel must draw the same tokens as the reference on
the GPU and, for a few requests, as the reference on the CPU. "of a pass" is the time of the kernel over the time of
reading the logits once at the copy bandwidth. "sampler us" is a whole call of `Sampler.sample`, with all its small
launches. The L2 is flushed before every call. "torch us" is the path without the kernel: argmax, the shortlist for a
top-k of at most 512, or a sort of all logits. The sort is timed once per case, because its time does not depend on the
rule. Bar: at batch 128, a call of the sampler takes at most 5 % of a decode step of DeepSeek-V3.2, which is at least
25 ms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from gpu_timing import copy_bandwidth, seconds_of
from op_runner import OpBenchmark, run
from report import Bar, Row
from torch import Tensor

from hotset.base.sampling import SamplingParams
from hotset.kernels.draw import WEIGHT_ONE, DrawRules, draw, reference
from hotset.kernels.draw.random_numbers import uniforms
from hotset.models.sampler import Sampler

MAX_SAMPLER_S = 0.05 * 0.025
CHECKED_ON_CPU = 8  # requests
RULES = {
    "greedy": SamplingParams(seed=1, temperature=0.0),
    "temperature 0.8": SamplingParams(seed=1, temperature=0.8),
    "top-p 0.95": SamplingParams(seed=1, top_p=0.95),
    "top-k 50": SamplingParams(seed=1, top_k=50),
    "min-p 0.05": SamplingParams(seed=1, min_p=0.05),
    "all": SamplingParams(seed=1, temperature=2.0, top_k=1000, top_p=0.9, min_p=0.001),
    "temperature 5": SamplingParams(seed=1, temperature=5.0),  # nearly uniform: the hardest case
    "logprobs 20": SamplingParams(seed=1, top_p=0.95, logprobs=20),
}


@dataclass(frozen=True)
class Case:
    batch: int
    vocab: int
    kind: str

    def logits(self) -> Tensor:
        generator = torch.Generator(device="cuda").manual_seed(self.batch)
        x = torch.randn(self.batch, self.vocab, device="cuda", generator=generator) * 2.5
        x[:, :50] += torch.rand(self.batch, 50, device="cuda", generator=generator) * 14
        return x.bfloat16().float() if self.kind == "bf16" else x

    def random_numbers(self) -> tuple[Tensor, Tensor]:
        """Returns keys and positions."""
        return torch.randint(1 << 62, (self.batch,), device="cuda"), torch.arange(self.batch, device="cuda")


def draw_rules(params: SamplingParams, batch: int, vocab: int) -> DrawRules:
    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((batch,), value, dtype=dtype, device="cuda")

    return DrawRules(
        temperature=column(params.temperature or 1.0, torch.float64),
        top_k=column(1 if params.greedy else params.top_k or vocab, torch.int64),
        top_p=column(params.top_p, torch.float64),
        min_weight=column(round(params.min_p * WEIGHT_ONE), torch.int64),
    )


def check(x: Tensor, rules: DrawRules, keys: Tensor, positions: Tensor) -> None:
    """Raises SystemExit if kernel, reference, and reference on the CPU draw different tokens."""
    uniform = uniforms(keys, positions)
    tokens = draw(x, rules, keys, positions)
    wrong = (tokens != reference.draw(x, rules, uniform)).nonzero().flatten().tolist()
    some = torch.arange(min(CHECKED_ON_CPU, x.shape[0]))
    on_cpu = DrawRules(rules.temperature.cpu(), rules.top_k.cpu(), rules.top_p.cpu(), rules.min_weight.cpu())
    by_cpu = reference.draw(x[some].cpu(), on_cpu.of(some), uniform[some].cpu())
    wrong_on_cpu = (tokens[some].cpu() != by_cpu).nonzero().flatten().tolist()
    if wrong or wrong_on_cpu:
        raise SystemExit(f"error: other tokens than the reference on the GPU: {wrong}, on the CPU: {wrong_on_cpu}")


def torch_ops(params: SamplingParams, x: Tensor, rules: DrawRules, uniform: Tensor) -> Callable[[], object]:
    if params.greedy:
        return partial(x.argmax, dim=-1)
    if 0 < params.top_k <= reference.SHORTLIST_TOKENS:
        shortlist, vocab = reference.SHORTLIST_TOKENS, x.shape[1]
        return lambda: reference._choose(reference.leading(x, shortlist), rules, uniform, vocab, None)
    return partial(reference.draw, x, rules, uniform)


def sampler_seconds(x: Tensor, params: SamplingParams) -> float:
    batch, vocab = x.shape
    sampler = Sampler(batch, vocab, x.device)
    for seat in range(batch):
        sampler.admit(seat, params, [0], 1, frozenset())
    return seconds_of([partial(sampler.sample, x, range(batch), torch.arange(batch, device="cuda"))])


@torch.inference_mode()
def measure(case: Case) -> list[Row]:
    x = case.logits()
    keys, positions = case.random_numbers()
    pass_s, rows = x.nbytes / copy_bandwidth(), []
    sort_s: float | None = None
    for name, params in RULES.items():
        rules = draw_rules(params, case.batch, case.vocab)
        check(x, rules, keys, positions)
        sorts = not params.greedy and not 0 < params.top_k <= reference.SHORTLIST_TOKENS
        torch_s = (
            sort_s
            if sorts and sort_s is not None
            else seconds_of([torch_ops(params, x, rules, uniforms(keys, positions))])
        )
        sort_s = torch_s if sorts else sort_s
        kernel_s = seconds_of([partial(draw, x, rules, keys, positions)])
        rows.append(
            {
                "batch": case.batch,
                "vocab": case.vocab,
                "logits": case.kind,
                "rule": name,
                "kernel us": kernel_s * 1e6,
                "torch us": torch_s * 1e6,
                "of a pass": kernel_s / pass_s,
                "sampler us": sampler_seconds(x, params) * 1e6,
            }
        )
    return rows


def bars(rows: list[Row]) -> list[Bar]:
    times = [row["sampler us"] for row in rows if row["batch"] == 128 and row["rule"] != "logprobs 20"]
    return [Bar("slowest call of the sampler at batch 128, us", max(times), MAX_SAMPLER_S * 1e6)] if times else []


QUICK = [Case(128, 129_280, kind) for kind in ("bf16", "fp32")]
OP = OpBenchmark(
    doc=__doc__,
    title="Sampling",
    cases=[*QUICK, *(Case(batch, 129_280, "bf16") for batch in (1, 16, 256)), Case(256, 154_880, "bf16")],
    quick=QUICK,
    measure=measure,
    bars=bars,
    drawn=("kernel us", "sampler us"),
)

if __name__ == "__main__":
    run(OP)
