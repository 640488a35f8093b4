"""`fairway rollouts`: traffic from one version to another, judged on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from google.protobuf.duration_pb2 import Duration

from fairway.cli import completion
from fairway.cli.calls import checked
from fairway.cli.connection import Connection, OptionGroup, Server, command
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import (
    EtagOption,
    Format,
    OutputOption,
    WatchOption,
    YesOption,
    key_values,
    optional,
    optional_span,
    span_s,
)
from fairway.cli.terminal.formats import DOCUMENTS, document_of, write_document
from fairway.cli.terminal.listing import Resource, add_list, add_show, metadata_columns, resource
from fairway.cli.terminal.output import confirm, out, plain
from fairway.cli.terminal.table import Column, show_rows
from fairway.client import NotFound
from fairway.client.admin.calls import duration_of
from fairway.v1 import controlplane_pb2 as cp

_MIB: Final = 2**20


def phase_name(rollout: cp.Rollout) -> str:
    name = cp.RolloutPhase.Name(rollout.phase).removeprefix("ROLLOUT_PHASE_").lower().replace("_", " ")
    return f"{name} (paused)" if rollout.paused else name


def strategy_name(rollout: cp.Rollout) -> str:
    name = cp.RolloutStrategy.Name(rollout.strategy).removeprefix("ROLLOUT_STRATEGY_")
    return name.lower().replace("_", "-")


ARM_COLUMNS: Final[tuple[Column[cp.RolloutArmStatus], ...]] = (
    Column("arm", lambda arm: arm.name),
    Column("version", lambda arm: arm.version_digest, drop=1),
    Column("traffic", lambda arm: f"{arm.weight_ratio:.2%}"),
    Column("ready", lambda arm: f"{arm.ready_replicas}/{arm.wanted_replicas}"),
    Column("crashes", lambda arm: str(arm.engine_restarts), drop=2),
    Column("gate", lambda arm: arm.verdict or "-"),
    Column("waits for", lambda arm: arm.waits_for, least=30),
)
EVIDENCE_COLUMNS: Final[tuple[Column[cp.GateEvidence], ...]] = (
    Column("metric", lambda one: one.metric),
    Column("stable", lambda one: _value(one, "baseline")),
    Column("candidate", lambda one: _value(one, "candidate")),
    Column("samples", lambda one: f"{one.baseline_samples}/{one.candidate_samples}"),
    Column(
        "regression", lambda one: f"{one.statistic:+.1f} of {one.bound:.1f}" if one.bound else "-", drop=1
    ),
    Column("verdict", lambda one: _verdict(one)),
)
HISTORY_COLUMNS: Final[tuple[Column[cp.RolloutHistoryEntry], ...]] = (
    Column("time", lambda one: one.time.ToDatetime().isoformat("T", "seconds") + "Z"),
    Column("what", lambda one: one.what, drop=1),
    Column("message", lambda one: one.message, least=58),
)
FIT_COLUMNS: Final[tuple[Column[cp.RolloutFit], ...]] = (
    Column("arm", lambda fit: fit.name),
    Column("replicas", lambda fit: f"{fit.replicas - fit.missing_replicas}/{fit.replicas}"),
    Column(
        "memory on each",
        lambda fit: f"{-(-fit.needed_bytes // _MIB)} MiB{'' if fit.measured else ' or more (its files)'}",
    ),
    Column("workers", lambda fit: ", ".join(fit.workers) or "-", drop=1),
    Column("does not fit", lambda fit: "; ".join(fit.rejected), least=40),
)


def show_status(rollout: cp.Rollout) -> None:
    """Print where the rollout is, its arms, and the gate of each candidate."""
    head = f"{rollout.metadata.name}: {strategy_name(rollout)} of {rollout.deployment}, {phase_name(rollout)}"
    if rollout.steps and rollout.phase == cp.ROLLOUT_PHASE_RUNNING:
        head += f", step {rollout.step + 1} of {len(rollout.steps)}"
    plain(out(), f"{head}\n{rollout.message}")
    if rollout.arm_status:
        plain(out())
        show_rows(ARM_COLUMNS, rollout.arm_status)
    for arm in rollout.arm_status:
        if arm.evidence:
            plain(out(), f"\n{arm.name} against stable:")
            show_rows(EVIDENCE_COLUMNS, arm.evidence)


def show_history(entries: Iterable[cp.RolloutHistoryEntry]) -> None:
    """Print what happened, with the evidence of each decision."""
    for entry in entries:
        show_rows(HISTORY_COLUMNS, [entry])
        if entry.evidence:
            show_rows(EVIDENCE_COLUMNS, entry.evidence)


def show_plan(rollout: cp.Rollout) -> None:
    """Print what a start would do, and where its versions fit."""
    plain(
        out(),
        f"{strategy_name(rollout)} of {rollout.deployment} from {rollout.stable_version}\n{rollout.message}",
    )
    for number, step in enumerate(rollout.steps, 1):
        hold_s = step.hold.ToTimedelta().total_seconds()
        plain(
            out(),
            f"step {number}: {step.weight_ratio:.2%}, at least {hold_s:g} s and {step.min_requests} requests",
        )
    show_rows(FIT_COLUMNS, rollout.fits)


def _value(evidence: cp.GateEvidence, field: str) -> str:
    if not evidence.HasField(field):  # type: ignore[arg-type]
        return "-"
    value = float(getattr(evidence, field))
    return f"{value:.2%}" if evidence.metric.endswith("_ratio") else f"{value:.4g}"


def _verdict(evidence: cp.GateEvidence) -> str:
    if evidence.accepted:
        return f"{evidence.verdict}, accepted: {evidence.accepted}"
    return evidence.verdict if evidence.counted else "not measured"


class StrategyName(StrEnum):
    CANARY = "canary"
    AB = "ab"
    SHADOW = "shadow"
    BLUE_GREEN = "blue-green"
    INSTANT = "instant"

    @property
    def proto(self) -> cp.RolloutStrategy.ValueType:
        return cp.RolloutStrategy.Value(f"ROLLOUT_STRATEGY_{self.name}")


class InconclusiveName(StrEnum):
    WAIT = "wait"
    PROMOTE = "promote"
    ABORT = "abort"

    @property
    def proto(self) -> cp.InconclusivePolicy.ValueType:
        return cp.InconclusivePolicy.Value(f"INCONCLUSIVE_POLICY_{self.name}")


# Terms that only some strategies have, and what has their place in the others.
_TERMS_OF: Final[Mapping[str, tuple[tuple[StrategyName, ...], str]]] = {
    "steps": ((StrategyName.CANARY,), "its traffic moves at once"),
    "hold": (
        (StrategyName.CANARY,),
        "--soak is the time with all traffic, and an operator ends an A/B test or shadow",
    ),
    "by_worker": ((StrategyName.CANARY,), "its traffic moves at once"),
    "fraction": ((StrategyName.SHADOW,), "--steps or --arm give the traffic"),
    "shadow_concurrency": ((StrategyName.SHADOW,), "it copies no request"),
}


def _several(flag: str, metavar: str, help_: str) -> object:
    return optional(list[str], flag, f"{help_} Repeatable.", metavar=metavar)


TERMS: Final = OptionGroup(
    "terms",
    "",
    {
        "steps": optional(str, "--steps", "Percentages of a canary. Default: 1,5,25,50,100."),
        "hold": optional_span("--hold", "Shortest time of each step. Default: 1m."),
        "min_requests": optional(
            int, "--min-requests", "Of each arm, before it is judged. Default: 100.", min=1
        ),
        "soak": optional_span(
            "--soak", "With all traffic, judged, while the version before is warm. Default: 5m."
        ),
        "keep_warm": optional_span(
            "--keep-warm", "The version before stays loaded after the cutover, for a revert. Default: 10m."
        ),
        "load_timeout": optional_span("--load-timeout", "To load the versions of a step. Default: 15m."),
        "by_worker": optional(
            bool,
            "--by-worker",
            "Take the stable version's workers one at a time, also where both versions fit.",
        ),
        "fraction": optional(
            float, "--fraction", "Percentage of requests that a shadow copies.", min=0, max=100
        ),
        "shadow_concurrency": optional(
            int, "--shadow-concurrency", "Copies at once on a gateway. Default: 8.", min=1
        ),
        "allow_tenant": _several("--allow-tenant", "TENANT", "Only these tenants take part."),
        "deny_tenant": _several("--deny-tenant", "TENANT", "This tenant stays on the stable version."),
        "override": _several("--override", "TENANT=ARM", "The arm of a tenant."),
        "class_cap": _several(
            "--class-cap", "CLASS=PERCENT", "Largest share for tenants of this highest class."
        ),
        "refuse_pins": optional(bool, "--refuse-pins", "Requests may not name a version."),
        "metric": _several("--metric", "METRIC", "Judge only this metric, such as ttft_p95 or cost."),
        "min_sessions": optional(
            int, "--min-sessions", "Of each arm, before it is judged. Default: 30.", min=1
        ),
        "patience": optional_span("--patience", "For a verdict, after a step's hold. Default: 10m."),
        "inconclusive": optional(
            InconclusiveName, "--inconclusive", "What happens without a verdict. Default: wait."
        ),
        "max_engine_restarts": optional(
            int, "--max-engine-restarts", "Crashes that roll back; 0: no bound. Default: 7.", min=0
        ),
        "accept": _several("--accept", "METRIC=REASON", "A metric that does not count; the reason is kept."),
    },
)


def rollout_of(
    name: str, deployment: str, strategy: StrategyName, arms: list[cp.RolloutArm], terms: Mapping[str, Any]
) -> cp.Rollout:
    """Return the rollout that the options describe. Raises BadParameter."""
    _check_terms(strategy, terms)
    rollout = cp.Rollout(
        metadata=cp.Metadata(name=name), deployment=deployment, strategy=strategy.proto, arms=arms
    )
    if strategy is StrategyName.CANARY:
        rollout.steps.extend(_steps(terms))
    elif "min_requests" in terms:
        rollout.steps.add(weight_ratio=1.0, hold=Duration(), min_requests=terms["min_requests"])
    if strategy is StrategyName.SHADOW:
        rollout.shadow.arm = arms[0].name
        rollout.shadow.fraction_ratio = terms.get("fraction", 100.0) / 100
        rollout.shadow.max_concurrency = terms.get("shadow_concurrency", 0)
    for field in ("soak", "keep_warm", "load_timeout"):
        if field in terms:
            getattr(rollout, field).CopyFrom(duration_of(terms[field]))
    rollout.by_worker = terms.get("by_worker", False)
    _set_rules(rollout.rules, terms)
    _set_gate(rollout.gate, terms)
    return rollout


def _check_terms(strategy: StrategyName, terms: Mapping[str, Any]) -> None:
    for name, (strategies, instead) in _TERMS_OF.items():
        if terms.get(name) and strategy not in strategies:
            raise typer.BadParameter(
                f"a rollout by {strategy} has none: {instead}", param_hint=f"--{name.replace('_', '-')}"
            )


def arms_of(to: str, texts: list[str] | None) -> list[cp.RolloutArm]:
    """Return the candidates: one named canary, or those of `--arm NAME=VERSION:PERCENT`."""
    found = [cp.RolloutArm(name="canary", version=to)] if to else []
    for name, rest in key_values(texts, flag="--arm").items():
        version, colon, weight = rest.rpartition(":")
        try:
            ratio = float(weight) / 100
        except ValueError:
            colon, ratio = "", 0.0
        if not colon:
            raise typer.BadParameter(f"{rest!r} is not VERSION:PERCENT", param_hint="--arm")
        found.append(cp.RolloutArm(name=name, version=version, weight_ratio=ratio))
    if not found:
        raise typer.BadParameter("name the version with --to, or the arms of an A/B test with --arm")
    return found


def _steps(terms: Mapping[str, Any]) -> list[cp.RolloutStep]:
    text = terms.get("steps")
    if text is None and not {"hold", "min_requests"} & terms.keys():
        return []
    try:
        ratios = [float(part) / 100 for part in (text or "1,5,25,50,100").split(",")]
    except ValueError as exc:
        raise typer.BadParameter("percentages like 1,5,25,50,100", param_hint="--steps") from exc
    steps = [
        cp.RolloutStep(weight_ratio=ratio, min_requests=terms.get("min_requests", 0)) for ratio in ratios
    ]
    for step in steps:
        if "hold" in terms:
            step.hold.CopyFrom(duration_of(terms["hold"]))
    return steps


def _set_rules(rules: cp.RolloutRules, terms: Mapping[str, Any]) -> None:
    rules.refuse_pins = bool(terms.get("refuse_pins"))
    rules.allowed_tenants.extend(terms.get("allow_tenant", ()))
    rules.denied_tenants.extend(terms.get("deny_tenant", ()))
    rules.overrides.update(key_values(terms.get("override"), flag="--override"))
    for name, percent in key_values(terms.get("class_cap"), flag="--class-cap").items():
        try:
            rules.class_caps[name] = float(percent) / 100
        except ValueError as exc:
            raise typer.BadParameter(f"{percent!r} is no percentage", param_hint="--class-cap") from exc


def _set_gate(gate: cp.RolloutGate, terms: Mapping[str, Any]) -> None:
    gate.metrics.extend(terms.get("metric", ()))
    gate.min_sessions = terms.get("min_sessions", 0)
    if "patience" in terms:
        gate.patience.CopyFrom(duration_of(terms["patience"]))
    if "inconclusive" in terms:
        gate.inconclusive = terms["inconclusive"].proto
    if "max_engine_restarts" in terms:
        gate.max_engine_restarts = terms["max_engine_restarts"]
    gate.accepted.update(key_values(terms.get("accept"), flag="--accept"))


app = typer.Typer(help="Rollouts: move a deployment's traffic to another version.", no_args_is_help=True)

_ENDED: Final = (cp.ROLLOUT_PHASE_COMPLETED, cp.ROLLOUT_PHASE_ABORTED, cp.ROLLOUT_PHASE_REVERTED)
_POLL_S: Final = 1.0
RolloutArgument = Annotated[
    str,
    typer.Argument(help="A rollout, or a deployment for its newest one.", autocompletion=completion.names),
]
ReasonOption = Annotated[str, typer.Option("--reason", help="Kept in the history.")]
AcceptOption = Annotated[
    list[str] | None,
    typer.Option(
        "--accept", metavar="METRIC=REASON", help="A metric that no longer counts; the reason is kept."
    ),
]
ROLLOUTS: Final[Resource[cp.Rollout]] = resource(
    "rollout",
    (
        Column("deployment", lambda rollout: rollout.deployment, drop=1),
        Column("strategy", strategy_name, drop=2),
        Column("phase", phase_name),
        Column("message", lambda rollout: rollout.message, least=40),
        *metadata_columns()[1:],
    ),
    lambda admin: admin.rollouts,
)
add_list(app, ROLLOUTS, about="List the rollouts and how far they are.")
add_show(app, ROLLOUTS, about="Show a rollout with all its fields.")


@command(
    app,
    "start",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway rollouts start chat --to v2",
        "fairway rollouts start chat --to v2 --steps 1,10,50,100 --hold 10m --dry-run",
        "fairway rollouts start chat --to v2 --strategy blue-green --soak 30m",
        "fairway rollouts start chat --to v2 --strategy shadow --fraction 20",
        "fairway rollouts start chat --strategy ab --arm terse=v2:30 --metric ttft_p95",
    ),
    groups=(TERMS,),
)
async def start(
    connection: Connection,
    deployment: Annotated[str, typer.Argument(help="The deployment.", autocompletion=completion.deployments)],
    to: Annotated[str, typer.Option("--to", help="A digest or a tag.")] = "",
    arm: Annotated[
        list[str] | None,
        typer.Option("--arm", metavar="NAME=VERSION:PERCENT", help="An arm of an A/B test. Repeatable."),
    ] = None,
    strategy: Annotated[
        StrategyName, typer.Option("--strategy", help="How traffic moves.")
    ] = StrategyName.CANARY,
    name: Annotated[str, typer.Option("--name", help="Default: the deployment and the time.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and its memory only.")] = False,
    output: OutputOption = Format.TABLE,
    *,
    terms: Mapping[str, Any],
) -> None:
    """Load a version beside the present one, and move traffic to it step by step."""
    name = name or f"{deployment}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    wanted = rollout_of(name, deployment, strategy, arms_of(to, arm), terms)
    starting = connection.admin.rollouts.create(wanted, dry_run=dry_run)
    found = await checked(starting, what=f"cannot start a rollout of {deployment}")
    if dry_run and output not in DOCUMENTS:
        show_plan(found)
    else:
        ROLLOUTS.write_one(found, output)


@command(
    app,
    "status",
    to=Server.CONTROLPLANE,
    examples=("fairway rollouts status chat", "fairway rollouts status chat --watch"),
)
async def status(
    connection: Connection,
    name: RolloutArgument,
    watch: WatchOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show the arms, their gates and the evidence; with --watch until the rollout has ended."""
    shown = b""
    while True:
        found = await _found(connection, name)
        data = found.SerializeToString(deterministic=True)
        if data != shown:
            shown = data
            _show(found, output, again=watch)
        if not watch or found.phase in _ENDED:
            return
        await asyncio.sleep(_POLL_S)


@command(app, "wait", to=Server.CONTROLPLANE, examples=("fairway rollouts wait chat --within 30m",))
async def wait(
    connection: Connection,
    name: RolloutArgument,
    timeout_s: Annotated[
        float, typer.Option("--within", parser=span_s, metavar="SPAN", help="Longest wait.")
    ] = 3600.0,
    output: OutputOption = Format.TABLE,
) -> None:
    """Wait until every worker confirmed the cutover."""
    ends_s = time.monotonic() + timeout_s
    found = await _found(connection, name)
    while found.phase not in _ENDED and time.monotonic() < ends_s:
        await asyncio.sleep(_POLL_S)
        found = await _found(connection, name)
    _show(found, output, again=False)
    if not found.cutover_revision or found.phase == cp.ROLLOUT_PHASE_REVERTED:
        raise CliError(
            "NOT_CUT_OVER",
            f"{found.metadata.name} is {phase_name(found)}: {found.message}",
            next_step=f"`fairway rollouts history {found.metadata.name}` shows why",
            exit_code=ExitCode.REFUSED,
        )


@command(app, "history", to=Server.CONTROLPLANE, examples=("fairway rollouts history chat",))
async def history(connection: Connection, name: RolloutArgument, output: OutputOption = Format.TABLE) -> None:
    """Show what happened in a rollout, with the evidence of each decision."""
    found = await _found(connection, name)
    if output in DOCUMENTS:
        write_document({"history": [document_of(entry) for entry in found.history]}, output)
    else:
        show_history(found.history)


@command(
    app,
    "promote",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway rollouts promote chat",
        "fairway rollouts promote chat --to-end",
        "fairway rollouts promote chat --accept cost='longer answers are wanted'",
        "fairway rollouts promote chat --arm terse",
    ),
)
async def promote(
    connection: Connection,
    name: RolloutArgument,
    to_end: Annotated[bool, typer.Option("--to-end", help="To all traffic.")] = False,
    arm: Annotated[str, typer.Option("--arm", help="Of an A/B test: the arm that gets all traffic.")] = "",
    accept: AcceptOption = None,
    etag: EtagOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Go to the next step without waiting for its gate; a failed gate still rolls back."""
    rollout = (await _found(connection, name)).metadata.name
    accepted = key_values(accept, flag="--accept")
    await _changed(
        connection.admin.rollouts.promote(rollout, to_end=to_end, arm=arm, accepted=accepted, etag=etag),
        f"cannot promote the rollout {rollout}",
        output,
    )


def _add_passage(verb: str, about: str) -> None:
    """Add the command ``verb``, which has no options of its own."""

    async def changed(
        connection: Connection,
        name: RolloutArgument,
        etag: EtagOption = "",
        output: OutputOption = Format.TABLE,
    ) -> None:
        rollout = (await _found(connection, name)).metadata.name
        changing = getattr(connection.admin.rollouts, verb)(rollout, etag=etag)
        await _changed(changing, f"cannot {verb} the rollout {rollout}", output)

    changed.__doc__ = about
    command(app, verb, to=Server.CONTROLPLANE, examples=(f"fairway rollouts {verb} chat",))(changed)


def _add_retreat(verb: str, consequence: str, about: str) -> None:
    """Add the command ``verb``, which moves requests back. ``consequence``: may contain {version}."""

    async def changed(
        connection: Connection,
        name: RolloutArgument,
        reason: ReasonOption = "",
        etag: EtagOption = "",
        yes: YesOption = False,
        output: OutputOption = Format.TABLE,
    ) -> None:
        found = await _found(connection, name)
        rollout, version = found.metadata.name, found.stable_version
        confirm(f"{verb.capitalize()} {rollout}? {consequence.format(version=version)}", yes=yes)
        changing = getattr(connection.admin.rollouts, verb)(rollout, reason=reason, etag=etag)
        await _changed(changing, f"cannot {verb} the rollout {rollout}", output)

    changed.__doc__ = about
    line = f"fairway rollouts {verb} chat"
    examples = (line, f"{line} --reason 'odd answers' --yes")
    command(app, verb, to=Server.CONTROLPLANE, examples=examples)(changed)


_add_passage("pause", "Stay at the present step. A failed gate still rolls back.")
_add_passage("resume", "Go on with a paused rollout; the hold of its step begins anew.")
_add_retreat(
    "abort",
    "Every new request gets the stable version.",
    "Move every new request back to the stable version, now.",
)
_add_retreat(
    "revert",
    "New requests get {version}: at once where it is warm.",
    "Give the deployment its version before again, also once the rollout is final.",
)


async def _found(connection: Connection, name: str) -> cp.Rollout:
    """Return the rollout of this name, or the newest one of the deployment of this name. Raises CliError."""
    what = f"cannot show the rollout {name}"

    async def read() -> cp.Rollout | None:
        try:
            return await connection.admin.rollouts.get(name)
        except NotFound:
            return None

    if (found := await checked(read(), what=what)) is not None:
        return found
    every = await checked(connection.admin.rollouts.list(), what="cannot list the rollouts")
    of_deployment = [one for one in every if one.deployment == name]
    if not of_deployment:
        raise CliError(
            "NOT_FOUND",
            f"there is no rollout {name}, and none of a deployment {name}",
            next_step="`fairway rollouts list` shows what is there",
            exit_code=ExitCode.REFUSED,
        )
    newest = max(of_deployment, key=lambda one: one.metadata.create_time.ToNanoseconds())
    return await checked(connection.admin.rollouts.get(newest.metadata.name), what=what)


async def _changed(change: Coroutine[Any, Any, cp.Rollout], what: str, output: Format) -> None:
    _show(await checked(change, what=what), output, again=False)


def _show(rollout: cp.Rollout, output: Format, *, again: bool) -> None:
    if output in DOCUMENTS:
        write_document(document_of(rollout), output)
        return
    if again:
        plain(out(), f"--- {datetime.now(UTC):%H:%M:%S}")
    show_status(rollout)
