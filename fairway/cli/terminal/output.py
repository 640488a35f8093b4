"""The two consoles of the command line: results go to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import os
import sys

import typer
from rich.console import Console, RenderableType

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
