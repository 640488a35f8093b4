"""The two consoles of the command line: results go to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import os
import sys

from rich.console import Console, RenderableType

from fairway.cli.errors import CliError


class OutputClosed(Exception):
    """Whoever read stdout went away, as `| head` does."""


def out() -> Console:
    """Return a console on stdout, where results go."""
    return Console(highlight=False)


def err() -> Console:
    """Return a console on stderr, where progress and errors go."""
    return Console(stderr=True, highlight=False)


def plain(console: Console, text: str = "", *, end: str = "\n") -> None:
    """Write text as it is: no markup, no emoji codes, no wrapping, tabs kept, so that it can be pasted.

    Raises OutputClosed when nobody reads it any more.
    """
    # Past ``Console.print``, which turns `:b:` into a picture, tabs into blanks, and drops carriage returns.
    try:
        console.file.write(text + end)
        console.file.flush()
    except BrokenPipeError as exc:
        if console.stderr:
            return  # an error that nobody reads keeps no command from its exit code
        _detach_stdout()
        raise OutputClosed from exc


def write_rich(renderable: RenderableType) -> None:
    """Write something of rich's to stdout. Raises OutputClosed."""
    console = out()
    with console.capture() as capture:
        console.print(renderable)
    plain(console, capture.get(), end="")


def show_error(error: CliError) -> None:
    """Write the reason, the message and the next step to stderr."""
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
    """Point stdout at nothing: the interpreter flushes it once more when it ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
