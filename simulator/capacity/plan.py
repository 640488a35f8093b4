"""``python -m simulator capacity``: the nodes that a load needs, by type, and what they cost.

Each type is planned alone; with --mix, the types share the load at the least price. --check compares the plan
with the least workers of a simulated fleet.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from services.controlplane.scaling.policy.placement import FleetPlan, PlanLimits, PresentFleet, plan_fleet
from services.core.estimates.node_need import NodeType, Unfit
from services.core.records import Priority
from simulator.capacity.check import MIXES, check
from simulator.capacity.load import BadLoad, LoadWindow, WantedLatency, rate_class, windows_of
from simulator.capacity.node_plan import CapacityPlan, dearest, plan_type
from simulator.capacity.node_types import SHIPPED, Basis, NodeTypes, read_node_types
from simulator.engine.cost_model import cost_model
from simulator.lab.load.traces import TraceError, read_trace
from simulator.lab.report.table import aligned

HEAD: Final = (
    "type", "bound", "nodes", "prefill", "decode", "headroom", "sequences", "KV holds", "$/h", "$/1M tokens",
)  # fmt: skip
_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|)")


def main(arguments: Sequence[str]) -> int:
    """Run the command; the result is its exit status: 2 for a wrong use or a load that nothing serves."""
    parsed = _parser().parse_args(arguments)
    try:
        if parsed.check:
            return check(list(MIXES), parsed.seed)
        kinds = _types(parsed)
        windows = _windows(parsed)
        if parsed.mix:
            _show_mix(parsed, kinds, dearest(windows, kinds.types))
        else:
            _show_types(parsed, kinds, windows)
    except (BadLoad, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _windows(parsed: argparse.Namespace) -> list[LoadWindow]:
    targets = _targets(parsed)
    if bool(parsed.rates) == (parsed.trace is not None):
        raise BadLoad("--trace, --rates: give one of them: what is planned for is a trace or rates")
    if parsed.rates:
        loads = tuple(rate_class(text, targets) for text in parsed.rates)
        if len({load.name for load in loads}) < len(loads) and not parsed.mix:
            raise BadLoad("--rates: a class is named twice: give its mean, or --mix for several lengths")
        return [LoadWindow(0.0, loads)]
    if targets.keys() - {None}:
        raise BadLoad("--ttft, --itl: a trace has no classes: give one target without CLASS")
    return windows_of(read_trace(parsed.trace), targets.get(None, WantedLatency()), by_length=parsed.mix)


def _targets(parsed: argparse.Namespace) -> dict[Priority | None, WantedLatency]:
    found: dict[str, dict[Priority | None, float]] = {"--ttft": {}, "--itl": {}}
    for flag, texts in (("--ttft", parsed.ttft), ("--itl", parsed.itl)):
        for text in texts:
            name, _, span = text.rpartition(":")
            try:
                priority = Priority(name) if name else None
                value, unit = _SPAN.fullmatch(span).groups()  # type: ignore[union-attr]
            except (ValueError, AttributeError):
                raise BadLoad(f"{flag}: {text}: give [CLASS:]TIME, such as 800ms or batch:60s") from None
            found[flag][priority] = float(value) / (1000.0 if unit == "ms" else 1.0)
    ttfts, itls = found.values()
    return {
        each: WantedLatency(
            ttfts.get(each, ttfts.get(None, math.inf)), itls.get(each, itls.get(None, math.inf))
        )
        for each in dict.fromkeys([*ttfts, *itls])
    }


def _types(parsed: argparse.Namespace) -> NodeTypes:
    if parsed.preset and (parsed.node_types is not None or parsed.mix):
        raise BadLoad("--preset: it names one node without a price: not with --node-types or --mix")
    if not 1 <= parsed.zones <= 64:
        raise BadLoad(f"--zones: {parsed.zones}: 1 to 64")
    if parsed.now and not parsed.mix:
        raise BadLoad("--now: only a plan of several types starts from present nodes: add --mix")
    if not parsed.preset:
        return read_node_types(parsed.node_types or SHIPPED).only(parsed.types)
    if parsed.types:
        raise BadLoad("--types: it chooses from --node-types, --preset names one node: give one of them")
    try:
        return NodeTypes((NodeType(parsed.preset, cost_model(parsed.preset)),), {}, {})
    except ValueError as error:
        raise BadLoad(f"--preset: {error}") from None


def _present(texts: Sequence[str], kinds: NodeTypes) -> PresentFleet:
    nodes = {}
    for text in texts:
        name, _, count = text.partition("=")
        if not count.isdecimal() or name not in {kind.name for kind in kinds.types}:
            raise BadLoad(f"--now: {text}: give TYPE=NODES with one of the planned types")
        nodes[name] = int(count)
    return PresentFleet(nodes)


def _show_types(parsed: argparse.Namespace, kinds: NodeTypes, windows: Sequence[LoadWindow]) -> None:
    found = {kind.name: plan_type(kind, windows, parsed.zones) for kind in kinds.types}
    plans = [plan for plan in found.values() if isinstance(plan, CapacityPlan)]
    unfit = {name: plan for name, plan in found.items() if isinstance(plan, Unfit)}
    if not plans:
        field = next(iter(unfit.values())).field
        flag = "--node-types" if field == "kv" else f"--{field}"
        raise BadLoad(f"{flag}: no type serves it: " + "; ".join(f"{n}: {u.text}" for n, u in unfit.items()))
    if parsed.output == "json":
        document = {"plans": list(map(asdict, plans)), "unfit": {n: asdict(u) for n, u in unfit.items()}}
        print(json.dumps({**document, "zones": parsed.zones, "basis": kinds.basis}, indent=1))
        return
    print("\n".join(aligned([HEAD, *map(_cells, plans)])))
    for name, why in unfit.items():
        print(f"{name} cannot: {why.text}")
    print("\n".join(_assumed(kinds)))


def _cells(plan: CapacityPlan) -> tuple[str, ...]:
    prices = (plan.price_per_h, plan.price_per_1m_tokens)
    sizes = (plan.prefill_nodes, plan.decode_nodes, plan.headroom_nodes)
    return (
        plan.node_type,
        plan.bound.value,
        str(plan.nodes),
        *(f"{size:.2f}" for size in sizes),
        *(f"{count:.0f}" for count in (plan.sequences, plan.kv_sequences)),
        *("-" if price is None else f"{price:.2f}" for price in prices),
    )


def _assumed(kinds: NodeTypes) -> Iterator[str]:
    """Yield a line for the types whose same figures are assumed."""
    groups: dict[str, list[str]] = {}
    for name, figures in kinds.basis.items():
        assumed = ", ".join(figure for figure, basis in figures.items() if basis is Basis.ASSUMED)
        groups.setdefault(assumed, []).append(name)
    for assumed, names in groups.items():
        yield f"{', '.join(names)}: assumed are {assumed or 'none'}"


def _show_mix(parsed: argparse.Namespace, kinds: NodeTypes, window: LoadWindow) -> None:
    limits = PlanLimits(zones=parsed.zones)
    plan = plan_fleet(window.loads, kinds.types, _present(parsed.now, kinds), limits)
    if isinstance(plan, Unfit):
        raise BadLoad(f"--mix: {plan.field}: {plan.text}")
    if parsed.output == "json":
        print(json.dumps({**_document(plan), "zones": parsed.zones, "basis": kinds.basis}, indent=1))
        return
    rows = [(name, str(count)) for name, count in plan.nodes.items()]
    print("\n".join(aligned([("type", "nodes"), *rows], left=1)))
    gap = f", at most {plan.gap_ratio:.1%} above the cheapest" if plan.gap_ratio else ""
    moves = f", {plan.moves} moves" if parsed.now else ""
    print(f"${plan.price_per_h:.2f} per hour{moves}{gap}. {plan.note}".rstrip())
    for name in plan.choices:
        print(f"{name}: {plan.explain(name)}")
    print("\n".join(_assumed(kinds)))


def _document(plan: FleetPlan) -> dict[str, Any]:
    shares = [{"load": load, "type": kind, "ratio": ratio} for (load, kind), ratio in plan.shares.items()]
    return {**asdict(plan), "shares": shares, "explain": {name: plan.explain(name) for name in plan.choices}}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulator capacity", description=__doc__)
    parser.add_argument("--trace", type=Path, help="an Azure or Mooncake trace: its peak is planned for")
    parser.add_argument("--rates", action="append", default=[], metavar="CLASS:RATE:PROMPT:OUTPUT[:CACHED]")
    parser.add_argument("--node-types", type=Path, help="a file of node types; else the shipped one")
    parser.add_argument("--types", action="append", default=[], help="only this type of the file; repeatable")
    parser.add_argument("--preset", default="", help="a cost model by name, or a file of fairway calibrate")
    parser.add_argument("--zones", type=int, default=1, help="zones, one of which may be lost")
    parser.add_argument("--ttft", action="append", default=[], metavar="[CLASS:]TIME")
    parser.add_argument("--itl", action="append", default=[], metavar="[CLASS:]TIME")
    parser.add_argument("--mix", action="store_true", help="share the load over several types")
    parser.add_argument("--now", action="append", default=[], metavar="TYPE=NODES", help="present nodes")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--check", action="store_true", help="compare plans with simulated fleets; minutes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the check's traces")
    return parser
