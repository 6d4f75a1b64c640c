"""The tokenizer of one model: text to tokens and back, and chat messages to a prompt."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tokenizers

from hotset.base.errors import CheckpointError, ContextLengthExceeded, MissingDependency, RequestError
from hotset.base.job_pool import JobPool
from hotset.base.units import MIB
from hotset.models.answer_parser import REASONING_MARKERS, SHOWN_MARKERS, AnswerParser, PlainParser, ThinkParser
from hotset.models.chat_formats import built_in_template, read_template
from hotset.models.chat_prompt import MAX_TEMPLATE_BYTES, SPECIAL_TOKEN_NAMES, ChatFormat, ChatOptions, Message
from hotset.models.checkpoint.files import ModelFiles, find_tokenizer
from hotset.models.checkpoint.gguf_file import GgufFile
from hotset.models.checkpoint.gguf_spec import gguf_eos_ids
from hotset.models.config_fields import read_optional_json, read_text
from hotset.models.gguf_tokenizer import build_gguf_tokenizer, gguf_adds_bos, gguf_special_tokens
from hotset.models.text_stream import BYTE_TOKEN, ByteStream, TextStream, WindowStream
from hotset.models.tokenizer_probe import may_have_patterns, why_unusable

DEFAULT_CLASS = "PreTrainedTokenizerFast"
MAX_TOKENIZER_BYTES = 256 * MIB  # vocabularies of 260,000 tokens have 35 MiB
MAX_TOKEN_ID = (1 << 32) - 1  # the library uses 32-bit unsigned integers
# A longer text is first encoded in slices of this length, to count its tokens: the library needs some 100 bytes for
# each token of a text, so a text that is far too long must not be encoded as a whole.
SLICE_CHARACTERS = 1 << 17
# A slice may have up to this many tokens more than its characters have in the whole text: its ends divide words.
SLICE_TOLERANCE = 64


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The components of a tokenizer, from a directory or from a GGUF file."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]  # 'bos_token' -> '<s>'
    adds_bos: bool  # prompts start with BOS even if the backend does not add it
    chat_stop_ids: tuple[int, ...]
    chat_template: str | None
    source: str  # the path with which error messages start
    class_name: str = DEFAULT_CLASS  # in the `transformers` library


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """The user's settings for chats. They have precedence over the files of the model."""

    template_file: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # defaults for every conversation
    reasoning_parser: Literal["auto", "think", "none"] = "auto"


class Tokenizer:
    """One model's tokenizer. It is immutable and safe to share between threads. `close` ends its child processes."""

    def __init__(self, parts: TokenizerParts, chat: ChatSettings | None = None) -> None:
        chat = chat or ChatSettings()
        backend = parts.backend
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        # Markers of reasoning and of tool calls are never hidden, because answers are divided at them.
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in added.items() if token.special and token.content not in SHOWN_MARKERS
        )
        self.chat_stop_ids: tuple[int, ...] = parts.chat_stop_ids
        self._byte_level = _is_byte_level(backend)
        self._prefix = _missing_bos(parts)
        self._chat_format = _chat_format(parts, chat.template_kwargs)
        # The processes that render the chat template, and that work on other texts of clients. They start when needed.
        self.jobs = JobPool(MAX_TEMPLATE_BYTES) if self._chat_format is None else self._chat_format.jobs
        marked = all(backend.token_to_id(marker) is not None for marker in REASONING_MARKERS)
        # Grammars must name these tokens by their ids: the library does not find them in texts.
        self.grammar_ids: Mapping[str, int] = {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        self.chat_template = parts.chat_template
        self.parses_reasoning = marked if chat.reasoning_parser == "auto" else chat.reasoning_parser == "think"
        self.description = _description(parts)

    @classmethod
    def load(cls, files: ModelFiles, override: str | None, chat: ChatSettings | None = None) -> "Tokenizer | None":
        """Loads the tokenizer of `files`, or of the directory `override`.

        The chat template is the file in `chat`, else the template that comes with the tokenizer, else the built-in one
        of the model's architecture. Returns None for a model directory without tokenizer.json. Raises `CheckpointError`
        for damaged files and for kinds of tokenizer that are not supported.
        """
        parts = _parts_of(files, override)
        if parts is not None and chat is not None and chat.template_file is not None:
            parts = replace(parts, chat_template=read_template(chat.template_file), source=chat.template_file)
        return None if parts is None else cls(parts, chat)

    def to_json(self) -> str:
        """Returns the tokenizer in the format of tokenizer.json."""
        return self._backend.to_str()

    def encode(self, text: str, *, add_special: bool = True, max_tokens: int | None = None) -> list[int]:
        """Encodes `text`; `add_special` adds the tokens that the model expects around it (such as BOS).

        Raises `RequestError` for text that UTF-8 cannot represent, and `ContextLengthExceeded` for a long text that has
        more than `max_tokens` tokens. The number is not checked exactly: callers must compare the length of the result.
        """
        if max_tokens is not None and len(text) > SLICE_CHARACTERS:
            self._check_length(text, max_tokens)
        ids = self._encoding(text, add_special).ids
        return [*self._prefix, *ids] if add_special else ids

    def _check_length(self, text: str, max_tokens: int) -> None:
        """Raises `ContextLengthExceeded` as soon as the first slices of a text have more than `max_tokens` tokens."""
        at_least = 0
        for start in range(0, len(text), SLICE_CHARACTERS):
            piece = text[start : start + SLICE_CHARACTERS]
            at_least += max(0, len(self._encoding(piece, add_special=False)) - SLICE_TOLERANCE)
            if at_least > max_tokens:
                raise ContextLengthExceeded(
                    f"the limit is {max_tokens} tokens, but the first {start + len(piece)} of {len(text)} characters "
                    f"have at least {at_least} tokens already; shorten the text",
                    param="prompt",
                )

    def _encoding(self, text: str, add_special: bool) -> tokenizers.Encoding:
        try:
            # The library holds the GIL while it encodes one text, but not while it encodes a batch.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
        except (TypeError, UnicodeEncodeError) as error:  # half of a surrogate pair: valid in JSON, not in UTF-8
            raise RequestError("the text cannot be encoded in UTF-8: it contains half of a surrogate pair") from error
        except BaseException as error:
            # A pattern backtracked too often. The library's exception is not an Exception and cannot be imported.
            if type(error).__name__ != "PanicException":
                raise
            raise RequestError(f"the tokenizer fails on this text: {error}") from error
        return encoding

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Decodes `token_ids`; ids outside the vocabulary produce no text."""
        valid = [token_id for token_id in token_ids if 0 <= token_id <= MAX_TOKEN_ID]
        return self._backend.decode(valid, skip_special_tokens=skip_special)

    def stream(self, *, skip_special: bool = True) -> TextStream:
        """Returns a stream that decodes one answer token by token."""

        def piece_of(token_id: int) -> str | None:
            return None if skip_special and token_id in self.special_ids else self._piece(token_id)

        def bytes_of(token_id: int) -> bytes:
            return b"" if skip_special and token_id in self.special_ids else self.token_bytes(token_id)

        if self._byte_level:
            return ByteStream(bytes_of)
        return WindowStream(piece_of, lambda ids: self.decode(ids, skip_special=False))

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token, which may be a part of a character. Ids outside the vocabulary have none."""
        piece = self._piece(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            # As in the library, a token with a character outside the alphabet (an added token) stands for itself.
            in_alphabet = all(character in BYTE_OF for character in piece)
            return bytes(BYTE_OF[character] for character in piece) if in_alphabet else piece.encode()
        byte = BYTE_TOKEN.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()

    def render_chat(self, messages: Sequence[Message], options: ChatOptions | None = None) -> str:
        """Renders the prompt for the next answer. Encode it with `add_special=False`: templates write their own BOS.

        Raises `RequestError` if the model has no chat template, or if the template refuses the messages or fails on
        them (code chat_template_failed).
        """
        if self._chat_format is None:
            raise RequestError("this model has no chat template; send a prompt instead of messages", param="messages")
        return self._chat_format.render(messages, options or ChatOptions())

    def answer_parser(self, *, in_reasoning: bool) -> AnswerParser:
        """Returns a parser for one answer. See `ends_in_reasoning` for `in_reasoning`."""
        return ThinkParser(in_reasoning=in_reasoning) if self.parses_reasoning else PlainParser()

    def close(self) -> None:
        """Ends the processes that work on texts of clients. Idempotent."""
        self.jobs.close()

    def _piece(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id) if 0 <= token_id <= MAX_TOKEN_ID else None


def read_tokenizer_json(files: ModelFiles, override: str | None) -> str | None:
    """Returns the tokenizer of `files`, or of the directory `override`, in the format of tokenizer.json. Raises like
    `Tokenizer.load`."""
    parts = _parts_of(files, override)
    return None if parts is None else parts.backend.to_str()


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte of each printable character of byte-level vocabularies.

    Visible Latin-1 characters stand for their own byte; the characters from 256 stand for the other bytes, in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    invisible = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + number): byte for number, byte in enumerate(invisible)}


BYTE_OF = _byte_alphabet()


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    if backend.decoder is None:
        return False
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return [step["type"] for step in steps] == ["ByteLevel"]


def _missing_bos(parts: TokenizerParts) -> tuple[int, ...]:
    """Returns BOS if the configuration requires it and the backend does not add it."""
    bos = parts.backend.token_to_id(parts.special_tokens.get("bos_token", ""))
    if not parts.adds_bos or bos is None or bos in parts.backend.encode("", add_special_tokens=True).ids:
        return ()
    return (bos,)


def _chat_format(parts: TokenizerParts, template_kwargs: Mapping[str, Any]) -> ChatFormat | None:
    if parts.chat_template is None:
        return None
    if importlib.util.find_spec("jinja2") is None:
        raise MissingDependency("chat templates need jinja2: pip install 'jinja2>=3.1.6'")
    return ChatFormat(parts.chat_template, parts.special_tokens, parts.source, template_kwargs)


def _description(parts: TokenizerParts) -> dict[str, Any]:
    """Returns what clients may want to know about the tokenizer, with the names of tokenizer_config.json."""
    return {
        "tokenizer_class": parts.class_name,
        "vocab_size": parts.backend.get_vocab_size(with_added_tokens=True),
        "add_bos_token": parts.adds_bos,
        "chat_template": parts.chat_template,
        **parts.special_tokens,
    }


def _parts_of(files: ModelFiles, override: str | None) -> TokenizerParts | None:
    path = find_tokenizer(files, override)
    if path is None:
        return None
    if override is None and files.gguf is not None:
        return _gguf_parts(files.gguf)
    parts = _directory_parts(path)
    if parts.chat_template is not None:
        return parts
    return replace(parts, chat_template=built_in_template(files.spec.architecture))


def _directory_parts(directory: Path) -> TokenizerParts:
    backend = _read_backend(directory / "tokenizer.json")
    config = read_optional_json(directory / "special_tokens_map.json")
    config |= read_optional_json(directory / "tokenizer_config.json")
    special = {name: _content(config.get(name)) for name in SPECIAL_TOKEN_NAMES}
    special_tokens = {name: token for name, token in special.items() if token is not None}
    eos_id = backend.token_to_id(special_tokens.get("eos_token", ""))
    class_name = config.get("tokenizer_class")
    return TokenizerParts(
        backend=backend,
        special_tokens=special_tokens,
        adds_bos=config.get("add_bos_token") is True,
        chat_stop_ids=() if eos_id is None else (eos_id,),
        chat_template=_find_template(directory, config.get("chat_template")),
        source=str(directory),
        class_name=class_name if isinstance(class_name, str) else DEFAULT_CLASS,
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    """Reads tokenizer.json. If it may contain patterns, it is tried in another process first."""
    content = read_text(path, MAX_TOKENIZER_BYTES)
    reason = why_unusable(path) if may_have_patterns(content) else None
    if reason is not None:
        raise CheckpointError(f"{path} is not usable as a tokenizer: {reason}")
    try:
        return tokenizers.Tokenizer.from_str(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing more specific, and a panic is not an Exception
        raise CheckpointError(f"{path} is not readable as a tokenizer: {error}") from error


def _content(token: object) -> str | None:
    """Returns the text of a special token, which is stored as a string or as an object with `content`."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _find_template(directory: Path, configured: object) -> str | None:
    """Returns the contents of chat_template.jinja, or the configured template (of a list, the one named 'default')."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    if isinstance(configured, list):
        named = [item for item in configured if isinstance(item, Mapping) and item.get("name") == "default"]
        configured = named[-1].get("template") if named else None
    return configured if isinstance(configured, str) else None


def _gguf_parts(file: GgufFile) -> TokenizerParts:
    template = file.metadata.get("tokenizer.chat_template")
    return TokenizerParts(
        backend=build_gguf_tokenizer(file),
        special_tokens=gguf_special_tokens(file),
        adds_bos=gguf_adds_bos(file),
        chat_stop_ids=gguf_eos_ids(file),
        chat_template=template if isinstance(template, str) else None,
        source=str(file.path),
    )
