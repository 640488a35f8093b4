"""`fairway diagnose`: why a quantile of latency rose."""

from __future__ import annotations

import asyncio
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from fairway.cli import completion
from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.flags import Format, OutputOption, parse_past
from fairway.cli.replay import replay
from fairway.cli.terminal.cells import moment
from fairway.cli.terminal.formats import DOCUMENTS, document_of, text_of, write_document
from fairway.cli.terminal.output import out, plain
from fairway.v1 import controlplane_pb2 as cp

_TIMEOUT_S: Final = 60.0


class MetricName(StrEnum):
    TTFT = "ttft"
    ITL = "itl"
    TOTAL = "total"


_Past = Annotated[datetime | None, typer.Option("--from", parser=parse_past, metavar="TIME", help="Start.")]
_Model = Annotated[
    str,
    typer.Option(
        "--model",
        help="Deployment; default: the one whose latency rose most certainly.",
        autocompletion=completion.deployments,
    ),
]
_Metric = Annotated[
    MetricName,
    typer.Option("--metric", help="Which latency."),
]
_Quantile = Annotated[
    float,
    typer.Option("--quantile", min=0.01, max=0.999, help="Which quantile of it."),
]
_Since = Annotated[
    datetime | None,
    typer.Option("--since", parser=parse_past, metavar="TIME", help="Start; default: the last rise."),
]
_End = Annotated[
    datetime | None,
    typer.Option("--to", parser=parse_past, metavar="TIME", help="End; default: now."),
]
_Baseline = Annotated[
    str,
    typer.Option("--baseline", help="A saved baseline; auto: the time before, else stored hours."),
]
_Tenant = Annotated[
    str,
    typer.Option("--tenant", help="Only requests of this tenant.", autocompletion=completion.tenants),
]
_Save = Annotated[
    str,
    typer.Option("--save-baseline", metavar="NAME", help="Keep the time as a baseline instead."),
]
_Replayed = Annotated[
    bool,
    typer.Option("--replay/--no-replay", help="Test causes in the simulator, for seconds."),
]
_Samples = Annotated[
    Path | None,
    typer.Option("--samples", help="File to write the answer with its sampled requests to."),
]


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _span(name: str, span: cp.DiagnosedSpan) -> str:
    begin, end = moment(getattr(span, "from")), moment(span.to)
    return f"{name:<9} {begin} to {end}: {span.requests} requests, {span.samples} sampled\n"


def shown(found: cp.DiagnoseLatencyResponse) -> str:
    """Return the answer as text: the verdict, both times, the stages, the tree and the causes."""
    lines = [f"{found.verdict}: {found.message}\n", _span("window", found.window)]
    lines.append(_span("baseline", found.baseline))
    lines += [f"note      {note}\n" for note in found.notes]
    if found.stages:
        before, after = found.quantiles.baseline_s, found.quantiles.window_s
        lines.append(
            f"\n{found.metric} p{100 * found.quantile:g} of {found.model}: {_ms(before)}, then {_ms(after)}\n"
        )
        lines.append(f"  {'STAGE':<12}{'BASELINE':>11}{'WINDOW':>11}{'SHARE':>8}\n")
        lines += [
            f"  {one.stage.replace('_', ' '):<12}{_ms(one.baseline_s):>11}{_ms(one.window_s):>11}"
            f"{one.share:>8.0%}\n"
            for one in found.stages
            if one.baseline_s or one.window_s
        ]
    if found.tree:
        lines.append("\nTREE\n")
        lines += [f"  {'  ' * step.depth}{step.text}\n" for step in found.tree]
    for place, cause in enumerate(found.causes, 1):
        lines.append(
            f"\n{place}. {cause.kind} {cause.subject}: score {cause.score:.2f}, explains "
            f"{_ms(cause.share_s)}, without it {_ms(cause.counterfactual_s)}\n"
        )
        lines += [f"   {text}\n" for text in cause.evidence]
        lines.append(f"   next: {cause.next}\n")
    return "".join(lines)


async def _diagnose(
    connection: Connection,
    model: _Model = "",
    metric: _Metric = MetricName.TTFT,
    quantile: _Quantile = 0.95,
    since: _Since = None,
    start: _Past = None,
    end: _End = None,
    baseline: _Baseline = "auto",
    tenant: _Tenant = "",
    save_baseline: _Save = "",
    replayed: _Replayed = True,
    samples: _Samples = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show why a quantile of latency rose: its stages, and causes with their evidence.

    A window is compared with the time before it. Each gateway samples up to 64 requests of two seconds.
    """
    if since is not None and start is not None:
        raise typer.BadParameter("--since and --from are the same: give one")
    began = since or start
    diagnoses = connection.admin.diagnoses
    if save_baseline:
        saving = diagnoses.save_baseline(save_baseline, start=began, end=end)
        span = await checked(saving, what="cannot save the baseline")
        if output in DOCUMENTS:
            write_document(document_of(span), output)
        else:
            plain(out(), _span(save_baseline, span), end="")
        return
    asking = diagnoses.diagnose(
        model=model,
        tenant=tenant,
        metric=metric.value,
        quantile=quantile,
        start=began,
        end=end,
        baseline=baseline,
        samples=replayed or samples is not None,
        timeout_s=_TIMEOUT_S,
    )
    found = await checked(asking, what="cannot diagnose")
    if replayed:
        await asyncio.to_thread(replay, found)
    if samples is not None:
        samples.write_text(text_of(document_of(found), Format.JSON), encoding="utf-8")
    found.ClearField("window_samples")
    found.ClearField("baseline_samples")
    if output in DOCUMENTS:
        write_document(document_of(found), output)
    else:
        plain(out(), shown(found), end="")


def add_diagnose(app: typer.Typer) -> None:
    """Add the command `diagnose` to ``app``."""
    command(
        app,
        "diagnose",
        to=Server.CONTROLPLANE,
        examples=(
            "fairway diagnose",
            "fairway diagnose --model chat --metric itl --since 10m",
            "fairway diagnose --from 2027-01-31T12:00:00Z --to 2027-01-31T12:10:00Z --baseline monday",
            "fairway diagnose --since 1h --save-baseline monday",
            "fairway diagnose -o json | jq '.causes[0]'",
        ),
    )(_diagnose)
