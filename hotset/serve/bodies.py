"""Base classes and types for the pydantic models of all request bodies."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator
from pydantic_core import PydanticCustomError

# Union tags appear in the location of a validation error; this prefix distinguishes them from field names.
UNION_TAG = "|"
MAX_SHOWN_CHARACTERS = 64  # of a value that an error repeats


class StrictModel(BaseModel):
    """The base of what clients send. It converts no type except int to float, and rejects unknown keys, inf and NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class LenientModel(StrictModel):
    """The base of messages and their parts. Unknown keys are ignored: clients send back everything that they received,
    from us or from other servers."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"additionalProperties": True})


def one_of(choose: Any, forms: str) -> Discriminator:
    return Discriminator(choose, custom_error_type="form", custom_error_message=f"must be {forms}")


def _well_formed(text: str) -> str:
    """Rejects lone surrogates: JSON can express them, but they are not characters and no tokenizer accepts them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PydanticCustomError("unicode", "must not contain lone surrogates") from error
    return text


Text = Annotated[str, AfterValidator(_well_formed)]


def text_or_list(value: Any) -> str | None:
    """Selects the form of a value that is a text or a list."""
    if isinstance(value, str):
        return "|text"
    return "|list" if isinstance(value, list) else None


def shown(text: str) -> str:
    """Returns a text from a client as an error repeats it: short, and without lone surrogates."""
    return text[:MAX_SHOWN_CHARACTERS].encode(errors="backslashreplace").decode()
