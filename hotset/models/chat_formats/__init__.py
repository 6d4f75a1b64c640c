"""The message formats that Hotset brings for models whose checkpoints have no chat template.

A format is a Jinja template of our own, so it is rendered like any other template. `--chat-template` replaces it.
"""

from pathlib import Path

from hotset.models.checkpoint.model_names import model_path
from hotset.models.config_fields import read_text
from hotset.models.families import FAMILIES


def built_in_template(architecture: str) -> str | None:
    """Returns the template of a family, or None if Hotset has none for it."""
    name = FAMILIES[architecture].chat_template
    return None if name is None else Path(__file__).with_name(name).read_text(encoding="utf-8")


def read_template(name: str) -> str:
    """Returns the template in a file that the user named. Raises `CheckpointError` if it cannot be read."""
    return read_text(model_path(name))
