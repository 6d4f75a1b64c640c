"""The offline API, with a tiny model that has no tokenizer and with one whose answers are scripted.

tests/test_cli.py chats with the embedded model.
"""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from harness import tiny_directory
from processes import children_of
from scripted_model import write_scripted_model

from hotset import LLM, ChatOptions, SamplingParams
from hotset.base.errors import CheckpointError, ConfigError, ContextLengthExceeded, EngineStopped, RequestError
from hotset.models.answer_parser import DividedText

IDS = {"prompt_token_ids": [5, 6, 7]}


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[LLM]:
    with LLM(tiny_directory(tmp_path), load_format="dummy", device="cpu", device_kv_tokens=256, page_rows=4) as llm:
        yield llm
        llm.audit()
        assert llm.stats().device_pages_held == 0


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    scripts = {
        "capital": ["The capital", " of France", " is", " the city", " of Paris."],
        "result": ["It is so."],
        "other": ["I do not know."],
    }
    model = write_scripted_model(tmp_path_factory.mktemp("scripted"), scripts)
    with LLM(model, device="cpu", device_kv_tokens=2048, max_model_len=1024) as llm:
        yield llm


def test_a_model_without_a_tokenizer_serves_token_ids(tiny: LLM) -> None:
    outputs = tiny.generate(
        [IDS, {"prompt_token_ids": [9]}], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 5]
    assert outputs[0].prompt_token_ids == [5, 6, 7]
    assert outputs[0].outputs[0].text == ""
    assert outputs[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ("text", {}, RequestError, "tokenizer"),
        (IDS, {"stop": ["x"]}, RequestError, "tokenizer"),
        ({"prompt_token_ids": []}, {}, RequestError, "empty"),
        ({"prompt_token_ids": [50]}, {}, RequestError, "vocabulary ends at 49"),
        ({"prompt_token_ids": [1.5]}, {}, RequestError, "whole numbers"),
        ({"prompt_token_ids": 5}, {}, RequestError, "whole numbers"),
        ({"prompt_token_ids": [5], "prompt": "x"}, {}, RequestError, "a prompt must be"),
        ({"tokens": [1]}, {}, RequestError, "a prompt must be"),
        ({"prompt_token_ids": [1] * 128}, {"max_tokens": 1}, ContextLengthExceeded, "holds 128 tokens, but 129"),
        (IDS, {"max_tokens": 126}, ContextLengthExceeded, "3 in the prompt, 126 for the answer"),
        (IDS, {"logit_bias": {50: 1.0}}, RequestError, "logit_bias"),
        (IDS | {"cache_salt": ""}, {}, RequestError, "cache_salt must have 1 to 256 characters, but has 0"),
        (IDS | {"cache_salt": "x" * 257}, {}, RequestError, "cache_salt must have 1 to 256 characters, but has 257"),
        (IDS | {"cache_salt": 5}, {}, RequestError, "cache_salt must be a text, but is of type int"),
        (IDS | {"cache_salt": "a\udfff"}, {}, RequestError, "cache_salt must not contain lone surrogates"),
        ({"cache_salt": "a"}, {}, RequestError, "a prompt must be"),
    ],
)
def test_invalid_prompts_are_refused_with_a_reason_and_hold_no_pages(
    tiny: LLM, prompt: object, params: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tiny.generate([IDS, prompt], SamplingParams(**params))  # type: ignore[list-item, arg-type]
    assert tiny.stats().device_pages_held == tiny.stats().waiting == 0


@pytest.mark.parametrize(
    "field",
    [
        {"stop": None},
        {"stop": 5},
        {"stop": "x" * 1025},
        {"stop_token_ids": 5},
        {"logit_bias": [1]},
        {"ignore_eos": "no"},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"n": 0},
        {"min_tokens": 17},
        {"max_tokens": -1},
        {"prompt_logprobs": 21},
        {"prompt_logprobs": True},
    ],
)
def test_a_sampling_parameter_of_the_wrong_type_or_range_is_refused_and_named(field: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**field)
    assert caught.value.param == next(iter(field))


def test_closing_a_stream_aborts_its_request(tiny: LLM) -> None:
    stream = tiny.stream(IDS, SamplingParams(max_tokens=100, ignore_eos=True, n=2))
    next(stream)
    assert tiny.stats().device_pages_held > 0
    stream.close()
    assert tiny.stats().device_pages_held == 0
    assert tiny.stats().requests_finished == {"abort": 2}


def test_two_streams_can_be_read_alternately(tiny: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = [list(output.outputs[0].token_ids) for output in tiny.generate([IDS, {"prompt_token_ids": [9]}], params)]
    streams = [tiny.stream(IDS, params), tiny.stream({"prompt_token_ids": [9]}, params)]
    got: list[list[int]] = [[], []]
    for _ in range(6):
        for index, stream in enumerate(streams):
            got[index] += next(stream).token_ids
    assert got == expected
    assert all(next(stream, None) is None for stream in streams)


def test_a_seed_makes_answers_repeatable_and_choices_still_differ(tiny: LLM) -> None:
    params = SamplingParams(seed=11, max_tokens=12, n=3, ignore_eos=True)
    first, second = (tiny.generate(IDS, params)[0].outputs for _ in range(2))
    assert [choice.token_ids for choice in first] == [choice.token_ids for choice in second]
    assert len({tuple(choice.token_ids) for choice in first}) == 3
    single = tiny.generate(IDS, SamplingParams(seed=11, max_tokens=12, ignore_eos=True))[0].outputs[0]
    assert single.token_ids == first[0].token_ids


def test_stop_ids_end_the_answer_but_not_before_min_tokens(tiny: LLM) -> None:
    greedy = tiny.generate(IDS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].outputs[0].token_ids
    stop = greedy[2]
    end = greedy.index(stop) + 1
    ended = tiny.generate(IDS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop]))[
        0
    ].outputs[0]
    assert ended.token_ids == greedy[:end]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    delayed = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop], min_tokens=8)
    assert stop not in tiny.generate(IDS, delayed)[0].outputs[0].token_ids[:7]


def test_the_answer_as_part_of_a_prompt_has_the_log_probabilities_that_it_had_as_an_answer(tiny: LLM) -> None:
    prompt = IDS["prompt_token_ids"]
    params = SamplingParams(seed=1, max_tokens=9, logprobs=3, ignore_eos=True, repetition_penalty=1.4, n=2)
    for answer in tiny.generate(IDS, params)[0].outputs:
        whole = {"prompt_token_ids": [*prompt, *answer.token_ids]}
        output = tiny.generate(whole, SamplingParams(max_tokens=0, prompt_logprobs=3))[0]
        assert output.outputs[0].token_ids == [] and output.outputs[0].finish_reason == "length"
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt) + 9
        assert output.prompt_logprobs[0] is None and answer.logprobs is not None
        for as_prompt, as_answer in zip(output.prompt_logprobs[-9:], answer.logprobs, strict=True):
            assert as_prompt is not None and as_prompt.keys() == as_answer.keys()
            for token, entry in as_answer.items():
                assert as_prompt[token].rank == entry.rank
                assert as_prompt[token].logprob == pytest.approx(entry.logprob, abs=1e-4)
    (delta,) = tiny.stream(IDS, SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert delta.prompt_logprobs is not None and [len(entry or ()) for entry in delta.prompt_logprobs] == [0, 1, 1]
    assert tiny.generate(IDS, SamplingParams(max_tokens=1))[0].prompt_logprobs is None


def test_a_closed_llm_refuses_open_streams_and_new_requests(tmp_path: Path) -> None:
    llm = LLM(tiny_directory(tmp_path), load_format="dummy", device="cpu", device_kv_tokens=128)
    stream = llm.stream(IDS, SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    llm.close()
    assert llm.stats().device_pages_held == 0
    with pytest.raises(EngineStopped):
        next(stream)
    with pytest.raises(EngineStopped):
        llm.generate(IDS)


def test_a_prompt_that_begins_like_an_earlier_one_is_computed_from_where_they_differ(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "device_kv_tokens": 512, "page_rows": 4}
    settings["dtype"] = "float64"  # chunks of other sizes are rounded otherwise, but choose the same tokens
    settings["max_num_batched_tokens"] = 8  # the first token comes several steps after the admission
    model, seed = tiny_directory(tmp_path), random.randrange(1 << 32)
    print(f"seed {seed}")  # pytest shows it if the test fails
    rng = random.Random(seed)
    first = [rng.randrange(4, 50) for _ in range(rng.randrange(30, 50))]
    shared = rng.randrange(9, 20)
    second = [*first[:shared], 3, *(rng.randrange(4, 50) for _ in range(20))]  # 3 is not in `first`
    prompts = [
        {"prompt_token_ids": first},
        {"prompt_token_ids": first},
        {"prompt_token_ids": second},
        {"prompt_token_ids": first, "cache_salt": "tenant"},
        {"prompt_token_ids": first, "cache_salt": "tenant"},
        {"prompt_token_ids": first[:5]},
    ]
    whole = (len(first) - 1) // 4 * 4
    expected = [0, whole, shared // 4 * 4, 0, whole, 4]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(model, **settings, prefix_cache=False) as llm:
        answers = [llm.generate(prompt, params)[0] for prompt in prompts]
        assert [answer.num_cached_tokens for answer in answers] == [0] * len(prompts)
        assert llm.stats().tokens_queried == llm.stats().host_pages_cached == 0
    with LLM(model, **settings) as llm:
        reused = [llm.generate(prompt, params)[0] for prompt in prompts]
        stats = llm.stats()
        choices = llm.generate({"prompt_token_ids": second, "cache_salt": "n"}, SamplingParams(n=3, max_tokens=1))[0]
        deltas = list(llm.stream({"prompt_token_ids": first}, params))
    assert [answer.outputs[0].token_ids for answer in reused] == [answer.outputs[0].token_ids for answer in answers]
    assert [answer.num_cached_tokens for answer in reused] == expected
    num_tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
    assert (stats.tokens_queried, stats.tokens_reused) == (num_tokens, sum(expected))
    assert stats.tokens_prefilled == num_tokens - sum(expected)
    assert stats.host_pages_held == 0 and stats.host_pages_cached > 2 * (len(first) // 4)
    assert [choice.cached_tokens for choice in choices.outputs] == [0, *[(len(second) - 1) // 4 * 4] * 2]
    assert choices.num_cached_tokens == 0, "the prompt counts once, and its first choice computed it"
    assert {delta.cached_tokens for delta in deltas} == {whole}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "--device"),
        ({"device": "cuda:99"}, "--device"),
        ({"max_model_len": 129}, "exceeds the 128 tokens"),
        ({"max_model_len": 128, "device_kv_tokens": 64}, "raise --device-kv-tokens"),
        ({"device_kv_gib": 100000.0}, "lower it"),
        ({"dtype": "int3"}, "--dtype"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
    ],
)
def test_impossible_settings_are_refused_with_their_flag(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LLM(tiny_directory(tmp_path), load_format="dummy", **settings)
    assert "\n" not in str(caught.value)


def test_invalid_sampling_defaults_of_a_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 50}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature"):
        LLM(tiny_directory(tmp_path), load_format="dummy", device="cpu", device_kv_tokens=64)


def test_the_maximum_context_length_shrinks_to_fit_the_memory_if_it_is_not_configured(tmp_path: Path) -> None:
    with LLM(tiny_directory(tmp_path), load_format="dummy", device="cpu", device_kv_tokens=64) as llm:
        assert llm.card.max_model_len == 64


def test_a_chat_is_answered_and_the_answer_ends_with_its_turn(scripted: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = scripted.chat(question, SamplingParams(temperature=0, max_tokens=30))[0].outputs[0]
    assert (answer.text, answer.finish_reason) == ("The capital of France is the city of Paris.", "stop")


def test_an_answer_can_continue_the_last_message(scripted: LLM) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    messages = [question, {"role": "assistant", "content": "The capital of France is the city"}]
    options = ChatOptions(continue_final_message=True)
    params = SamplingParams(temperature=0, max_tokens=4)
    (answer,) = scripted.chat(messages, params, options=options)
    assert scripted.tokenizer is not None
    assert scripted.tokenizer.decode(answer.prompt_token_ids).endswith("assistant: The capital of France is the city")
    streamed = "".join(delta.text for delta in scripted.stream_chat(messages, params, options=options))
    assert streamed == answer.outputs[0].text == " of Paris."
    parser = scripted.answer_parser(messages, options)
    assert DividedText.of([*parser.push(streamed), *parser.finish()]) == DividedText("", streamed)


def test_a_text_far_beyond_the_context_is_refused_before_all_of_it_is_tokenized(scripted: LLM) -> None:
    text = "word " * 200_000
    for ask in (lambda: scripted.generate(text), lambda: scripted.chat([{"role": "user", "content": text}])):
        with pytest.raises(ContextLengthExceeded, match=r"the limit is 1024 tokens, but the first 131072 of \d+"):
            ask()


def test_closing_an_llm_ends_the_process_of_its_chat_template(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "!": 1}, [])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    before = children_of(os.getpid())
    model = tiny_directory(tmp_path)
    with LLM(model, tokenizer=str(folder), load_format="dummy", device="cpu", device_kv_tokens=64) as llm:
        assert len(children_of(os.getpid()) - before) == 1
        (answer,) = llm.chat([{"role": "user", "content": "aa"}], SamplingParams(max_tokens=1))
        assert answer.prompt_token_ids == [0, 0, 1]
    assert children_of(os.getpid()) <= before


def test_a_stop_string_ends_the_text_and_frees_the_pages(scripted: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, stop=["France"])
    answer = scripted.chat([{"role": "user", "content": "What is the capital of France?"}], params)[0].outputs[0]
    assert answer.text == "The capital of "
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "France")
    assert scripted.stats().device_pages_held == 0
    assert "abort" not in scripted.stats().requests_finished, "a stop string was counted as an abort"
