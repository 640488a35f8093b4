"""`fairway quarantine`: inputs that gateways refuse because they end the engines that compute them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from fairway.cli import completion
from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import Format, OutputOption, YesOption
from fairway.cli.terminal.cells import moment, show_span
from fairway.cli.terminal.formats import show_deleted
from fairway.cli.terminal.listing import Resource
from fairway.cli.terminal.output import confirm
from fairway.cli.terminal.table import Column
from fairway.v1 import controlplane_pb2 as cp

app = typer.Typer(help="Quarantine: inputs that end their engines and are refused.", no_args_is_help=True)


def _left(found: cp.QuarantinedInput) -> str:
    return show_span(found.expire_time.seconds - datetime.now(UTC).timestamp())


INPUTS: Final[Resource[cp.QuarantinedInput]] = Resource(
    "input",
    "inputs",
    Server.CONTROLPLANE,
    (
        Column("fingerprint", lambda found: found.fingerprint),
        Column("model", lambda found: found.model),
        Column("version", lambda found: found.version_digest),
        Column("deaths", lambda found: str(found.deaths)),
        Column("left", _left),
        Column("until", lambda found: moment(found.expire_time), wide=True),
    ),
)


@command(
    app,
    "list",
    to=Server.CONTROLPLANE,
    examples=("fairway quarantine list", "fairway quarantine list --model chat -o json | jq '.inputs[]'"),
)
async def listed(
    connection: Connection,
    model: Annotated[
        str, typer.Option("--model", help="Only this deployment.", autocompletion=completion.deployments)
    ] = "",
    version: Annotated[str, typer.Option("--version", help="Only this version, by its whole digest.")] = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """List the refused inputs: how many engines each ended, and how long it stays refused."""
    listing = connection.admin.quarantine.list(model=model, version_digest=version)
    INPUTS.write_list(await checked(listing, what="cannot list the quarantine"), output)


@command(
    app,
    "lift",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway quarantine lift 9c1b5e5f",
        "fairway quarantine lift 9c1b5e5f --version 3f5d --yes",
    ),
)
async def lift(
    connection: Connection,
    fingerprint: Annotated[str, typer.Argument(help="Fingerprint of the input, or its first digits.")],
    version: Annotated[
        str, typer.Option("--version", help="First digits of the version, where several refuse the input.")
    ] = "",
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Admit an input again. If it still ends its engines, it is isolated and refused again."""
    listing = connection.admin.quarantine.list()
    found = [
        one
        for one in await checked(listing, what="cannot list the quarantine")
        if one.fingerprint.startswith(fingerprint)
        and one.version_digest.removeprefix("sha256:").startswith(version.removeprefix("sha256:"))
    ]
    if len(found) != 1:
        raise _not_one(fingerprint, found)
    (entry,) = found
    confirm(f"Admit the input {entry.fingerprint} of {entry.model} again?", yes=yes)
    lifted = connection.admin.quarantine.lift(entry.version_digest, entry.fingerprint)
    await checked(lifted, what=f"cannot lift the quarantine of {entry.fingerprint}")
    show_deleted(entry.fingerprint, output)


def _not_one(fingerprint: str, found: list[cp.QuarantinedInput]) -> CliError:
    if not found:
        return CliError(
            "NOT_FOUND",
            f"no input {fingerprint} is in quarantine",
            next_step="`fairway quarantine list` shows what is there",
            exit_code=ExitCode.REFUSED,
        )
    names = ", ".join(f"{one.fingerprint} of {one.version_digest}" for one in found[:4])
    return CliError(
        "AMBIGUOUS",
        f"{len(found)} inputs match: {names}",
        next_step="give more digits, or --version",
        exit_code=ExitCode.REFUSED,
    )
