"""The picture is well-formed for any results, and its marks lie where the numbers say."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from hotset.lab.bench.answer import Failure
from hotset.lab.bench.benchmark import BenchReport
from hotset.lab.bench.config import BenchConfig, Load
from hotset.lab.bench.plot import picture
from hotset.lab.bench.results import GeneratorHealth, LoadResult, RequestRecord
from hotset.lab.bench.svg import BOTTOM, LEFT, PANEL_HEIGHT, RIGHT, TOP, WIDTH, Line, Panel, page
from hotset.lab.bench.target import ServerReport

EXAMPLES = examples(20)
SERVER = ServerReport("http://a:1", "a <model> & more", 100, None, exact_lengths=True, usage=True)
HEALTHY = GeneratorHealth(cpu_share=0.1, delay_p99=0.0, delay_max=0.0, lag_p99=0.0, lag_max=0.0)


@st.composite
def load_results(draw: st.DrawFn) -> LoadResult:
    records = []
    for _ in range(draw(st.integers(0, 5))):
        sent = draw(st.floats(0, 100))
        gaps = draw(st.lists(st.sampled_from([0.0, 1e-6, 0.5, 30.0]), max_size=4))
        times = [sent + sum(gaps[: index + 1]) for index in range(len(gaps))]
        failure = draw(st.sampled_from([None, None, Failure(500, "<broken>")]))
        ended = (times or [sent])[-1] + draw(st.sampled_from([1e-6, 1.0]))
        records.append(RequestRecord(None, sent, ended, times, 4, 7, draw(st.integers(0, 9)), failure))
    load = draw(st.sampled_from([Load(concurrency=3), Load(rate=2.5), Load()]))
    return LoadResult(load, 0.0, max((record.ended for record in records), default=0.0), records, 0, HEALTHY)


@EXAMPLES
@given(st.lists(load_results(), max_size=4))
def test_a_picture_is_well_formed_and_its_coordinates_are_numbers_for_any_results(results: list[LoadResult]) -> None:
    if len(results) > 1:  # the loads of a sweep are of one kind
        results = [LoadResult(Load(concurrency=3), 0.0, r.seconds, r.records, 0, HEALTHY) for r in results]
    svg = picture(BenchReport(SERVER, BenchConfig(), 0, False, results=results))
    ElementTree.fromstring(svg)
    assert not re.search(r"\b(nan|inf)\b", svg)


def test_points_lie_where_their_values_are() -> None:
    corners = Line([(0.0, 0.0), (10.0, 50.0), (20.0, 100.0)], "#000000")
    svg = page("t", "s", [Panel("p", "x", "y", (corners,), wide=True)])
    path = re.search(r'd="M([^"]*)" fill="none"', svg)
    assert path is not None
    points = [tuple(map(float, point.split())) for point in path[1].split("L")]
    right, bottom = WIDTH - RIGHT, PANEL_HEIGHT - BOTTOM
    top = bottom - (bottom - TOP) / 1.05  # there is some room above the highest point
    expected = [(LEFT, bottom), ((LEFT + right) / 2, (bottom + top) / 2), (right, top)]
    assert points == [pytest.approx(point, abs=0.1) for point in expected]
