"""How many examples hypothesis draws: few in `make test`, ten times as many where slow tests are selected.

The examples are the same in every run. tests/conftest.py loads the profile before the test files are imported.
"""

from typing import Any

from hypothesis import settings

THOROUGH = 10  # factor of the profile "thorough"
COMMON: dict[str, Any] = {"deadline": None, "derandomize": True, "database": None}

settings.register_profile("quick", **COMMON)
settings.register_profile("thorough", **COMMON)


def load_profile(*, thorough: bool) -> None:
    settings.load_profile("thorough" if thorough else "quick")


def times(quick: int) -> int:
    """Returns `quick` in `make test`, and ten times as many where slow tests are selected."""
    return quick * (THOROUGH if settings.get_current_profile_name() == "thorough" else 1)


def examples(quick: int, **options: Any) -> settings:
    """Returns settings for `times(quick)` examples. `options` are other settings."""
    return settings(max_examples=times(quick), **(COMMON | options))
