"""`fairway requests`: the slowest and the failed of the requests that ended lately, with their stages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from fairway.cli import completion
from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import Format, OutputOption
from fairway.cli.terminal.cells import priority, short_digest, show_span
from fairway.cli.terminal.formats import DOCUMENTS, document_of, write_document
from fairway.cli.terminal.listing import Resource
from fairway.cli.terminal.output import out, plain
from fairway.cli.terminal.table import Column, blocks_of
from fairway.v1 import slis_pb2 as pb

STAGES: Final = ("validate", "admit", "queue", "dispatch", "engine wait", "prefill", "decode", "send")
app = typer.Typer(help="Find requests that ended lately.", no_args_is_help=True)


def _span(microseconds: int) -> str:
    return show_span(microseconds / 1e6) if microseconds >= 1e6 else f"{microseconds / 1e3:.1f}ms"


def _received(found: pb.FinishedRequest) -> str:
    return f"{datetime.fromtimestamp(found.received_unix_us / 1e6, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _stages(found: pb.FinishedRequest) -> str:
    return " ".join(f"{name}={_span(spent)}" for name, spent in zip(STAGES, found.stages_us, strict=False))


def _mostly(found: pb.FinishedRequest) -> str:
    """Return the longest stage."""
    spent, name = max(zip(found.stages_us, STAGES, strict=False), default=(0, ""))
    return f"{name} {_span(spent)}" if spent else ""


REQUESTS: Final = Resource(
    "request",
    "requests",
    Server.CONTROLPLANE,
    (
        Column("request", lambda found: found.request_id, least=36),
        Column("reason", lambda found: found.reason),
        Column("total", lambda found: _span(sum(found.stages_us))),
        Column("mostly", _mostly),
        Column("tenant", lambda found: found.tenant, drop=1),
        Column("model", lambda found: found.model, drop=2),
        Column("received", _received, drop=4),
        Column("tokens in/out", lambda found: f"{found.prompt_tokens}/{found.output_tokens}", drop=3),
        Column("cached", lambda found: str(found.cached_tokens), wide=True),
        Column("class", lambda found: priority(found.priority), wide=True),
        Column("face", lambda found: found.face, wide=True),
        Column("version", lambda found: short_digest(found.version_digest), wide=True),
        Column("stages", _stages, wide=True),
    ),
)


@command(
    app,
    "list",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway requests list --slow",
        "fairway requests list --failed --tenant acme",
        "fairway requests list --slow -o json | jq '.requests[].request_id'",
    ),
)
async def listed(
    connection: Connection,
    slow: Annotated[bool, typer.Option("--slow", help="The slowest first, not the last first.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Only those that ended with an error.")] = False,
    tenant: Annotated[
        str, typer.Option("--tenant", help="Only this tenant's.", autocompletion=completion.tenants)
    ] = "",
    model: Annotated[
        str, typer.Option("--model", help="Only this deployment's.", autocompletion=completion.deployments)
    ] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Maximum number.")] = 20,
    output: OutputOption = Format.TABLE,
) -> None:
    """List requests that ended lately, without their texts.

    The leading control plane has the newest 4,096. A gateway reports of each two seconds the 32 slowest and
    up to 32 that failed, 8 of one tenant.
    """
    listing = connection.admin.slis.requests(
        slow=slow, failed=failed, tenant=tenant, model=model, limit=limit
    )
    REQUESTS.write_list(await checked(listing, what="cannot list the requests"), output)


@command(
    app,
    "show",
    to=Server.CONTROLPLANE,
    examples=("fairway requests show req_0123456789", "fairway requests show req_0123456789 -o json"),
)
async def show(
    connection: Connection,
    request_id: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="Id of the response, or its x-request-id.")
    ],
    output: OutputOption = Format.TABLE,
) -> None:
    """Show a request that ended lately with its stages. `fairway explain` has its placement."""
    finding = connection.admin.slis.requests(request_id=request_id)
    found = await checked(finding, what="cannot show the request")
    if not found:
        raise CliError(
            "NOT_FOUND",
            f"the leading control plane has no record of {request_id}",
            next_step="it has the slowest and the failed ones; the log of its gateway has a line of each: "
            f"`fairway logs gateway | grep {request_id}`",
            exit_code=ExitCode.REFUSED,
        )
    if output in DOCUMENTS:
        write_document(document_of(found[0]), output)
    else:
        plain(out(), show_lines(found[0]), end="")


def show_lines(found: pb.FinishedRequest) -> str:
    """Return the request's values, then a line per stage."""
    stages = (
        f"  {name:<12}{_span(spent):>9}\n" for name, spent in zip(STAGES, found.stages_us, strict=False)
    )
    shown = [column for column in REQUESTS.columns if column.header not in ("stages", "mostly")]
    return blocks_of(shown, [found]) + "STAGES\n" + "".join(stages)
