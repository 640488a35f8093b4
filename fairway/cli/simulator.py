"""The simulator as a separate process, with its failures as errors of the command line."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from typing import Final

import typer

from fairway.cli.errors import CliError, ExitCode
from fairway.cli.terminal.output import err, plain

_MARK: Final = "error: "
_KEPT_LINES: Final = 200


def run_simulator(command: str, arguments: Sequence[str], *, reason: str, next_step: str) -> None:
    """Run a command of the simulator with this terminal.

    Raises CliError with the last error that it wrote, and typer.Exit if it failed without one: its report
    then contains the cause.
    """
    if importlib.util.find_spec("simulator") is None:
        raise CliError(
            "NO_SIMULATOR",
            "the simulator is not installed beside this command",
            next_step="run `make setup-dev` in the source tree",
        )
    child = [sys.executable, "-m", "simulator", command, *arguments]
    with subprocess.Popen(child, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stderr is not None
        lines = deque(process.stderr, maxlen=_KEPT_LINES)
    code = process.returncode
    text = "".join(lines)
    _, marked, message = text.rpartition(_MARK)
    exit_code = ExitCode.USAGE if code == ExitCode.USAGE else ExitCode.FAILED
    if code and marked:
        raise CliError(reason, message.strip(), next_step=next_step, exit_code=exit_code)
    if text:
        plain(err(), text, end="")
    if code:
        raise typer.Exit(int(exit_code))
