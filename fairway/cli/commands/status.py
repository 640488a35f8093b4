"""`fairway status`: which parts of the installation on this machine run and answer."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.live import Live

from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import Format, OutputOption, WatchOption
from fairway.cli.fleet.probes import Probe, etcd_healthy, grpc_serving, redis_answers
from fairway.cli.fleet.record import FleetRecord, Restarts
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
    reasons = await asyncio.gather(*(_probe(name, record.addresses[name])() for name in names))
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


def _probe(name: str, address: str) -> Probe:
    if name == "etcd":
        return etcd_healthy(address)
    return redis_answers(address) if name == "redis" else grpc_serving(address)
