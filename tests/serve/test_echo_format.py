"""Echoed prompts and answers have exact texts and offsets. Prompts are truncated, and get special tokens."""

import asyncio
import operator
import threading
from array import array
from collections.abc import AsyncGenerator, Sequence
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import pytest
from byte_level import BYTES, byte_level
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from hotset.base.errors import ContextLengthExceeded
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.base.serve_config import ServeConfig
from hotset.engine.client import EngineClient
from hotset.engine.input_processor import Choice
from hotset.engine.output_processor import OutputProcessor
from hotset.engine.outputs import CompletionOutput, Delta
from hotset.models.tokenizer import Tokenizer, TokenizerParts
from hotset.schedule.plan import LogprobColumns, TokenOutputs
from hotset.serve.chunks import ChunkResponder, ResponseFormatter
from hotset.serve.completions import CompletionFormatter, _prompts
from hotset.serve.generation import GenerationJob, usage_of
from hotset.serve.protocol import CompletionRequest
from hotset.serve.responses import CompletionChoice
from hotset.serve.service import Service

CONTEXT = 40
BOS = "<s>"
PIECES = ["a", "b", " a", " b", "é", "€", " €", "🦊", "ab"]


@cache
def bytewise() -> Tokenizer:
    """A tokenizer whose tokens are bytes, and some strings of bytes that end within a character."""
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = [to_letters.pre_tokenize_str(piece)[0][0] for piece in PIECES]
    return finished(byte_level(list(dict.fromkeys([*BYTES, *words, words[5][:2], words[5][1:], "a" + words[7][:1]]))))


@cache
def spaced() -> Tokenizer:
    """A tokenizer like SentencePiece's, which drops the space before the first word of a text."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = [*bytes_, *(piece.replace(" ", "▁") for piece in PIECES)]
    backend = Backend(models.BPE({word: number for number, word in enumerate(vocabulary)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return finished(backend)


def finished(backend: Backend) -> Tokenizer:
    backend.add_special_tokens([BOS])
    return Tokenizer(TokenizerParts(backend, {"bos_token": BOS}, True, (), None, "test"))


TOKENIZERS = {"byte level": bytewise, "spaced": spaced}


def columns(tokens: int) -> LogprobColumns:
    """Log-probabilities of a prompt. The most likely token is always token 0."""
    count = tokens - 1
    return LogprobColumns(
        array("d", [-2.0] * count), array("i", [5] * count), array("i", [0] * count), array("d", [-1.0] * count)
    )


def deltas_of(
    tokenizer: Tokenizer, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams
) -> list[Delta]:
    """Returns the deltas of an answer, as the engine client produces them."""
    processor = OutputProcessor(tokenizer)
    processor.add([Choice("r/0", 0, PromptSpec(tuple(prompt), params), 1000)])
    scored = [] if params.prompt_logprobs is None else [("r/0", columns(len(prompt)))]
    outputs = [TokenOutputs(prompt_logprobs=scored)]
    for token in answer:
        outputs.append(TokenOutputs(["r/0"], [token], alternatives={0: {token: (-3.0, 2), 0: (-1.0, 1)}}))
    outputs.append(TokenOutputs(finished={"r/0": "length"}))
    return [delta for output in outputs for _, delta in processor.process(output)[0]]


def joined(choices: Sequence[CompletionChoice]) -> tuple[str, dict[str, list[Any]]]:
    logprobs = [choice.logprobs for choice in choices if choice.logprobs is not None]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return "".join(choice.text for choice in choices), {
        name: [value for each in logprobs for value in getattr(each, name)] for name in names
    }


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("skip_special", [True, False])
def test_offsets_of_an_echoed_prompt_and_its_answer_point_at_their_tokens(kind: str, skip_special: bool) -> None:
    tokenizer = TOKENIZERS[kind]()
    pieces = st.integers(256, 256 + len(PIECES) + 3)  # whole characters, parts of characters, special tokens
    valid = st.lists(pieces | st.integers(40, 100), min_size=1, max_size=12)
    invalid = st.lists(pieces | st.integers(1, 255), min_size=1, max_size=12)

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(valid | invalid, st.just([]) | valid | invalid)
    def check(prompt: list[int], answer: list[int]) -> None:
        params = SamplingParams(seed=0, logprobs=1, prompt_logprobs=1, skip_special_tokens=skip_special)
        text_of_prompt = tokenizer.decode(prompt, skip_special=skip_special)

        def formatter() -> CompletionFormatter:
            return CompletionFormatter(
                id="id",
                model="model",
                fingerprint="",
                tokenizer=tokenizer,
                prompts=[prompt],
                params=params,
                show_token_ids=False,
                echoed=[text_of_prompt],
                prompt_alternatives=None,
            )

        deltas = deltas_of(tokenizer, prompt, answer, params)
        output = CompletionOutput(0)
        for delta in deltas:
            output.extend(delta)
        streaming = formatter()
        chunks = [chunk for delta in deltas if (chunk := streaming.chunk(delta)) is not None]
        usage = usage_of(0, 0, 0)
        text, logprobs = joined(list(formatter().full_response([output], usage).choices))
        assert joined([choice for chunk in chunks for choice in chunk.choices]) == (text, logprobs)
        assert text == text_of_prompt + output.text
        assert logprobs["token_logprobs"] == [None, *[-2.0] * (len(prompt) - 1), *[-3.0] * len(answer)]
        assert logprobs["top_logprobs"][0] is None and None not in logprobs["top_logprobs"][1:]
        assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(prompt) + len(answer)
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        is_whole = whole_tokens(tokenizer, [*prompt, *answer], text)
        for index, (token, offset) in enumerate(zip([*prompt, *answer], logprobs["text_offset"], strict=True)):
            assert offset <= len(text) and (index != len(prompt) or offset == len(text_of_prompt))
            name = logprobs["tokens"][index]
            if not is_whole[index] or (skip_special and token in tokenizer.special_ids):
                continue
            shown = (name, name.removeprefix(" ")) if kind == "spaced" else name
            assert text[offset:].startswith(shown), (prompt, answer, index)

    check()


def whole_tokens(tokenizer: Tokenizer, token_ids: list[int], text: str) -> list[bool]:
    """Returns, for each token, True if it and all tokens before it consist of whole characters.

    In a run of byte tokens, one invalid byte makes all of them invalid; then no token counts as whole.
    """
    if tokenizer is spaced() and "\ufffd" in text:
        return [False] * len(token_ids)
    valid = ["\ufffd" not in tokenizer.token_bytes(token).decode(errors="replace") for token in token_ids]
    return list(accumulate(valid, operator.and_))


def service_of(tokenizer: Tokenizer) -> Service:
    client = SimpleNamespace(tokenizer=tokenizer, model=SimpleNamespace(max_model_len=CONTEXT))
    return Service(cast(EngineClient, client), ServeConfig())


def prompt_of(**fields: Any) -> list[int]:
    (prompt,) = asyncio.run(_prompts(service_of(bytewise()), CompletionRequest(model="m", **fields)))
    return prompt


def test_special_tokens_are_added_to_texts_unless_the_client_declines_them() -> None:
    (bos,) = bytewise().special_ids
    plain = prompt_of(prompt="ab", add_special_tokens=False)
    assert bos not in plain and prompt_of(prompt="ab") == [bos, *plain]
    assert prompt_of(prompt=plain, add_special_tokens=True) == plain, "nothing is added to token ids"


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, 3),
        ({"truncate_prompt_tokens": -1, "max_tokens": 5}, CONTEXT - 5),
        ({"truncate_prompt_tokens": -1, "max_tokens": 0}, CONTEXT - 1),
        ({"truncate_prompt_tokens": -1}, CONTEXT - 16),
        ({"truncate_prompt_tokens": -1, "max_tokens": 1, "min_tokens": 7}, CONTEXT - 7),
        ({"truncate_prompt_tokens": -1, "max_tokens": 1000}, 1),
        ({}, 100),
    ],
)
def test_truncation_keeps_the_last_tokens_and_leaves_room_for_the_answer(fields: dict[str, int], kept: int) -> None:
    ids = [number % 200 for number in range(100)]
    assert prompt_of(prompt=ids, **fields) == ids[-kept:]


def test_a_text_longer_than_the_context_is_encoded_only_to_be_truncated() -> None:
    text = "ab" * 100_000
    with pytest.raises(ContextLengthExceeded):
        prompt_of(prompt=text)
    assert prompt_of(prompt=text, truncate_prompt_tokens=4) == prompt_of(prompt="abab", add_special_tokens=False)


class ThreadRecorder:
    """A formatter that records the threads in which it is called."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def first_chunk(self, index: int) -> None:
        return None

    def chunk(self, delta: Delta) -> None:
        self.threads.append(threading.current_thread().name)


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_log_probabilities_of_prompts_are_formatted_outside_the_event_loop(prompt_logprobs: int | None) -> None:
    """This test has a stream. test_long_logprobs.py has whole answers."""
    tokenizer, prompt = bytewise(), [1, 2, 3]
    params = SamplingParams(seed=0, prompt_logprobs=prompt_logprobs)
    formatter = ThreadRecorder()
    job = GenerationJob("id", [prompt], params, stream=True)

    async def deltas() -> AsyncGenerator[Delta, None]:
        for delta in deltas_of(tokenizer, prompt, [5, 6], params):
            yield delta

    async def respond() -> None:
        responder = ChunkResponder(service_of(tokenizer), job, cast(ResponseFormatter, formatter))
        async for _ in responder.events(deltas()):
            pass

    asyncio.run(respond())
    assert formatter.threads[0].startswith("hotset-text" if prompt_logprobs is not None else "MainThread")
    assert set(formatter.threads[1:]) <= {"MainThread"}, "deltas without log-probabilities of a prompt are small"
