"""The engine that `hotset generate`, `chat` and `eval` run in their own process."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.base.flags import config_values
from hotset.base.logs import log_to_stderr

if TYPE_CHECKING:
    from hotset.engine.llm import LLM


@contextmanager
def open_llm(values: dict[str, Any]) -> "Iterator[LLM]":
    """Loads the model that the flags `values` describe. Raises StartupError, if possible before torch is imported."""
    from hotset.engine.model_checks import check_model
    from hotset.models.checkpoint.files import find_tokenizer

    config = EngineConfig(**config_values(EngineConfig, values))
    files = check_model(config)
    if find_tokenizer(files, config.tokenizer) is None:
        raise ConfigError(f"{files.path} holds no tokenizer.json; name a directory that has one with --tokenizer")
    log_to_stderr("%(message)s")
    from hotset.engine.llm import LLM

    with closing(LLM(**asdict(config))) as llm:
        yield llm
