"""`fairway logs`: the log files of the installation, in bounded memory, and what is written to them."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Final

import typer

from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import parse_past
from fairway.cli.fleet.roles import role_of
from fairway.cli.state import StateDir
from fairway.cli.targets import DEFAULT_STATE_DIR
from fairway.cli.terminal.output import out, plain

MAX_LINE_BYTES: Final = 16 * 1024  # a longer line is several
MAX_LINES: Final = 1000
_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_INFO: Final = _LEVELS.index("info")
_LINES: Final = 100
_POLL_S: Final = 0.25


@dataclass(slots=True)
class LogFile:
    """One process's log. Reading continues where it stopped; from the start of a file that was emptied."""

    name: str
    path: Path
    since: str  # ISO 8601, UTC; empty: all
    level: int
    _at: int = 0
    _inode: int = 0
    _part: bytes = b""
    _shown: bool = field(init=False)  # whether the line before was wanted
    _time: str = ""

    def __post_init__(self) -> None:
        self._shown = self.level <= _INFO and not self.since

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield time and text of the lines wanted that were written since the last call."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            found = self.path.stat()
            if found.st_ino != self._inode or found.st_size < self._at:
                self._at, self._inode, self._part = 0, found.st_ino, b""
            file.seek(self._at)
            yield from self._read(file)

    def _read(self, file: IO[bytes]) -> Iterator[tuple[str, str]]:
        while piece := file.readline(MAX_LINE_BYTES):
            self._at += len(piece)
            line = self._part + piece
            if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                self._part = line  # its end is not written yet
                continue
            self._part, text = b"", line.decode("utf-8", "replace").rstrip("\n")
            if self._is_wanted(text):
                yield self._time, text

    def _is_wanted(self, text: str) -> bool:
        """Whether the line is of the time and level; one without either is part of the line before."""
        try:
            entry = json.loads(text)
        except ValueError:
            return self._shown
        if isinstance(entry, dict):
            level = str(entry.get("level", "info")).lower()
            level = "warning" if level == "warn" else level
            self._time = str(entry.get("timestamp") or entry.get("ts") or self._time)
            rank = _LEVELS.index(level) if level in _LEVELS else _INFO
            self._shown = rank >= self.level and self._time >= self.since
        return self._shown


def logs(
    role: Annotated[
        str, typer.Argument(help="A role or a process, such as gateway or worker-1. Default: all.")
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print further lines, until Ctrl-C.")
    ] = False,
    since: Annotated[
        datetime | None,
        typer.Option("--since", parser=parse_past, metavar="WHEN", help="A span such as 10m, or a time."),
    ] = None,
    level: Annotated[
        str, typer.Option("--level", help=f"This level and above: {', '.join(_LEVELS)}.")
    ] = "debug",
    lines: Annotated[
        int | None,
        typer.Option("--lines", "-n", min=0, max=MAX_LINES, help="The last 100; with --since 1000."),
    ] = None,
    state_dir: Annotated[
        Path, typer.Option("--state-dir", help="Folder of state, logs and secrets.")
    ] = DEFAULT_STATE_DIR,
) -> None:
    """Print the log of a role of this machine's installation.

    Lines of several processes are ordered by time, each after the name of its process.

    \b
    Examples:
      fairway logs gateway
      fairway logs worker-0 --follow --level warning
      fairway logs --since 10m --level error
    """
    if level not in _LEVELS:
        raise typer.BadParameter(f"{level!r} is none of {', '.join(_LEVELS)}", param_hint="--level")
    after = "" if since is None else f"{since.astimezone(UTC):%Y-%m-%dT%H:%M:%S}"
    files = [
        LogFile(path.stem, path, after, _LEVELS.index(level))
        for path in paths_of(StateDir.at(state_dir), role)
    ]
    most = lines if lines is not None else MAX_LINES if after else _LINES
    for text in last_lines(files, most):
        plain(out(), text)
    while follow:
        time.sleep(_POLL_S)
        for file in files:
            for _, text in file.lines():
                plain(out(), _named(file, text, files))


def paths_of(state: StateDir, role: str) -> list[Path]:
    """Return the logs of a role or a process, of all for an empty name. Raises CliError without any."""
    found = sorted(state.logs.glob("*.log"))
    wanted = [path for path in found if role in ("", path.stem, role_of(path.stem))]
    if not wanted:
        names = ", ".join(path.stem for path in found)
        raise CliError(
            "NO_SUCH_PROCESS" if found else "NOT_RUNNING",
            f"there is no log of {role or 'any process'} in {state.logs}",
            next_step=f"name one of {names}" if found else "start it with `fairway up`",
            exit_code=ExitCode.USAGE if found else ExitCode.NOT_RUNNING,
        )
    return wanted


def last_lines(files: Sequence[LogFile], count: int) -> list[str]:
    """Return the last lines of all files by time. At most ``count`` of each are held at once."""
    found: list[tuple[str, str]] = []
    for file in files:
        newest = deque(file.lines(), maxlen=count)
        found += [(moment, _named(file, text, files)) for moment, text in newest]
    found.sort(key=lambda each: each[0])
    return [text for _, text in found[max(0, len(found) - count) :]]


def _named(file: LogFile, text: str, files: Sequence[LogFile]) -> str:
    return f"{file.name}\t{text}" if len(files) > 1 else text
