"""Hotset serves sparse-attention language models. `from hotset import LLM, SamplingParams` is the offline API."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotset.base.sampling import SamplingParams
    from hotset.base.structure import Structure
    from hotset.engine.llm import LLM
    from hotset.models.chat_prompt import ChatOptions

__version__ = "0.1.0"
__all__ = ["LLM", "ChatOptions", "SamplingParams", "Structure", "__version__"]

_HOME = {
    "LLM": "hotset.engine.llm",
    "ChatOptions": "hotset.models.chat_prompt",
    "SamplingParams": "hotset.base.sampling",
    "Structure": "hotset.base.structure",
}


def __getattr__(name: str) -> object:
    """Imports a public name on first use, so that `import hotset` does not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'hotset' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
