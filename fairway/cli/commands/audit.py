"""`fairway audit`: the entries of the audit log, its export, and its verification."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import typer

from fairway.cli import targets
from fairway.cli.calls import admin_error, checked
from fairway.cli.connection import Connection, Server, command, connected, help_text
from fairway.cli.errors import CliError
from fairway.cli.flags import Format, OutputOption, parse_past
from fairway.cli.targets import DEFAULT_STATE_DIR, AdminKeyOption, ControlPlaneOption, StateDirOption
from fairway.cli.terminal.cells import moment
from fairway.cli.terminal.formats import DOCUMENTS, write_document
from fairway.cli.terminal.listing import Resource
from fairway.cli.terminal.output import out, plain
from fairway.cli.terminal.table import Column
from fairway.client import FairwayError
from fairway.formats.tlog import LogDamaged, notes_of, parse_verifier, verify_log
from fairway.v1 import controlplane_pb2 as cp

app = typer.Typer(help="The audit log: who changed what, and proof that it is whole.", no_args_is_help=True)
EVENTS: Final[Resource[cp.AuditEvent]] = Resource(
    "entry",
    "entries",
    Server.CONTROLPLANE,
    (
        Column("time", lambda event: moment(event.time)),
        Column("index", lambda event: str(event.index), drop=2),
        Column("actor", lambda event: event.actor or event.role or "-"),
        Column("action", lambda event: event.action.removeprefix("ControlPlaneService/")),
        Column("resource", lambda event: event.resource or "-", drop=1),
        Column("outcome", lambda event: event.outcome),
        Column("count", lambda event: str(event.count), drop=3),
        Column("address", lambda event: event.address or "-", drop=4),
        Column("role", lambda event: event.role, wide=True),
        Column("tenant", lambda event: event.tenant, wide=True),
        Column("subject", lambda event: event.subject, wide=True),
        Column("certificate", lambda event: event.certificate, wide=True),
        Column("revision", lambda event: str(event.revision), wide=True),
        Column("request", lambda event: event.request_id, wide=True),
    ),
)
VERIFIER: Final = "verifier"
_NAME: Final = re.compile(r"verifier|checkpoint|tile(/[a-z0-9]{1,16}(\.p)?){2,10}")


@command(
    app,
    "list",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway audit list --since 1d",
        "fairway audit list --actor admin --action DeleteTenant",
        "fairway audit list -o json | jq '.entries[] | select(.outcome != \"OK\")'",
    ),
)
async def listed(
    connection: Connection,
    actor: Annotated[str, typer.Option("--actor", help="Only of the key with this id.")] = "",
    action: Annotated[str, typer.Option("--action", help="Only this method or route.")] = "",
    resource: Annotated[str, typer.Option("--resource", help="Only about this resource.")] = "",
    since: Annotated[
        datetime | None,
        typer.Option("--since", parser=parse_past, metavar="WHEN", help="From then on: 7d, or a time."),
    ] = None,
    until: Annotated[
        datetime | None, typer.Option("--until", parser=parse_past, metavar="WHEN", help="Until then.")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=100_000, help="Maximum number, the newest ones.")
    ] = 100,
    output: OutputOption = Format.TABLE,
) -> None:
    """List entries, newest first: changes, refusals, failed authentications, reads of the log itself.

    An entry has its place within a few seconds. One entry may stand for several equal refusals.
    """
    found = connection.admin.audit.list(
        actor=actor, action=action, resource=resource, start_time=since, end_time=until, limit=limit
    )
    EVENTS.write_list(await checked(found, what="cannot list the audit log"), output)


@command(app, "export", to=Server.CONTROLPLANE, examples=("fairway audit export audit-log",))
async def export(
    connection: Connection,
    folder: Annotated[Path, typer.Argument(help="A folder, which is created.", file_okay=False)],
) -> None:
    """Write the log to a folder as C2SP tlog-tiles lays it out, with the keys that verify it.

    `fairway audit verify FOLDER` and every other tlog client verify the folder without a server.
    """
    count = await _fetch(connection, folder)
    plain(out(), f"{folder} has {count} objects; `fairway audit verify {folder}` verifies them")


async def _fetch(connection: Connection, folder: Path) -> int:
    """Write the objects of the log to the folder; return their number. Raises CliError."""
    what, count = "cannot export the audit log", 0
    try:
        async with aclosing(connection.admin.audit.export()) as objects:
            async for each in objects:
                if not _NAME.fullmatch(each.name):
                    raise CliError("BAD_NAME", f"{what}: {each.name[:128]!r} is no name of an object")
                path = folder / each.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(each.data)
                count += 1
    except FairwayError as exc:
        raise admin_error(exc, what=what) from exc
    except OSError as exc:
        raise CliError("FOLDER_UNUSABLE", f"{what}: {exc}", next_step="name another folder") from exc
    return count


@contextmanager
def _log_in(folder: Path | None, target: targets.Target | None) -> Iterator[Path]:
    """Yield the folder with the log; of a running installation, a temporary one."""
    if folder is not None:
        yield folder
        return
    assert target is not None
    with TemporaryDirectory(prefix="fairway-audit-") as name:
        asyncio.run(connected(Server.CONTROLPLANE, target, None, _fetch, {"folder": Path(name)}))
        yield Path(name)


def verify(
    folder: Annotated[
        Path | None, typer.Argument(help="An exported log; default: that of the installation.", exists=True)
    ] = None,
    keys: Annotated[
        list[str] | None,
        typer.Option("--key", help="A key that must have signed; default: those in the log. Repeatable."),
    ] = None,
    checkpoints: Annotated[
        list[Path] | None,
        typer.Option("--checkpoint", help="A file of earlier checkpoints. Repeatable.", exists=True),
    ] = None,
    output: OutputOption = Format.TABLE,
    controlplane: ControlPlaneOption = "",
    admin_key: AdminKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    target = None if folder is not None else targets.controlplane(controlplane, admin_key, state_dir)
    with _log_in(folder, target) as root:
        try:
            found = _verified(root, keys or [], checkpoints or [])
        except LogDamaged as exc:
            step = (
                "keep the log and the checkpoints as they are; docs/operations/audit.md describes what to do"
            )
            raise CliError("LOG_DAMAGED", str(exc), next_step=step) from exc
        except OSError as exc:
            raise CliError(
                "LOG_UNREADABLE", f"cannot read the log: {exc}", next_step="name another folder"
            ) from exc
    if output in DOCUMENTS:
        write_document(found, output)
    else:
        text = "{entries} entries, as signed; {earlier_checkpoints} earlier checkpoints agree; root {root}"
        plain(out(), text.format_map(found))


app.command(
    "verify",
    help=help_text(
        """Verify the log by its tiles alone: signature, every entry, and that it extends earlier checkpoints.

        Without --key, the log is only shown to agree with the keys that it names itself. Only a checkpoint
        that was kept elsewhere, FAIRWAY_AUDIT_CHECKPOINT_FILE, shows that no tail was cut.
        """,
        (
            "fairway audit verify",
            "fairway audit verify audit-log --key 'fairway.audit/…+1a2b3c4d+A…' --checkpoint checkpoints.txt",
        ),
    ),
)(verify)


def _verified(root: Path, keys: list[str], checkpoints: list[Path]) -> dict[str, object]:
    """Return what was verified. Raises LogDamaged, OSError."""

    def read(name: str) -> bytes | None:
        path = root / name
        return path.read_bytes() if path.is_file() else None

    keys = keys or (read(VERIFIER) or b"").decode().split()
    for key in keys:
        parse_verifier(key)
    earlier = [note for path in checkpoints for note in notes_of(path.read_text("utf-8"))]
    size, top = 0, ""
    for checkpoint, _ in verify_log(read, keys, earlier):
        size, top = checkpoint.size, checkpoint.root.hex()
    return {"entries": size, "root": top, "keys": keys, "earlier_checkpoints": len(earlier)}
