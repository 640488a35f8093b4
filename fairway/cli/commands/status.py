"""`fairway status`: which parts of the installation on this machine run and answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any, Final

import typer
from rich.live import Live

from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import Format, OutputOption, WatchOption, parse_past
from fairway.cli.fleet.probes import Probe, etcd_healthy, grpc_serving, redis_answers
from fairway.cli.fleet.record import FleetRecord, Restarts
from fairway.cli.fleet.roles import role_of
from fairway.cli.state import StateDir
from fairway.cli.targets import DEFAULT_STATE_DIR
from fairway.cli.terminal.cells import show_span
from fairway.cli.terminal.formats import DOCUMENTS, write_document, write_part
from fairway.cli.terminal.output import out, plain
from fairway.cli.terminal.table import Column, line_of, show_rows, table_of, visible

_POLL_S: Final = 2.0
_NO_RESTART: Final = Restarts(0, "")


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the installation. ``status`` is "serving", or why it is not.

    ``started_s``: Unix time of its last start, None while it does not run.
    """

    name: str
    pid: int
    address: str
    status: str
    log: Path
    started_s: float | None
    restarts: Restarts

    @property
    def uptime(self) -> str:
        return "" if self.started_s is None else show_span(time.time() - self.started_s)


COLUMNS: Final[tuple[Column[Part], ...]] = (
    Column("name", lambda part: part.name),
    Column("pid", lambda part: str(part.pid), drop=1),
    Column("address", lambda part: part.address),
    Column("status", lambda part: part.status),
    Column("up for", lambda part: part.uptime),
    Column("restarts", lambda part: str(part.restarts.count)),
    Column("last end", lambda part: part.restarts.last_end, wide=True),
    Column("log", lambda part: str(part.log), wide=True),
)


def status(
    state_dir: Annotated[
        Path, typer.Option("--state-dir", help="Folder of state, logs and secrets.")
    ] = DEFAULT_STATE_DIR,
    output: OutputOption = Format.TABLE,
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
    watch: WatchOption = False,
) -> None:
    """Show which parts run and answer, for how long, and how often each was restarted.

    Exit code 0: all serve. 3: nothing runs. 6: some do not answer.

    \b
    Examples:
      fairway status
      fairway status -o json | jq -r '.processes | keys[]'
      fairway status --watch
    """
    state = StateDir.at(state_dir)
    if as_json:
        output = Format.JSON
    if watch:
        _watch(state, output)
    record = _record(state)
    parts = asyncio.run(_probe_parts(record, state))
    if output in DOCUMENTS:
        write_document(_document(record, parts), output)
    else:
        show_rows(COLUMNS, parts, wide=output is Format.WIDE)
    failing = [part.name for part in parts if part.status != "serving"]
    if failing:
        raise CliError(
            "NOT_SERVING",
            f"not serving: {', '.join(failing)}",
            next_step=f"see the logs under {state.logs}",
            exit_code=ExitCode.UNAVAILABLE,
        )


def _watch(state: StateDir, output: Format) -> None:
    """Print the parts whenever one changed, until Ctrl-C. Raises CliError when nothing runs."""
    columns = visible(COLUMNS, wide=output is Format.WIDE)
    redrawn = output not in DOCUMENTS and out().is_terminal
    before: dict[str, Part] = {}
    with Live(console=out(), auto_refresh=False) if redrawn else nullcontext() as live:
        while True:
            record = _record(state)
            parts = asyncio.run(_probe_parts(record, state))
            changed = [part for part in parts if before.get(part.name) != part]
            before = {part.name: part for part in parts}
            if isinstance(live, Live):
                live.update(table_of(columns, parts), refresh=True)
            elif changed and output in DOCUMENTS:
                write_part(_document(record, parts), output)
            else:
                for part in changed:
                    plain(out(), line_of(columns, part))
            time.sleep(_POLL_S)


def _record(state: StateDir) -> FleetRecord:
    record = FleetRecord.load(state.fleet)
    if record is None or not record.supervisor.alive:
        raise CliError(
            "NOT_RUNNING",
            f"no installation runs in {state.root}",
            next_step="start one with `fairway up`",
            exit_code=ExitCode.NOT_RUNNING,
        )
    return record


def _document(record: FleetRecord, parts: list[Part]) -> dict[str, Any]:
    now_s = time.time()
    processes = {
        part.name: {
            "pid": part.pid,
            "address": part.address,
            "status": part.status,
            "uptime_s": None if part.started_s is None else round(now_s - part.started_s, 1),
            "restarts": part.restarts.count,
            "last_end": part.restarts.last_end,
        }
        for part in parts
    }
    return {"phase": record.phase, "processes": processes}


async def _probe_parts(record: FleetRecord, state: StateDir) -> list[Part]:
    names = list(record.addresses)
    reasons = await asyncio.gather(*(_probe(name, record, state)() for name in names))
    return [
        Part(
            name,
            record.children[name].pid if name in record.children else 0,
            record.addresses[name],
            reason or "serving",
            state.log(name),
            record.children[name].started_s if name in record.children else None,
            record.restarts.get(name, _NO_RESTART),
        )
        for name, reason in zip(names, reasons, strict=True)
    ]


def _probe(name: str, record: FleetRecord, state: StateDir) -> Probe:
    address = record.addresses[name]
    if name == "etcd":
        return etcd_healthy(address)
    if name == "redis":
        return redis_answers(address)
    return grpc_serving(address, state.operator_certs if name in record.secured else None)


MAX_LINE_BYTES: Final = 16 * 1024  # a longer line is several
MAX_LINES: Final = 1000
_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_INFO: Final = _LEVELS.index("info")
_LINES: Final = 100
_FOLLOW_S: Final = 0.25


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
        time.sleep(_FOLLOW_S)
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
