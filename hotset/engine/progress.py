"""A progress bar on standard error while an engine starts."""

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class LoadingBar:
    """A context manager; `update(done, total)` in bytes, or in things where `counting`.

    Silent if not shown, or where nobody watches the terminal.
    """

    def __init__(self, title: str, shown: bool, *, counting: bool = False) -> None:
        console = Console(stderr=True)
        how_far = (MofNCompleteColumn(),) if counting else (DownloadColumn(binary_units=True), TransferSpeedColumn())
        columns = (TextColumn(title), BarColumn(), *how_far, TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not (shown and console.is_terminal))
        self._task = self._bar.add_task(title, total=None)

    def update(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)

    def __enter__(self) -> "LoadingBar":
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)
