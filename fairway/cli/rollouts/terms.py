"""The options of `fairway rollouts start`, as the message that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from google.protobuf.duration_pb2 import Duration

from fairway.cli.connection import OptionGroup
from fairway.cli.flags import key_values, span_s
from fairway.v1 import controlplane_pb2 as cp


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


def _span(flag: str, help_: str) -> object:
    return Annotated[float | None, typer.Option(flag, parser=span_s, metavar="SPAN", help=help_)]


def _several(flag: str, metavar: str, help_: str) -> object:
    return Annotated[list[str] | None, typer.Option(flag, metavar=metavar, help=f"{help_} Repeatable.")]


TERMS: Final = OptionGroup(
    "terms",
    "",
    {
        "steps": Annotated[
            str | None, typer.Option("--steps", help="Percentages of a canary. Default: 1,5,25,50,100.")
        ],
        "hold": _span("--hold", "Shortest time of each step. Default: 1m."),
        "min_requests": Annotated[
            int | None,
            typer.Option("--min-requests", min=1, help="Of each arm, before it is judged. Default: 100."),
        ],
        "soak": _span("--soak", "With all traffic, judged, while the version before is warm. Default: 5m."),
        "load_timeout": _span("--load-timeout", "To load the versions of a step. Default: 15m."),
        "by_worker": Annotated[
            bool | None,
            typer.Option(
                "--by-worker",
                help="Take the stable version's workers one at a time, also where both versions fit.",
            ),
        ],
        "fraction": Annotated[
            float | None,
            typer.Option("--fraction", min=0, max=100, help="Percentage of requests that a shadow copies."),
        ],
        "shadow_concurrency": Annotated[
            int | None,
            typer.Option("--shadow-concurrency", min=1, help="Copies at once on a gateway. Default: 8."),
        ],
        "allow_tenant": _several("--allow-tenant", "TENANT", "Only these tenants take part."),
        "deny_tenant": _several("--deny-tenant", "TENANT", "This tenant stays on the stable version."),
        "override": _several("--override", "TENANT=ARM", "The arm of a tenant."),
        "class_cap": _several(
            "--class-cap", "CLASS=PERCENT", "Largest share for tenants of this highest class."
        ),
        "refuse_pins": Annotated[
            bool | None, typer.Option("--refuse-pins", help="Requests may not name a version.")
        ],
        "metric": _several("--metric", "METRIC", "Judge only this metric, such as ttft_p95 or cost."),
        "min_sessions": Annotated[
            int | None,
            typer.Option("--min-sessions", min=1, help="Of each arm, before it is judged. Default: 30."),
        ],
        "patience": _span("--patience", "For a verdict, after a step's hold. Default: 10m."),
        "inconclusive": Annotated[
            InconclusiveName | None,
            typer.Option("--inconclusive", help="What happens without a verdict. Default: wait."),
        ],
        "max_engine_restarts": Annotated[
            int | None,
            typer.Option(
                "--max-engine-restarts", min=0, help="Crashes that roll back; 0: no bound. Default: 7."
            ),
        ],
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
    for field in ("soak", "load_timeout"):
        if field in terms:
            getattr(rollout, field).CopyFrom(_duration(terms[field]))
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
            step.hold.CopyFrom(_duration(terms["hold"]))
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
        gate.patience.CopyFrom(_duration(terms["patience"]))
    if "inconclusive" in terms:
        gate.inconclusive = terms["inconclusive"].proto
    if "max_engine_restarts" in terms:
        gate.max_engine_restarts = terms["max_engine_restarts"]
    gate.accepted.update(key_values(terms.get("accept"), flag="--accept"))


def _duration(seconds: float) -> Duration:
    found = Duration()
    found.FromMicroseconds(round(seconds * 1e6))
    return found
