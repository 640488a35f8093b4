"""Evaluates the part of PromQL that the rules and dashboards use, over scrapes, without a Prometheus.

``rate`` and ``increase`` take the difference of the first and the last sample within the range and do not
extrapolate. As in Prometheus, a series with one sample has none, and what matches no series is empty.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
_TOKEN: Final = re.compile(
    r'\s*(?:(\d+(?:\.\d+)?(?:e-?\d+)?)|([A-Za-z_:][\w:]*)|("[^"]*")|(\[[^\]]*\])'
    r"|(==|!=|=~|!~|>=|<=|[-+*/(){},=<>]))"
)
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}
_FOLDS: Final[dict[str, Callable[[list[float]], float]]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "count": lambda found: float(len(found)),
}
_COMPARE: Final = {
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
}
_ARITHMETIC: Final = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(slots=True)
class Scrapes:
    """Samples by series, oldest first. ``now_s`` is the time of the newest scrape."""

    now_s: float = 0.0
    series: dict[str, dict[Labels, list[tuple[float, float]]]] = field(default_factory=dict)

    def add(self, text: str, now_s: float, **target: str) -> None:
        """Take a scrape of a target, whose labels are ``job`` and ``instance``."""
        self.now_s = now_s
        self.put("up", target, 1.0)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.put(sample.name, {**sample.labels, **target}, sample.value)

    def put(self, name: str, labels: dict[str, str], value: float) -> None:
        key = frozenset(labels.items())
        self.series.setdefault(name, {}).setdefault(key, []).append((self.now_s, value))


def evaluate(expression: str, scrapes: Scrapes) -> Vector:
    """Return the samples of the expression now. Raises ValueError for what this does not understand."""
    found = _Evaluation(expression, scrapes).whole()
    return found if isinstance(found, dict) else {frozenset(): found}


class _Evaluation:
    def __init__(self, expression: str, scrapes: Scrapes) -> None:
        self._scrapes = scrapes
        self._tokens: list[str] = []
        at = 0
        expression = expression.strip()
        while at < len(expression):
            match = _TOKEN.match(expression, at)
            if match is None:
                raise ValueError(f"not understood: {expression[at:]}")
            self._tokens.append(match.group().strip())
            at = match.end()

    def whole(self) -> Any:
        found = self._or()
        if self._tokens:
            raise ValueError(f"left over: {self._tokens}")
        return found

    def _next(self, expected: str = "") -> str:
        if not self._tokens or (expected and self._tokens[0] != expected):
            raise ValueError(f"{expected or 'something'} expected before {self._tokens}")
        return self._tokens.pop(0)

    def _at(self, *tokens: str) -> bool:
        return bool(self._tokens) and self._tokens[0] in tokens

    def _or(self) -> Any:
        found = self._and()
        while self._at("or"):
            self._next()
            found = {**self._and(), **found}
        return found

    def _and(self) -> Any:
        found = self._compare()
        while self._at("and"):
            self._next()
            other = self._compare()
            found = {labels: value for labels, value in found.items() if labels in other}
        return found

    def _compare(self) -> Any:
        found = self._sum()
        while self._at(*_COMPARE):
            holds, other = _COMPARE[self._next()], self._sum()
            found = {labels: value for labels, value in found.items() if holds(value, other)}
        return found

    def _sum(self) -> Any:
        found = self._product()
        while self._at("+", "-"):
            found = self._joined(self._next(), found, self._product(), frozenset())
        return found

    def _product(self) -> Any:
        found = self._one()
        while self._at("*", "/"):
            sign, ignored = self._next(), frozenset[str]()
            if self._at("ignoring"):
                self._next()
                ignored = frozenset(self._names())
            if self._at("group_left"):
                self._next()
            found = self._joined(sign, found, self._one(), ignored)
        return found

    def _joined(self, sign: str, left: Any, right: Any, ignored: frozenset[str]) -> Any:
        def apply(one: float, other: float) -> float:
            if sign == "/":
                return one / other if other else float("nan")
            return float(_ARITHMETIC[sign](one, other))

        if not isinstance(left, dict) and not isinstance(right, dict):
            return apply(left, right)
        if not isinstance(right, dict):
            return {labels: apply(value, right) for labels, value in left.items()}
        if not isinstance(left, dict):
            return {labels: apply(left, value) for labels, value in right.items()}
        found = {}
        for labels, value in left.items():
            key = frozenset(pair for pair in labels if pair[0] not in ignored)
            if key in right:
                found[labels] = apply(value, right[key])
        return found

    def _names(self) -> list[str]:
        self._next("(")
        found = []
        while not self._at(")"):
            name = self._next()
            if name != ",":
                found.append(name)
        self._next()
        return found

    def _one(self) -> Any:
        token = self._next()
        if token == "(":
            found = self._or()
            self._next(")")
            return found
        if token[0].isdigit():
            return float(token)
        if token[0] == '"':
            return token[1:-1]
        if token in _FOLDS:
            by = self._by()
            (vector,) = self._arguments()
            return self._folded(_FOLDS[token], vector, by if by is not None else self._by() or [])
        if self._at("("):
            return self._called(token, self._arguments())
        return self._selected(token)

    def _by(self) -> list[str] | None:
        if not self._at("by"):
            return None
        self._next()
        return self._names()

    def _arguments(self) -> list[Any]:
        self._next("(")
        found = []
        while not self._at(")"):
            found.append(self._or())
            if self._at(","):
                self._next()
        self._next()
        return found

    def _folded(self, fold: Callable[[list[float]], float], vector: Vector, by: list[str]) -> Vector:
        groups: dict[Labels, list[float]] = {}
        for labels, value in vector.items():
            groups.setdefault(frozenset(pair for pair in labels if pair[0] in by), []).append(value)
        return {labels: float(fold(found)) for labels, found in groups.items()}

    def _called(self, name: str, given: list[Any]) -> Any:
        if name == "vector":
            return {frozenset(): given[0]}
        if name == "clamp_min":
            return {labels: max(value, given[1]) for labels, value in given[0].items()}
        if name == "label_replace" and given[2:5:2] == ["$1", "(.*)"]:
            vector, label, _, source, _ = given
            return {labels | {(label, dict(labels).get(source, ""))}: at for labels, at in vector.items()}
        if name == "absent":
            return {} if given[0] else {frozenset(): 1.0}
        if name in ("rate", "increase"):
            grown = given[0].items()
            return {labels: change / (span if name == "rate" else 1.0) for labels, (change, span, _) in grown}
        if name == "changes":
            return {labels: float(count) for labels, (_, _, count) in given[0].items()}
        if name == "histogram_quantile":
            return _quantiles(*given)
        raise ValueError(f"no function {name}")

    def _selected(self, name: str) -> Any:
        matchers = []
        if self._at("{"):
            self._next()
            while not self._at("}"):
                label, sign, value = self._next(), self._next(), self._next().strip('"')
                matchers.append((label, sign, value))
                if self._at(","):
                    self._next()
            self._next()

        def matches(labels: Labels) -> bool:
            had = dict(labels)
            for label, sign, value in matchers:
                same = (
                    re.fullmatch(value, had.get(label, "")) is not None
                    if sign.endswith("~")
                    else had.get(label, "") == value
                )
                if same is sign.startswith("!"):
                    return False
            return True

        samples = {
            labels: points for labels, points in self._scrapes.series.get(name, {}).items() if matches(labels)
        }
        if not self._tokens or not self._tokens[0].startswith("["):
            now_s = self._scrapes.now_s
            return {labels: points[-1][1] for labels, points in samples.items() if points[-1][0] == now_s}
        window = self._next()[1:-1]
        since_s = self._scrapes.now_s - float(window[:-1]) * _UNITS[window[-1]]
        ranges = {}
        for labels, points in samples.items():
            points = [point for point in points if point[0] >= since_s]
            if len(points) > 1:
                changes = sum(a[1] != b[1] for a, b in itertools.pairwise(points))
                ranges[labels] = (points[-1][1] - points[0][1], points[-1][0] - points[0][0], changes)
        return ranges


def _quantiles(ratio: float, buckets: Vector) -> Vector:
    """Return the upper bound of the bucket in which the quantile lies; exact enough for a threshold."""
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, value in buckets.items():
        key = frozenset(pair for pair in labels if pair[0] != "le")
        groups.setdefault(key, []).append((float(dict(labels)["le"]), value))
    found = {}
    for labels, bounds in groups.items():
        bounds.sort()
        total = bounds[-1][1]
        found[labels] = next((bound for bound, count in bounds if count >= ratio * total), 0.0)
        if not total:
            found[labels] = float("nan")
    return found
