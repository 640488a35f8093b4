"""`fairway slis`: what gateways measured of the requests of the last hour."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from fairway.cli import completion
from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.flags import Format, OutputOption, PriorityName, span_s
from fairway.cli.terminal.cells import priority
from fairway.cli.terminal.listing import Resource
from fairway.cli.terminal.table import Column
from fairway.v1 import common_pb2
from fairway.v1 import controlplane_pb2 as cp

_HOUR_S: Final = 3600.0


def _ms(found: cp.SliSummary, *fields: str) -> str:
    """Return latencies in milliseconds, `-` where nothing was measured."""
    if not found.HasField(fields[0]):  # type: ignore[arg-type]
        return "-"
    values = [1e3 * getattr(found, field) for field in fields]
    return "/".join(f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in values)


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
        Column("output", lambda found: str(found.output_tokens), drop=4),
        Column("device s", lambda found: f"{found.device_s:.1f}", drop=5),
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


def add(app: typer.Typer) -> None:
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
