"""The two consoles of the command line: results go to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from fairway.cli.errors import CliError, ExitCode


def confirm(question: str, *, yes: bool) -> None:
    """Return once the user agrees. Raises CliError for a no, and where there is no terminal to ask on."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CliError(
            "NOT_CONFIRMED",
            f"nothing was changed, for without a terminal nobody can answer: {question}",
            next_step="add --yes to confirm it",
            exit_code=ExitCode.USAGE,
        )
    if not typer.confirm(question, err=True):
        raise CliError("NOT_CONFIRMED", "nothing was changed", next_step="add --yes to skip the confirmation")


class OutputClosed(Exception):
    """The reader of stdout closed it, as `| head` does."""


def out() -> Console:
    """Return a console on stdout, for results."""
    return Console(highlight=False)


def err() -> Console:
    """Return a console on stderr, for progress and errors."""
    return Console(stderr=True, highlight=False)


def plain(console: Console, text: str = "", *, end: str = "\n") -> None:
    """Print text unchanged, for copying: no markup, no emoji codes, no wrapping, tabs preserved.

    Raises OutputClosed when stdout is closed.
    """
    # Not ``Console.print``, which turns `:b:` into a picture, tabs into blanks, and drops carriage returns.
    try:
        console.file.write(text + end)
        console.file.flush()
    except BrokenPipeError as exc:
        if console.stderr:
            return  # a closed stderr does not change the exit code
        _detach_stdout()
        raise OutputClosed from exc


def write_rich(renderable: RenderableType) -> None:
    """Print a renderable of rich to stdout. Raises OutputClosed."""
    console = out()
    with console.capture() as capture:
        console.print(renderable)
    plain(console, capture.get(), end="")


def show_error(error: CliError) -> None:
    """Print the reason, the message and the next step to stderr."""
    _marked("error", error.reason, error.message)
    if error.next_step:
        _marked("next", "", error.next_step)


def _marked(mark: str, reason: str, text: str) -> None:
    console = err()
    style = "bold red" if mark == "error" else "bold"
    with console.capture() as capture:
        console.print(f"[{style}]{mark}[/]" + (f" [bold]{reason}[/]" if reason else "") + ": ", end="")
    plain(console, capture.get() + text)


def _detach_stdout() -> None:
    """Redirect stdout to the null device: the interpreter flushes it again at its end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


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
