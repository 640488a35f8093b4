"""Progress of a start: a live table on a terminal, lines elsewhere, JSON lines through a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Final, Literal, Protocol

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from fairway.cli.errors import CliError, ExitCode
from fairway.cli.state import Endpoints
from fairway.cli.terminal.output import plain

Phase = Literal["starting", "ready", "restarting", "failed", "stopping", "stopped"]

_DETAIL_S: Final = 2.0
_STYLE: Final[dict[Phase, str]] = {
    "starting": "cyan",
    "ready": "green",
    "restarting": "yellow",
    "failed": "bold red",
    "stopping": "yellow",
    "stopped": "dim",
}


@dataclass(frozen=True, slots=True)
class PhaseEvent:
    """``name`` entered ``phase``; ``detail`` is one line of explanation."""

    name: str
    phase: Phase
    detail: str = ""


class StartProgress(Protocol):
    def event(self, name: str, phase: Phase, detail: str = "") -> None: ...

    def close(self) -> None:
        """Stop the live display; later events are lines."""


@dataclass(slots=True)
class LineProgress:
    """One line per event, with the seconds since the start.

    A repeated event is printed once, and details of one phase at most every two seconds.
    """

    console: Console
    began: float = field(default_factory=time.monotonic)
    _printed: dict[str, tuple[PhaseEvent, float]] = field(default_factory=dict)

    def event(self, name: str, phase: Phase, detail: str = "") -> None:
        event, elapsed = PhaseEvent(name, phase, detail), time.monotonic() - self.began
        last, printed_at = self._printed.get(name, (None, -_DETAIL_S))
        if last == event or (last is not None and last.phase == phase and elapsed - printed_at < _DETAIL_S):
            return
        self._printed[name] = (event, elapsed)
        plain(self.console, f"[{elapsed:6.1f} s] {name:<15} {phase:<11} {detail}".rstrip())

    def close(self) -> None:
        """Do nothing: there is no live display."""


class LiveProgress:
    """A table with one row per name that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[str, PhaseEvent] = {}
        self._spinner = Spinner("dots")
        self._lines = LineProgress(console)
        self._live: Live | None = Live(get_renderable=self._render, console=console, refresh_per_second=8)
        self._live.start()

    def event(self, name: str, phase: Phase, detail: str = "") -> None:
        if self._live is None:
            self._lines.event(name, phase, detail)
        else:
            self._rows[name] = PhaseEvent(name, phase, detail)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for row in self._rows.values():
            mark = self._spinner if row.phase in ("starting", "restarting") else Text("•", _STYLE[row.phase])
            table.add_row(mark, row.name, Text(row.phase, _STYLE[row.phase]), Text(row.detail, "dim"))
        return table


@dataclass(frozen=True, slots=True)
class TolerantProgress:
    """Passes events on and drops one that cannot be written, so that no process blocks on its output."""

    inner: StartProgress

    def event(self, name: str, phase: Phase, detail: str = "") -> None:
        with contextlib.suppress(OSError):
            self.inner.event(name, phase, detail)

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True, slots=True)
class SharedProgress:
    """Passes events to everyone who listens now."""

    listeners: list[StartProgress]

    def event(self, name: str, phase: Phase, detail: str = "") -> None:
        for one in tuple(self.listeners):
            one.event(name, phase, detail)

    def close(self) -> None:
        for one in self.listeners:
            one.close()


class PipeProgress:
    """Writes events as JSON lines to a pipe until it is closed, and always as text to a console."""

    def __init__(self, descriptor: int, console: Console) -> None:
        self._pipe: IO[str] | None = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")
        self._lines = LineProgress(console)

    def event(self, name: str, phase: Phase, detail: str = "") -> None:
        self._lines.event(name, phase, detail)
        self.send({"event": asdict(PhaseEvent(name, phase, detail))})

    def send(self, message: dict[str, object]) -> None:
        """Write one message. A closed pipe is not an error."""
        if self._pipe is None:
            return
        try:
            self._pipe.write(json.dumps(message) + "\n")
        except (OSError, ValueError):
            self._drop()

    def close(self) -> None:
        self._drop()

    def _drop(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def outcome_of(message: dict[str, Any], progress: StartProgress) -> tuple[Endpoints, bool] | None:
    """Pass an event on to ``progress``; return what ``ready`` (True) or ``running`` (False) carries.

    Raises CliError for ``failed``.
    """
    if event := message.get("event"):
        progress.event(event["name"], event["phase"], event["detail"])
    for kind in ("ready", "running"):
        if found := message.get(kind):
            return Endpoints(**found), kind == "ready"
    if failed := message.get("failed"):
        raise CliError(
            failed["reason"],
            failed["message"],
            next_step=failed["next_step"],
            exit_code=ExitCode(failed["exit_code"]),
        )
    return None


def failed_message(failure: CliError) -> dict[str, object]:
    """Return the message from which ``outcome_of`` raises this error."""
    return {
        "failed": {
            "reason": failure.reason,
            "message": failure.message,
            "next_step": failure.next_step,
            "exit_code": int(failure.exit_code),
        }
    }


def read_messages(descriptor: int) -> Iterator[dict[str, Any]]:
    """Yield the messages of a ``PipeProgress`` until the pipe is closed."""
    with os.fdopen(descriptor, encoding="utf-8") as pipe:
        for line in pipe:
            message = json.loads(line)
            if isinstance(message, dict):
                yield message


def for_console(console: Console) -> StartProgress:
    """Return the progress display for a console."""
    return LiveProgress(console) if console.is_terminal else LineProgress(console)
