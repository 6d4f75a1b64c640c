"""The parts of a model that a front end needs: tokenizer and sampling defaults, but no weights. Also reads prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotset.base.config import EngineConfig
from hotset.base.engine_settings import EMBEDDED
from hotset.base.errors import CheckpointError, RequestError
from hotset.base.sampling import PARAMETERS, SamplingParams
from hotset.engine.input_processor import ModelCard
from hotset.grammar.check import StructureChecks
from hotset.grammar.following import StructureProcesses
from hotset.models.checkpoint.files import find_model
from hotset.models.tokenizer import ChatSettings, Tokenizer, read_tokenizer_json

# Text, {"prompt": text} or {"prompt_token_ids": [...]}. The last two may also have a "cache_salt".
Prompt = str | Mapping[str, Any]
EMBEDDED_DEFAULTS = {"temperature": 0.2, "top_p": 0.9}  # recommended by the authors of SmolLM2


@dataclass(frozen=True, slots=True)
class Frontend:
    """The tokenizer and the sampling defaults of a model."""

    tokenizer: Tokenizer | None
    defaults: dict[str, Any]  # sampling parameters recommended by the model's authors

    def structure_checks(self, vocab: int) -> StructureChecks | None:
        """Returns the checks of structures. They run in worker processes of the tokenizer (`tokenizer.jobs`),
        which also render chat templates. None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return StructureChecks(self.tokenizer.jobs, self.tokenizer.to_json, vocab)

    def card(self, engine_card: ModelCard) -> ModelCard:
        """Returns the engine's card, with the end-of-turn tokens of the chat template added to `eos_ids`."""
        chat_stops = () if self.tokenizer is None else self.tokenizer.chat_stop_ids
        return replace(engine_card, eos_ids=tuple(dict.fromkeys((*engine_card.eos_ids, *chat_stops))))


def load_frontend(config: EngineConfig) -> Frontend:
    """Loads the tokenizer and the recommended sampling parameters. Raises CheckpointError if they are invalid."""
    files = find_model(config.model)
    generation = EMBEDDED_DEFAULTS if config.model == EMBEDDED else files.generation
    recommended = [name for name, parameter in PARAMETERS.items() if parameter.recommended]
    defaults: dict[str, Any] = {name: generation[name] for name in recommended if generation.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise CheckpointError(f"{files.path}: generation_config.json: {error}") from error
    chat = ChatSettings(config.chat_template, config.chat_template_variables, config.reasoning_parser)
    return Frontend(Tokenizer.load(files, config.tokenizer, chat), defaults)


def structure_processes(config: EngineConfig, vocab: int) -> StructureProcesses:
    """Returns the processes that follow an engine's answers. They start and read the tokenizer when first needed."""
    return StructureProcesses(lambda: read_tokenizer_json(find_model(config.model), config.tokenizer), vocab)


def token_ids_of(prompt: Prompt, tokenizer: Tokenizer | None, max_tokens: int | None = None) -> Sequence[int]:
    """Returns the token ids of a prompt.

    Raises RequestError if the prompt is malformed, or if it is text and `tokenizer` is None. Raises
    ContextLengthExceeded if the prompt is a long text (over SLICE_CHARACTERS) that clearly has more than `max_tokens`
    tokens. No other prompt is checked for its length, so callers must check the length of the result.
    """
    if isinstance(prompt, Mapping):
        keys = prompt.keys() - {"cache_salt"}
        if keys == {"prompt_token_ids"}:
            return _checked_ids(prompt["prompt_token_ids"])
        prompt = prompt["prompt"] if keys == {"prompt"} else prompt
    if not isinstance(prompt, str):
        raise RequestError(
            'a prompt must be text, {"prompt": ...} or {"prompt_token_ids": [...]}, the last two optionally with a '
            '"cache_salt"',
            param="prompt",
        )
    if tokenizer is None:
        raise RequestError('this model has no tokenizer; give {"prompt_token_ids": [...]}', param="prompt")
    return tokenizer.encode(prompt, max_tokens=max_tokens)


def cache_salt_of(prompt: Prompt) -> str | None:
    return prompt.get("cache_salt") if isinstance(prompt, Mapping) else None


def _checked_ids(ids: object) -> list[int]:
    if not isinstance(ids, Sequence) or any(kind is bool or not issubclass(kind, int) for kind in set(map(type, ids))):
        raise RequestError("prompt_token_ids must be a list of whole numbers", param="prompt_token_ids")
    return list(ids)
