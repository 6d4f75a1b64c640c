"""Whatever a client asks of the calculator of plans, the answer is a plan or an error that names the field."""

import io
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from hotset.base.errors import HotsetError
from hotset.lab.plan import calculator
from hotset.lab.plan.calculator import calculate, main

NUMBERS = st.integers() | st.floats() | st.sampled_from([10**4000, -(10**400), 1e308, 5e-324, 1 << 62, True])
TEXTS = st.text() | st.sampled_from(["models", "served", "\0", "\ud800", "x" * 3000, "../x.json", "GLM-5.2", "h100"])
NESTED = st.recursive(
    NUMBERS | TEXTS | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=4
)
# Values that are within the ranges, but meet in no machine that exists.
IN_RANGE: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["glm-5.2", "Qwen3-8B", "llama-3.3-70b"]),
    "gpu": st.sampled_from(["h200", "rtx4090"]),
    "gpus": st.sampled_from([1, 2, 7]),
    "host_gib": st.integers(1, 1 << 20) | st.floats(0, 1 << 20, exclude_min=True),
    "context": st.integers(2, 1 << 24),
    "max_num_seqs": st.integers(1, 1 << 16),
    "goal": st.sampled_from(["throughput", "latency", "requests"]),
}


@pytest.fixture
def signals() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGPROF)
    yield
    signal.signal(signal.SIGPROF, handler)


@examples(20)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(IN_RANGE, NESTED)) | st.dictionaries(TEXTS, NESTED) | NESTED)
@example({"host_gib": 1e308})
@example({"model": "x" * 3000})
@example({"host_gib": 10**400})
@example({"gpus": [10**4000]})
@example({1: 2})
def test_only_hotset_errors_leave_the_calculator(values: Any) -> None:
    try:
        json.dumps(calculate(values), allow_nan=False)
    except HotsetError as error:
        assert len(str(error)) < 2000


@examples(2)
@given(st.fixed_dictionaries(IN_RANGE))
@example({"host_gib": 5e-324, "gpus": 1})
@example({"host_gib": 1 << 20, "gpus": 1, "max_num_seqs": 1 << 16})
def test_all_values_within_the_ranges_have_a_plan(values: dict[str, Any]) -> None:
    plan = calculate(values)
    assert json.loads(json.dumps(plan, allow_nan=False))["splits"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "x" * 257}, "model has 257 characters, and the limit is 256"),
        ({"gpu": "x" * 257}, "gpu has 257 characters, and the limit is 256"),
        ({"host_gib": 1e308}, r"--host-gib must lie in \[0, 1048576\]"),
        ({"host_gib": float("nan")}, r"--host-gib must lie in \[0, 1048576\]"),
        ({"host_gib": 1 << 400}, "host_gib has 401 bits, and the limit is 64"),
        ({"gpus": {"a": 1}}, "gpus must be of type int, got dict"),
        ({"model": "served"}, "model must be one of the examples"),
    ],
)
def test_an_error_names_the_field_and_its_limit(values: Any, message: str) -> None:
    with pytest.raises(HotsetError, match=message):
        calculate(values)


def test_files_in_the_working_directory_cannot_be_probed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    errors = []
    for name in ("there", "gone!"):
        with pytest.raises(HotsetError) as caught:
            calculate({"model": name})
        errors.append(str(caught.value).replace(name, ""))
    assert errors[0] == errors[1]


def test_after_an_unexpected_error_and_a_timeout_the_next_plan_is_made(
    monkeypatch: pytest.MonkeyPatch, signals: None
) -> None:
    def limited() -> Iterator[str]:
        yield "not JSON"
        monkeypatch.setattr(calculator, "CALCULATION_CPU_SECONDS", 1e-6)
        yield '{"gpus": 64}'
        monkeypatch.undo()
        yield '{"gpus": 1}'

    answers = io.StringIO()
    main(limited(), answers)
    failed, slow, plan = map(json.loads, answers.getvalue().splitlines())
    assert "JSONDecodeError" in failed["error"] and "which is the limit" in slow["error"] and plan["splits"]
