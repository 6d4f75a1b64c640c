"""Checks how a `hotset` command that cannot start ends."""

import sys
from collections.abc import Sequence

import pytest

from hotset.cli import main


def expect_one_line_error(
    arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs `hotset` with these arguments. It must print one line with `message` and end with status 1."""
    monkeypatch.setattr(sys, "argv", ["hotset", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    output, error = capsys.readouterr()
    assert (ended.value.code, output) == (1, "")
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
