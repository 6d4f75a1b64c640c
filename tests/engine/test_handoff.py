"""Handoffs in one process: answers equal those of a single engine, and every row arrives unchanged."""

from dataclasses import replace
from typing import Any

import pytest
from engine.handoff_pair import SAMPLED, Prompts, answers_alone, decoder_of, pair

from hotset.base.config import TiersMode
from hotset.base.request_options import LandingChoice, TiersChoice
from hotset.engine.core import Engine
from hotset.schedule.plan import TokenOutputs

# Prompt lengths at and near the boundaries of pages (16 and 64 rows) and of prefill chunks (96 tokens).
EDGES = (1, 15, 16, 17, 64, 65, 96, 97, 129)
SIZES = {"max_model_len": 144, "max_num_batched_tokens": 96, "device_kv_tokens": 800, "host_kv_tokens": 4096}
# `page_rows`: of the prefill worker and of the decode worker.
CASES: list[tuple[str, str, LandingChoice, tuple[int, int]]] = [
    ("loopback", "gqa", "host", (64, 64)),
    ("loopback", "deepseek_v32", "device", (16, 64)),
    ("nixl", "dsa", "device", (64, 16)),
    ("nixl", "glm_moe_dsa", "host", (16, 64)),
    ("mooncake", "shared", "auto", (16, 64)),
    ("mooncake", "fp8", "host", (64, 16)),
]


@pytest.mark.parametrize(("transfer", "model", "landing", "page_rows"), CASES)
def test_answers_after_a_handoff_equal_those_of_a_single_engine(
    transfer: str, model: str, landing: LandingChoice, page_rows: tuple[int, int]
) -> None:
    if transfer != "loopback":
        pytest.importorskip(transfer)
    prompts = Prompts(EDGES)
    expected = answers_alone(model, prompts, SAMPLED, **SIZES)
    with pair(model, transfer, page_rows, **SIZES) as workers:
        assert workers.answers(prompts.token_ids(decoder_of(model)), SAMPLED, landing) == expected
        assert workers.decode.stats().landed == workers.comparer.num_compared == len(expected)
        assert workers.transfer_name == transfer
    assert len(workers.comparer.released) == len(expected)


SMALL = {"max_model_len": 56, "max_num_batched_tokens": 16}
ROOMY = {"device_kv_tokens": 400, "host_kv_tokens": 1200}
CROWDED = {"device_kv_tokens": 60, "host_kv_tokens": 400, "hot_slots": 8}  # so small that some requests must be parked


@pytest.mark.parametrize(("model", "landing", "tiers"), [("dsa", "host", "always"), ("glm_moe_dsa", "device", "auto")])
def test_landed_requests_are_parked_and_resumed(model: str, landing: LandingChoice, tiers: TiersMode) -> None:
    prompts, params = Prompts((3, 4, 13, 16, 21, 30)), replace(SAMPLED, max_tokens=18)
    expected = answers_alone(model, prompts, params, **SMALL, **ROOMY)
    with pair(model, "loopback", (4, 4), {**CROWDED, "tiers": tiers}, **SMALL, **ROOMY) as workers:
        assert workers.answers(prompts.token_ids(decoder_of(model)), params, landing) == expected
        stats = workers.decode.stats()
        assert stats.landed == workers.comparer.num_compared == len(expected)
        assert stats.parks > 0 and stats.resumes > 0, "no request was parked, so this test checks nothing"
        assert sum(stats.slot_misses.values()) > 0, "no request was tiered"


def test_a_resident_request_lands_on_an_engine_whose_other_requests_are_tiered() -> None:
    prompts, params = Prompts((5, 16)), replace(SAMPLED, max_tokens=4)
    token_ids, expected = prompts.token_ids(decoder_of("dsa")), answers_alone("dsa", prompts, params, **SMALL, **ROOMY)
    choices: list[tuple[LandingChoice, TiersChoice]] = [("device", "auto"), ("host", "resident"), ("auto", "resident")]
    with pair("dsa", "loopback", (4, 4), {"tiers": "always"}, **SMALL, **ROOMY) as workers:
        for landing, tiers in choices:
            assert workers.answers(token_ids, params, landing, tiers, salt=landing) == expected, (landing, tiers)


def test_neither_messages_nor_first_tokens_wait_for_the_step_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step loop sleeps while its engine waits for peers."""
    prompts, mistakes, tokens_so_far = Prompts((40, 97)), list[str](), list[int]()
    with pair("dsa", **SIZES) as workers:
        for role, engine in (("prefill", workers.prefill), ("decode", workers.decode)):

            def watched_step(role: str = role, engine: Engine = engine, step: Any = engine.step) -> TokenOutputs:
                before = engine.steps
                outputs: TokenOutputs = step()
                if engine.waiting_for_peers and any(scheduler.has_messages for scheduler in engine.schedulers):
                    mistakes.append(f"the {role} engine sleeps before it has sent its messages")
                if outputs.token_ids and not tokens_so_far and engine.steps != before:
                    mistakes.append("the first token has waited for a step")
                if outputs.token_ids and not outputs.finished and engine.waiting_for_peers:
                    mistakes.append("the engine sleeps before it has planned the next step")
                tokens_so_far.extend(outputs.token_ids)
                return outputs

            monkeypatch.setattr(engine, "step", watched_step)
        for prompt in prompts.token_ids(decoder_of("dsa")):
            tokens_so_far.clear()
            workers.answers([prompt], SAMPLED, "host")
            assert tokens_so_far and not mistakes, mistakes
