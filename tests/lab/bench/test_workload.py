"""The requests of a benchmark have the requested lengths and shared prefixes, and files of requests are checked."""

import json
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from hotset.base.errors import ConfigError
from hotset.lab.bench.config import BenchConfig, LengthRange, Load
from hotset.lab.bench.words import WORDS
from hotset.lab.bench.workload import TRACE_BLOCK_TOKENS, PlannedRequest, PromptSource, Workload

EXAMPLES = examples(15)
IDS = PromptSource(range(1000, 2000))


def planned(config: BenchConfig, count: int, source: PromptSource = IDS, seed: int = 7, load: int = 0) -> list[Any]:
    return list(islice(Workload(config, seed).requests(source, load), count))


def write_lines(path: Path, *lines: object) -> str:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


@EXAMPLES
@given(st.integers(1, 300), st.integers(0, 200), st.integers(0, 250), st.integers(0, 1000))
def test_random_prompts_have_the_requested_lengths_and_the_same_prefix(
    shortest: int, spread: int, prefix: int, seed: int
) -> None:
    prefix = min(prefix, shortest - 1)
    config = BenchConfig(input_tokens=f"{shortest}-{shortest + spread}", output_tokens="3-5", prefix_tokens=prefix)
    requests = planned(config, 20, seed=seed)
    assert all(shortest <= len(request.prompt) <= shortest + spread for request in requests)
    assert {request.output_tokens for request in requests} <= {3, 4, 5}
    assert all(request.prompt[:prefix] == requests[0].prompt[:prefix] for request in requests)
    assert requests == planned(config, 20, seed=seed)
    other_load = planned(config, 1, seed=seed, load=1)[0]
    assert other_load.prompt[:prefix] == requests[0].prompt[:prefix]


def test_only_the_prefix_is_shared() -> None:
    config = BenchConfig(input_tokens="200", prefix_tokens=100)
    prompts = [request.prompt for load in (0, 1) for request in planned(config, 20, load=load)]
    assert len({tuple(prompt[:100]) for prompt in prompts}) == 1
    assert len({tuple(prompt[100:110]) for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize(("tokens", "words"), [(45, 20), (46, 20), (5, 1), (1, 1)])
def test_texts_have_as_many_words_as_the_server_counts_as_the_requested_tokens(tokens: int, words: int) -> None:
    source = PromptSource(WORDS, tokens_per_unit=2.0, extra_tokens=5.0)
    [request] = planned(BenchConfig(input_tokens=str(tokens)), 1, source)
    assert request.prompt.split()[0] == "the" and len(request.prompt.split()) == words


def trace_line(timestamp: float, tokens: int, output: int, ids: list[int]) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": ids}


def shared(first: list[Any], second: list[Any]) -> int:
    """Returns how many leading elements are equal."""
    return next(
        (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


@EXAMPLES
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 511)), min_size=2, max_size=6
    ),
    st.sampled_from([1.0, 0.25, 0.1]),
    st.sampled_from([1.0, 4.0]),
)
def test_prompts_of_a_trace_share_a_prefix_exactly_as_far_as_their_hash_ids_are_equal(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[list[int], int]], scale: float, speed: float
) -> None:
    lengths = [len(ids) * TRACE_BLOCK_TOKENS - missing for ids, missing in entries]
    lines = [trace_line(100 * n + 50, lengths[n], 10 + n, ids) for n, (ids, _) in enumerate(entries)]
    path = write_lines(tmp_path_factory.mktemp("trace") / "t.jsonl", *lines)
    workload = Workload(BenchConfig(trace=path, scale_lengths=scale, trace_speed=speed), 7)
    requests = list(workload.requests(IDS, 0))
    assert [request.offset for request in requests] == pytest.approx([n / 10 / speed for n in range(len(entries))])
    assert [len(request.prompt) for request in requests] == [max(1, round(length * scale)) for length in lengths]
    assert [request.output_tokens for request in requests] == [
        max(1, round((10 + n) * scale)) for n in range(len(entries))
    ]
    assert workload.longest() == max(len(request.prompt) + request.output_tokens for request in requests)
    block = round(TRACE_BLOCK_TOKENS * scale)
    for (a, first), (b, second) in combinations(enumerate(requests), 2):
        equal_blocks = shared(entries[a][0], entries[b][0])
        expected = min(equal_blocks * block, len(first.prompt), len(second.prompt))
        found = shared(first.prompt, second.prompt)
        # Random tokens after the shared blocks are equal by chance with a probability of 1/1000 each.
        assert expected <= found <= expected + 3


def test_a_trace_is_limited_by_the_number_of_requests(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", *(trace_line(n, 600, 4, [0, n]) for n in range(5)))
    assert Workload(BenchConfig(trace=path), 0).num_requests == 5
    limited = Workload(BenchConfig(trace=path, num_requests=2), 0)
    assert limited.num_requests == 2 and len(list(limited.requests(IDS, 0))) == 2


def test_a_dataset_is_repeated_and_may_give_the_length_of_answers(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", {"prompt": "one"}, "", {"prompt": "two", "output_tokens": 3})
    expected = [PlannedRequest("one", 64), PlannedRequest("two", 3), PlannedRequest("one", 64)]
    assert planned(BenchConfig(dataset=path), 3) == expected
    messages = [{"role": "user", "content": "hi"}]
    path = write_lines(tmp_path / "m.jsonl", {"messages": messages})
    assert planned(BenchConfig(dataset=path, endpoint="chat"), 1) == [PlannedRequest(messages, 64)]


@pytest.mark.parametrize(
    ("flag", "content", "message"),
    [
        ("trace", None, "cannot read --trace"),
        ("trace", "", "has no lines"),
        ("trace", "{}", "line 1: the field 'input_length' is missing"),
        ("trace", '{"input_length": 9, "output_length": 1}', "the field 'timestamp' is missing"),
        ("trace", "\n[1]", "line 2: "),
        ("trace", "nonsense", "line 1: "),
        ("trace", "[" * 3000 + "]" * 3000, "line 1: "),
        ("trace", '{"timestamp": 0, "input_length": "x", "output_length": 1}', "line 1: invalid literal"),
        ("trace", json.dumps(trace_line(0, 513, 1, [1])), "1 hash_ids for 513 tokens; there must be one for each 512"),
        ("dataset", "{}", "line 1: the field 'prompt' is missing"),
        ("dataset", '{"messages": []}', "messages need --endpoint chat"),
        ("dataset", '{"prompt": 3}', "prompt must be a string, and messages a list"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_line(
    flag: str, content: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as error:
        Workload(BenchConfig(**{flag: str(path)}), 0)
    assert message in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"concurrency": "1,x"}, "--concurrency 1,x: write a number, or several separated by commas"),
        ({"concurrency": "0"}, "--concurrency must lie in [1, 65536], got 0"),
        ({"rate": "0"}, "--rate must be above 0, got 0"),
        ({"rate": "nan"}, "--rate must be above 0, got nan"),
        ({"rate": "1", "concurrency": "1"}, "leave one of them out"),
        ({"rate": "inf", "duration": 1.0}, "say how many with --num-requests"),
        ({"rate": "1", "burstiness": 0.0}, "--burstiness must be above 0"),
        ({"burstiness": 2.0}, "--burstiness has no effect without --rate"),
        ({"scale_lengths": 0.5}, "--scale-lengths has no effect without --trace"),
        ({"trace": "t", "input_tokens": "9"}, "--input-tokens has no effect with --trace, which gives the requests"),
        ({"dataset": "d", "prefix_tokens": 9}, "--prefix-tokens has no effect with --dataset"),
        ({"input_tokens": "12-"}, "--input-tokens 12-: write a number of tokens, or a range like 512-2048"),
        ({"output_tokens": "9-3"}, "a range must begin with the smaller one"),
        ({"input_tokens": "0"}, "lengths must be at least 1"),
        ({"prefix_tokens": 256}, "--prefix-tokens 256 must be less than the shortest prompt, which has 256 tokens"),
        ({"slo": "ttft"}, "--slo ttft: write limits in milliseconds for ttft, tpot, e2e"),
        ({"slo": "itl:5"}, "like ttft:500,tpot:50"),
        ({"slo": ""}, "like ttft:500,tpot:50"),
        ({"extra_body": "[1]"}, "--extra-body must be a JSON object"),
        ({"endpoint": "chat", "prompt_format": "ids"}, "--prompt-format ids needs --endpoint completions"),
        ({"trace": "a", "dataset": "b"}, "both give the requests"),
        ({"num_requests": 0}, "--num-requests must be at least 1"),
        ({"duration": 0.0}, "--duration must be a finite number above 0"),
        ({"endpoint": "embeddings"}, "--endpoint must be one of 'completions', 'chat'"),
    ],
)
def test_invalid_and_contradictory_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        BenchConfig(**values)
    assert message in str(error.value)


def test_settings_are_parsed() -> None:
    config = BenchConfig(rate="0.5,inf", num_requests=4, input_tokens="8-16", slo="ttft:500, tpot:50")
    assert config.loads == [Load(rate=0.5), Load(rate=float("inf"))]
    assert [load.label for load in config.loads] == ["0.5 requests/s", "all requests at once"]
    assert config.input_lengths == LengthRange(8, 16) and config.objectives == {"ttft": 0.5, "tpot": 0.05}
    assert BenchConfig().loads == [Load(concurrency=4)] and BenchConfig().max_requests == 32
    assert BenchConfig(duration=1.0).max_requests is None and BenchConfig(trace="t").loads == [Load()]
    assert BenchConfig(trace="t", concurrency="2").loads == [Load(concurrency=2)]
