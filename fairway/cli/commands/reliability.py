"""`fairway quarantine`, `requests` and `slis`: what is refused, what ended lately, and how well it ran."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from fairway.cli import completion
from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import Format, OutputOption, PriorityName, YesOption, span_s
from fairway.cli.terminal.cells import moment, priority, short_digest, show_span
from fairway.cli.terminal.formats import DOCUMENTS, document_of, show_deleted, write_document
from fairway.cli.terminal.listing import Resource
from fairway.cli.terminal.output import confirm, out, plain
from fairway.cli.terminal.table import Column, blocks_of
from fairway.timelines import STAGES
from fairway.v1 import common_pb2
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import slis_pb2 as pb

quarantine = typer.Typer(
    help="Quarantine: inputs that end their engines and are refused.", no_args_is_help=True
)


INPUTS: Final[Resource[cp.QuarantinedInput]] = Resource(
    "input",
    "inputs",
    Server.CONTROLPLANE,
    (
        Column("fingerprint", lambda found: found.fingerprint),
        Column("model", lambda found: found.model),
        Column("version", lambda found: found.version_digest),
        Column("deaths", lambda found: str(found.deaths)),
        Column("left", lambda found: show_span(found.expire_time.seconds - datetime.now(UTC).timestamp())),
        Column("until", lambda found: moment(found.expire_time), wide=True),
    ),
)


@command(
    quarantine,
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
    quarantine,
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


requests = typer.Typer(help="Find requests that ended lately.", no_args_is_help=True)


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
    requests,
    "list",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway requests list --slow",
        "fairway requests list --failed --tenant acme",
        "fairway requests list --slow -o json | jq '.requests[].request_id'",
    ),
)
async def recent(
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
    requests,
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


_HOUR_S: Final = 3600.0


def _ms(found: cp.SliSummary, *fields: str) -> str:
    """Return latencies in milliseconds, `-` where nothing was measured."""
    if not found.HasField(fields[0]):  # type: ignore[arg-type]
        return "-"
    values = [1e3 * getattr(found, field) for field in fields]
    return "/".join(f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in values)


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.3%}" if whole else "-"


def _tokens_per_s(found: cp.SliSummary) -> str:
    return f"{found.tokens / found.device_s:.0f}" if found.device_s else "-"


def _cost(found: cp.SliSummary) -> str:
    return f"{found.cost_per_1k_tokens:.3g}" if found.HasField("cost_per_1k_tokens") else "-"


SLIS: Final[Resource[cp.SliSummary]] = Resource(
    "sli",
    "slis",
    Server.CONTROLPLANE,
    (
        Column("model", lambda found: found.model),
        Column("version", lambda found: found.version_digest or "-", key=True),
        Column("tenant", lambda found: found.tenant, key=True),
        Column("class", lambda found: priority(found.priority), key=True),
        Column("zone", lambda found: found.zone or "-", key=True),
        Column("requests", lambda found: str(found.requests)),
        Column("errors", lambda found: str(found.errors), drop=1),
        Column("broken", lambda found: f"{found.broken}/{found.started}", drop=2),
        Column("poisoned", lambda found: str(found.poisoned), drop=6),
        Column("ttft ms 50/95/99", lambda found: _ms(found, "ttft_p50_s", "ttft_p95_s", "ttft_p99_s")),
        Column("itl ms 50/95", lambda found: _ms(found, "itl_p50_s", "itl_p95_s"), drop=3),
        Column("total ms 50/95", lambda found: _ms(found, "total_p50_s", "total_p95_s"), wide=True),
        Column("output", lambda found: str(found.output_tokens), drop=4),
        Column("device s", lambda found: f"{found.device_s:.1f}", drop=5),
        Column("complete", lambda found: _ratio(found.started - found.broken, found.started), wide=True),
        Column("kv hits", lambda found: _ratio(found.cached_tokens, found.prompt_tokens), wide=True),
        Column("tokens/device s", _tokens_per_s, wide=True),
        Column("cost/1k tokens", _cost, wide=True),
    ),
)
_Model = Annotated[
    str, typer.Option("--model", help="Only this deployment.", autocompletion=completion.deployments)
]
_Tenant = Annotated[
    str, typer.Option("--tenant", help="Only this tenant.", autocompletion=completion.tenants)
]
_Class = Annotated[PriorityName | None, typer.Option("--class", help="Only requests of this class.")]
_Window = Annotated[
    float,
    typer.Option(
        "--window",
        parser=span_s,
        metavar="TIME",
        help="How far back, at most 1h; extended to a multiple of ten minutes.",
    ),
]


def add_slis(app: typer.Typer) -> None:
    """Add the command `slis` to ``app``."""

    @command(
        app,
        "slis",
        to=Server.CONTROLPLANE,
        examples=(
            "fairway slis",
            "fairway slis --model chat --class interactive --window 10m",
            "fairway slis --tenant acme -o json | jq '.slis[].ttft_p95_s'",
        ),
    )
    async def slis(
        connection: Connection,
        model: _Model = "",
        tenant: _Tenant = "",
        priority_class: _Class = None,
        zone: Annotated[str, typer.Option("--zone", help="Only gateways of this zone.")] = "",
        window: _Window = _HOUR_S,
        output: OutputOption = Format.TABLE,
    ) -> None:
        """Show requests, errors, latencies and device time by model, version, tenant, class and zone.

        Requests count when they end; gateways report every 2 s.
        """
        listing = connection.admin.slis.list(
            model=model,
            tenant=tenant,
            priority=priority_class.proto if priority_class else common_pb2.PRIORITY_UNSPECIFIED,
            zone=zone,
            window_s=window,
        )
        SLIS.write_list(await checked(listing, what="cannot list the indicators"), output)
