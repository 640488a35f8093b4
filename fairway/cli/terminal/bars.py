"""Progress of long work: bars on a terminal, occasional lines elsewhere. Always on stderr."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from fairway.cli.terminal.output import err, plain

_LINE_S: Final = 2.0


class Bars:
    """One bar per name inside the ``with`` block. ``ratio`` is None while the progress is unknown."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or err()
        self._lines = _Lines(self._console)
        self._tasks: dict[str, TaskID] = {}
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.fields[title]}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[detail]}", markup=False),
                console=self._console,
            )

    def __enter__(self) -> Bars:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, name: str, ratio: float | None, detail: str = "", numbers: str = "") -> None:
        """Show the progress of ``name``, 0..1, its current work, and figures that change often."""
        if self._progress is None:
            self._lines.update(name, ratio, detail, numbers)
            return
        detail = f"{detail} {numbers}".rstrip()
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=None, title=name, detail=detail)
        total = None if ratio is None else 1.0
        self._progress.update(self._tasks[name], completed=ratio or 0.0, total=total, detail=detail)


@dataclass(slots=True)
class _Lines:
    """Prints a line when the text of a name changes, and at most one per two seconds for new numbers."""

    console: Console
    _printed: dict[str, tuple[str, float | None, float]] = field(default_factory=dict)

    def update(self, name: str, ratio: float | None, detail: str, numbers: str = "") -> None:
        now_s = time.monotonic()
        last_detail, last_ratio, printed_s = self._printed.get(name, ("", None, -_LINE_S))
        is_end = ratio == 1.0 and last_ratio != 1.0
        if name in self._printed and not is_end:
            if (detail, ratio) == (last_detail, last_ratio):
                return
            if detail == last_detail and now_s - printed_s < _LINE_S:
                return
        self._printed[name] = (detail, ratio, now_s)
        percent = "" if ratio is None else f"{100 * ratio:3.0f} %"
        plain(self.console, "  ".join(part for part in (name, percent, detail, numbers) if part))
