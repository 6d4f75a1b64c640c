"""Figures of speculative decoding between two scrapes of /metrics."""

from hotset.engine.client import ReceivedStats
from hotset.engine.outputs import EngineStats
from hotset.lab.bench.drafts import DraftFigures, read_counters
from hotset.serve.metrics import Metrics


def scrape(stats: EngineStats) -> str:
    return Metrics().render(ReceivedStats(stats, 0.0), 0.0, "model").decode()


def test_figures_are_the_differences_of_the_servers_counters() -> None:
    before = EngineStats(
        tokens_generated=100, drafts_verified={1: 10, 2: 5}, drafts_accepted={1: 10}, slot_misses={0: 7, 2: 3}
    )
    after = EngineStats(
        tokens_generated=180,
        drafts_verified={1: 50, 2: 25, 3: 10},
        drafts_accepted={1: 30, 2: 10, 3: 2},
        slot_misses={0: 107, 2: 63},
    )
    figures = DraftFigures.between(read_counters(scrape(before)), read_counters(scrape(after)))
    assert figures is not None
    assert figures.verified == (40, 20, 10) and figures.accepted == (20, 10, 2)
    assert figures.accepted_length == 1 + 32 / 40 and figures.rows_fetched_per_token == 2.0
    assert "32 of 70 accepted (by place: 50%, 50%, 20%), 1.80 tokens per step" in str(figures)


def test_servers_without_drafts_or_with_other_metrics_have_no_figures() -> None:
    plain = read_counters(scrape(EngineStats(tokens_generated=5)))
    assert plain and DraftFigures.between({}, plain) is None
    assert read_counters('vllm:requests{model="1"} 2.0\n<html>') == {}
    assert DraftFigures.between({}, {}) is None
