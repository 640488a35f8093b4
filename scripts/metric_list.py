"""The metrics that the services register, read from their source: name, type, description and labels.

The source is parsed and not run, so a metric is found whether or not a process would register it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector

ROOT: Final = Path(__file__).parents[1]
ALL: Final = "all"
_TYPES: Final = {
    "counter": "counter",
    "counted": "counter",
    "gauge": "gauge",
    "level": "gauge",
    "histogram": "histogram",
}
_LABELS_AT: Final = {"counter": 2, "histogram": 2, "gauge": 3, "counted": 3, "level": 99}
_UNITS: Final = ("seconds", "bytes", "tokens", "ratio")
# By the folder of the module that registers it: the role that exports it. The longest prefix holds.
_ROLES: Final = {
    "runtime/": ALL,
    "rpc/": ALL,
    "app/": ALL,
    "gateway/": "gateway",
    "app/roles/gateway": "gateway",
    "adapters/quotas/": "gateway",
    "scheduler/": "scheduler",
    "worker/": "worker",
    "app/roles/worker": "worker",
    "app/roles/shared": "worker",
    "registry/": "registry",
    "adapters/blobs/": "registry",
    "adapters/usage/": "gateway and worker",
    "controlplane/": "controlplane",
}
_Values = dict[str, ast.expr]


@dataclass(frozen=True, slots=True)
class MetricEntry:
    """One metric. ``role`` is the role that exports it, "all", or roles with "and" between them."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...]
    role: str

    @property
    def unit(self) -> str:
        stem = self.name.removesuffix("_total")
        return next((unit for unit in _UNITS if stem.endswith("_" + unit)), "count")


def metric_list() -> list[MetricEntry]:
    """Return every metric, ordered by role and name. Raises ValueError for one that cannot be read."""
    found = list(_of_processes())
    services = ROOT / "services"
    for path in sorted(services.rglob("*.py")):
        text = path.read_text("utf-8")
        if '"fairway_' in text:
            role = _role_of(path.relative_to(services).as_posix())
            found += [MetricEntry(*parts, role) for parts in registrations(text)]
    return sorted(found, key=lambda metric: (metric.role, metric.name))


def registrations(source: str) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Yield (name, type, description, labels) of each instrument that a module registers.

    A loop over a constant of the module registers one per row.
    """
    tree = ast.parse(source)
    known = _assigned(tree)
    rows: dict[ast.AST, list[_Values]] = {}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.For)
            and isinstance(node.iter, ast.Name)
            and isinstance(node.target, ast.Tuple)
        ):
            names = [each.id for each in node.target.elts if isinstance(each, ast.Name)]
            table = known.get(node.iter.id)
            loops = [
                dict(zip(names, row.elts, strict=True))
                for row in (table.elts if isinstance(table, ast.Tuple) else ())
                if isinstance(row, ast.Tuple)
            ]
            rows.update((inside, loops) for inside in ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TYPES:
            for row in rows.get(node, [{}]):
                if (entry := _entry(node, {**known, **row})) is not None:
                    yield entry


def _entry(call: ast.Call, known: _Values) -> tuple[str, str, str, tuple[str, ...]] | None:
    assert isinstance(call.func, ast.Attribute)
    name = _value(call.args[0], known) if call.args else None
    if not isinstance(name, str) or not name.startswith("fairway_"):
        return None
    text = _value(call.args[1], known)
    at = _LABELS_AT[call.func.attr]
    labels = _value(call.args[at], known) if len(call.args) > at else ()
    if not isinstance(text, str) or not isinstance(labels, tuple):
        raise ValueError(f"{name}: write its description and labels as constants")
    return name, _TYPES[call.func.attr], text, tuple(sorted(map(str, labels)))


def _assigned(tree: ast.AST) -> _Values:
    found: _Values = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found[node.target.id] = node.value
    return found


def _value(node: ast.expr, known: _Values) -> object:
    if isinstance(node, ast.Name):
        return _value(known[node.id], {}) if node.id in known else None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _role_of(path: str) -> str:
    matching = [prefix for prefix in _ROLES if path.startswith(prefix)]
    if not matching:
        raise ValueError(f"services/{path} registers a metric: name the role that exports it in {__file__}")
    return _ROLES[max(matching, key=len)]


def _of_processes() -> Iterator[MetricEntry]:
    """Yield what prometheus_client exports of a process. Needs /proc."""
    for family in ProcessCollector(namespace="fairway", registry=CollectorRegistry()).collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        yield MetricEntry(name, family.type, family.documentation, (), ALL)
