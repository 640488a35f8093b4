"""`fairway certs`: the certificates with which roles, operators and stores identify themselves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from fairway.cli.authority import DAYS, ROLES, TRUST_DOMAIN, Authority, Issued, opened_authority
from fairway.cli.connection import help_text
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import Format, OutputOption, span_s
from fairway.cli.state import StateDir
from fairway.cli.targets import DEFAULT_STATE_DIR
from fairway.cli.terminal.formats import DOCUMENTS, write_document
from fairway.cli.terminal.output import err, out, plain
from fairway.cli.terminal.table import Column, show_rows

# Processes read replaced files at the next handshake, at most a second late; the rest is for their callers.
PAUSE_S: Final = 5.0
FolderOption = Annotated[Path, typer.Option("--state-dir", help="Installation; it has the folder certs.")]
COLUMNS: Final[tuple[Column[Issued], ...]] = (
    Column("name", lambda each: each.folder.name),
    Column("id", lambda each: str(each.leaf.id)),
    Column("expires", lambda each: f"{datetime.fromtimestamp(each.leaf.expire_s, UTC):%Y-%m-%d %H:%M}"),
    Column("state", lambda each: _state(each)),
    Column("serial", lambda each: f"{each.leaf.serial:x}", drop=1),
)

app = typer.Typer(help="Make, renew and revoke certificates of roles and operators.", no_args_is_help=True)


@contextmanager
def _authority(state_dir: Path) -> Iterator[Authority]:
    state = StateDir.at(state_dir)
    with state.writing(), opened_authority(state.certs) as authority:
        yield authority


def _init(
    trust_domain: Annotated[str, typer.Option(help="First part of every id.")] = TRUST_DOMAIN,
    state_dir: FolderOption = DEFAULT_STATE_DIR,
) -> None:
    """Make the authority of an installation's certificates, unless there is one."""
    with _authority(state_dir) as authority:
        authority.create(trust_domain)
        plain(out(), f"the authority is in {authority.root / 'authority'}")


def _issue(
    role: Annotated[str, typer.Argument(help=f"One of {', '.join(ROLES)}.")],
    names: Annotated[list[str] | None, typer.Argument(help="Names of processes; default: the role.")] = None,
    dns: Annotated[list[str] | None, typer.Option(help="A further DNS name. Repeatable.")] = None,
    ip: Annotated[list[str] | None, typer.Option("--ip", help="A further address. Repeatable.")] = None,
    days: Annotated[float, typer.Option(min=0.001, max=3650, help="How long it is valid.")] = DAYS,
    due: Annotated[bool, typer.Option("--due", help="Keep one that has a third of its life left.")] = False,
    state_dir: FolderOption = DEFAULT_STATE_DIR,
) -> None:
    """Make a certificate for each name, in a folder of that name: FAIRWAY_TLS_DIR of the process.

    It names localhost, the process, and what --dns and --ip add.
    """
    with _authority(state_dir) as authority:
        for name in names or [role]:
            made = authority.issue(role, name, dns=dns or (), addresses=ip or (), days=days, due_only=due)
            plain(out(), f"{made.leaf.id} in {made.folder}")


def _list(output: OutputOption = Format.TABLE, state_dir: FolderOption = DEFAULT_STATE_DIR) -> None:
    """List the certificates with their ids and expiry; a third of its life before that, one is due."""
    with _authority(state_dir) as authority:
        found = authority.issued()
    if output in DOCUMENTS:
        write_document({"certificates": [_document(each) for each in found]}, output)
    else:
        show_rows(COLUMNS, found, wide=output is Format.WIDE)


def _rotate(
    ca: Annotated[bool, typer.Option("--ca", help="Replace the authority too.")] = False,
    due: Annotated[bool, typer.Option("--due", help="Only those with a third of their life left.")] = False,
    pause_s: Annotated[
        float,
        typer.Option("--pause", parser=span_s, metavar="SPAN", help="Wait between the steps of --ca (5s)."),
    ] = PAUSE_S,
    state_dir: FolderOption = DEFAULT_STATE_DIR,
) -> None:
    """Renew every certificate that is not revoked. Running processes read the files again.

    With --ca: both authorities are trusted, the second issues all certificates, the first is distrusted.
    """
    with _authority(state_dir) as authority:
        if not ca:
            renewed = authority.renew(due_only=due)
            plain(out(), f"renewed: {', '.join(each.folder.name for each in renewed) or 'none'}")
            return

        def pause(done: str) -> None:
            plain(err(), done)
            time.sleep(pause_s)

        authority.rotate(pause)


def _revoke(
    serial: Annotated[str, typer.Argument(help="Hexadecimal, as `fairway certs list -o wide` shows it.")],
    state_dir: FolderOption = DEFAULT_STATE_DIR,
) -> None:
    """Let servers refuse a certificate, and end its open calls within seconds."""
    try:
        number = int(serial, 16)
    except ValueError as exc:
        raise typer.BadParameter(f"{serial!r} is no hexadecimal number") from exc
    with _authority(state_dir) as authority:
        known = [each for each in authority.issued() if each.leaf.serial == number]
        if not 0 < number < 1 << 160:
            raise CliError(
                "NO_SUCH_SERIAL",
                f"{serial} is no serial of a certificate",
                next_step="`fairway certs list -o wide` shows the serials",
                exit_code=ExitCode.USAGE,
            )
        authority.revoke(number)
    whose = str(known[0].leaf.id) if known else "a certificate that is not in the folder"
    plain(out(), f"revoked: {whose}")


for _name, _run, _examples in (
    ("init", _init, ("fairway certs init", "fairway certs init --trust-domain prod.example.com")),
    (
        "issue",
        _issue,
        (
            "fairway certs issue operator alice",
            "fairway certs issue worker worker-0 worker-1 --days 30",
            "fairway certs issue gateway --dns api.example.com --ip 10.0.0.7",
        ),
    ),
    ("list", _list, ("fairway certs list", "fairway certs list -o json")),
    ("rotate", _rotate, ("fairway certs rotate", "fairway certs rotate --ca --pause 1m")),
    ("revoke", _revoke, ("fairway certs revoke 4f1d2c3b",)),
):
    app.command(_name, help=help_text(_run.__doc__ or "", _examples))(_run)


def _state(each: Issued) -> str:
    if each.revoked:
        return "revoked"
    if each.leaf.problem(time.time()):
        return "expired"
    return "due" if each.leaf.is_due(time.time()) else "valid"


def _document(each: Issued) -> dict[str, object]:
    return {
        "name": each.folder.name,
        "id": str(each.leaf.id),
        "serial": f"{each.leaf.serial:x}",
        "expire_time": each.certificate.not_valid_after_utc.isoformat(),
        "state": _state(each),
        "folder": str(each.folder),
    }
