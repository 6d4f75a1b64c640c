"""Conversations through a prefill and a decode worker: only rows that the decode worker lacks are computed and sent.

`Pair.answers` compares the bytes of all rows that land, and those of all pages in the decode worker's prefix cache, and
audits both workers after every step.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from engine.handoff_pair import SAMPLED, Pair, decoder_of, make, pair
from engine.test_handoff_splits import SEED, SPECS
from engine.test_handoff_splits import pair as split_pair
from harness import run_all, whole_engine
from loopback import Faults, Loopback

from hotset.base.request_options import LandingChoice
from hotset.engine.core import Engine
from hotset.fleet.handoff.endpoints import PrefillEndpoint
from hotset.fleet.transfer.workers import WorkerTransfers

PAGE_ROWS, PREFILL_PAGE_ROWS = 8, 16
SIZES = {"max_model_len": 160, "max_num_batched_tokens": 24, "device_kv_tokens": 800, "host_kv_tokens": 4096}
EXTEND = 6  # --extend-locally


@dataclass
class Turn:
    """One prompt of a conversation, of which the decode worker has `num_cached` rows."""

    prompt: list[int]
    num_cached: int

    @property
    def unknown(self) -> int:
        return len(self.prompt) - self.num_cached

    @property
    def extended(self) -> bool:
        return self.num_cached > 0 and self.unknown <= EXTEND


@contextmanager
def one_engine(model: str) -> Iterator[Engine]:
    """Yields an engine that computes every prompt from its first token."""
    engine = make(decoder_of(model), page_rows=PAGE_ROWS, prefix_cache=False, **SIZES)
    yield engine
    engine.close()


def converse(workers: Pair, single: Engine, landing: LandingChoice, new_tokens: tuple[int, ...]) -> list[Turn]:
    """Compares a conversation on `workers` with the same on `single`. Turn n adds `new_tokens[n]` random tokens."""
    generator = random.Random(str(new_tokens))
    turns: list[Turn] = []
    context: list[int] = []
    for count in new_tokens:
        prompt = [*context, *(generator.randrange(61) for _ in range(count))]
        computed = max(0, len(context) - 1)  # rows of the context; the last token of an answer has none
        turns.append(Turn(prompt, min(computed, len(prompt) - 1) // PAGE_ROWS * PAGE_ROWS))
        (answer,) = workers.answers([prompt], SAMPLED, landing)
        assert answer == run_all(single, [prompt], [SAMPLED])[0].token_ids
        context = [*prompt, *answer]
    return turns


def row_bytes(workers: Pair, landing: LandingChoice) -> int:
    """Returns the bytes of one token's rows and index keys in the store in which contexts land."""
    store = workers.comparer.targets["host" if landing == "host" else "device"]
    spans = [*(shard.span for shard in store.shards), *([store.keys] if store.keys is not None else [])]
    return sum(len(span.bases) * span.row_bytes for span in spans)


@pytest.mark.parametrize(
    ("model", "landing", "tiers"),
    [
        ("dsa", "host", "always"),
        ("dsa", "device", "auto"),
        pytest.param("gqa", "auto", "auto", marks=pytest.mark.slow),
        pytest.param("glm_moe_dsa", "host", "always", marks=pytest.mark.slow),
    ],
)
def test_only_rows_that_the_decode_worker_lacks_are_sent(model: str, landing: LandingChoice, tiers: str) -> None:
    pages = PREFILL_PAGE_ROWS, PAGE_ROWS
    with (
        one_engine(model) as single,
        pair(model, "loopback", pages, {"tiers": tiers}, extend_locally=EXTEND, **SIZES) as workers,
    ):
        turns = converse(workers, single, landing, (37, 29, 1, 24))
        handed = [turn for turn in turns if not turn.extended]
        assert len(handed) == 3 and handed[1].num_cached > 0
        assert list(workers.comparer.compared.values()) == [turn.unknown for turn in handed]
        stats = workers.decode.stats()
        assert (stats.landed, stats.extended, stats.lost) == (3, 1, 0)
        sent = row_bytes(workers, landing) * sum(turn.unknown for turn in handed)
        assert stats.handoff is not None and stats.handoff.nbytes == sent
        assert workers.prefill.stats().tokens_prefilled == tokens_prefilled(handed), "the prefill worker has a cache"
        assert stats.host_pages_held == stats.device_pages_held == 0


def tokens_prefilled(handed: list[Turn]) -> int:
    """Returns how many tokens the prefill worker computes. It has the full pages of its earlier prompts."""
    known = [0, *(len(turn.prompt) for turn in handed)]
    reused = [
        min(rows, len(turn.prompt) - 1) // PREFILL_PAGE_ROWS * PREFILL_PAGE_ROWS
        for rows, turn in zip(known, handed, strict=False)
    ]
    return sum(len(turn.prompt) for turn in handed) - sum(reused)


@pytest.mark.parametrize(
    ("model", "sender", "receiver"),
    [
        ("llama", "TP1", "TP2"),
        pytest.param("deepseek_v32", "TP2", "DP4", marks=pytest.mark.slow),
        pytest.param("glm_moe_dsa", "PP2", "TP1", marks=pytest.mark.slow),
    ],
)
def test_a_conversation_between_engines_with_different_parallelism(model: str, sender: str, receiver: str) -> None:
    spec = SPECS[model]
    single = whole_engine(spec, SEED, page_rows=16, device_kv_tokens=2000)
    with split_pair(model, sender, receiver, "loopback", extend_locally=EXTEND) as workers:
        turns = converse(workers, single, "auto", (21, 1, 19))
        assert [turn.extended for turn in turns] == [False, True, False]
        assert list(workers.comparer.compared.values()) == [turns[0].unknown, turns[2].unknown]
        stats = workers.decode.stats()
        assert (stats.landed, stats.extended, stats.lost, stats.quarantined_pages) == (2, 1, 0, 0)
    single.close()


def test_requests_with_different_salts_share_nothing() -> None:
    prompt = [position * position % 61 for position in range(40)]
    with (
        one_engine("gqa") as single,
        pair("gqa", "loopback", (PREFILL_PAGE_ROWS, PAGE_ROWS), extend_locally=0, **SIZES) as workers,
    ):
        expected = run_all(single, [prompt], [SAMPLED])[0].token_ids
        computed = []
        for salt in ("", "a", "b", "a"):
            assert workers.answers([prompt], SAMPLED, "host", salt=salt) == [expected]
            computed.append(workers.prefill.stats().tokens_prefilled)
        assert list(workers.comparer.compared.values()) == [40, 40, 40, 8]
        assert computed == [40, 80, 120, 128], "the prefill worker reuses 2 pages of 16 rows, for the same salt only"


def test_a_landing_after_a_prefix_that_fails_is_retried_and_no_page_is_lost() -> None:
    """The first list of writes of the second turn is cut short. The sender reports it, and the second attempt lands."""
    with (
        one_engine("dsa") as single,
        pair("dsa", "loopback", (PREFILL_PAGE_ROWS, PAGE_ROWS), extend_locally=0, **SIZES) as workers,
    ):
        prompt = [position * position % 61 for position in range(40)]
        workers.answers([prompt], SAMPLED, "host")
        longer = [*prompt, *range(20)]
        endpoint = workers.prefill._endpoint
        assert isinstance(endpoint, PrefillEndpoint)
        transfer = endpoint._resources.transfer
        assert isinstance(transfer, WorkerTransfers) and isinstance(transfer._endpoints[0], Loopback)
        hub = transfer._endpoints[0]._hub
        hub.faults = Faults(cut=1.0)

        def repair() -> None:
            if workers.decode.stats().retries:
                hub.faults = Faults()

        assert workers.answers([longer], SAMPLED, "host", on_step=repair)[0] == (
            run_all(single, [longer], [SAMPLED])[0].token_ids
        )
        stats = workers.decode.stats()
        assert (stats.landed, stats.lost, stats.retries, stats.quarantined_pages) == (2, 1, 1, 0)
        assert list(workers.comparer.compared.values()) == [40, 20]
        assert stats.host_pages_held == stats.device_pages_held == 0


def test_prompts_that_are_alike_and_arrive_together_are_sent_once() -> None:
    prompt = [position * position % 61 for position in range(40)]
    with (
        one_engine("gqa") as single,
        pair("gqa", "loopback", (PREFILL_PAGE_ROWS, PAGE_ROWS), extend_locally=PAGE_ROWS, **SIZES) as workers,
    ):
        expected = run_all(single, [prompt], [SAMPLED])[0].token_ids
        assert workers.answers([prompt] * 3, SAMPLED, "auto") == [expected] * 3
        stats = workers.decode.stats()
        assert (stats.landed, stats.extended) == (1, 2)
        assert list(workers.comparer.compared.values()) == [40]


def test_full_host_stores_of_both_workers_evict_pages_and_every_prompt_lands() -> None:
    """Each store has room for 96 rows: two contexts of 48 rows."""
    generator = random.Random(3)
    prompts = [[generator.randrange(61) for _ in range(36)] for _ in range(4)]
    full = {**SIZES, "max_model_len": 64, "device_kv_tokens": 96, "host_kv_tokens": 96}
    with (
        one_engine("gqa") as single,
        pair("gqa", "loopback", (PREFILL_PAGE_ROWS, PAGE_ROWS), extend_locally=0, **full) as workers,
    ):
        for prompt in [*prompts, prompts[0]]:
            expected = [run_all(single, [prompt], [SAMPLED])[0].token_ids]
            assert workers.answers([prompt], SAMPLED, "host") == expected
        assert list(workers.comparer.compared.values()) == [36] * 5, "the first prompt was evicted"
        for worker in (workers.prefill, workers.decode):
            cache = worker.schedulers[0].ledger.host
            assert cache is not None and cache.evictions > 0
