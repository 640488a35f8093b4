"""Queries of the ledger: filters, groups and sums of lines."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from services.controlplane.usage.policy.lines import NOTHING, Amounts, Line, Lines

_DAY_HOURS = 24


class Dimension(StrEnum):
    TENANT = "tenant"
    KEY = "key_id"
    USER = "user"
    MODEL = "model"
    VERSION = "version_digest"


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """What to sum. Empty filters match all."""

    # Hours since the Unix epoch; the end is not included.
    start: int
    end: int
    tenant: str = ""
    key_id: str = ""
    user: str = ""
    model: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    group_by: tuple[Dimension, ...] = ()
    group_by_labels: tuple[str, ...] = ()
    # Hours that a record sums; 0: all of the range.
    hours_each: int = 0

    def matches(self, line: Line) -> bool:
        labels = dict(line.labels)
        return (
            self.tenant in ("", line.tenant)
            and self.key_id in ("", line.key_id)
            and self.user in ("", line.user)
            and self.model in ("", line.model)
            and all(labels.get(name) == value for name, value in self.labels.items())
        )

    def group_of(self, line: Line) -> Line:
        """Return the line with only the dimensions that are grouped by. Its source stays."""
        kept = {name.value: getattr(line, name.value) for name in self.group_by}
        labels = tuple((name, value) for name, value in line.labels if name in self.group_by_labels)
        hour = self.start if not self.hours_each else line.hour - line.hour % self.hours_each
        return Line(hour, labels=labels, source=line.source, **kept)


@dataclass(frozen=True, slots=True)
class UsageRow:
    """``name`` is unique among the rows of a query and sorts by hour."""

    line: Line
    amounts: Amounts

    @property
    def name(self) -> str:
        mark = hashlib.blake2b(repr(self.line).encode(), digest_size=12).hexdigest()
        return f"{self.line.hour:08d}-{mark}"


def add_hour(query: UsageQuery, lines: Lines, rows: dict[Line, Amounts]) -> None:
    """Add the matching lines of one hour to the groups."""
    for line, amounts in lines.items():
        if query.matches(line):
            group = query.group_of(line)
            rows[group] = rows.get(group, NOTHING).plus(amounts)


def rows_of(groups: Lines) -> list[UsageRow]:
    """Return the groups as rows, sorted by name."""
    return sorted((UsageRow(line, amounts) for line, amounts in groups.items()), key=lambda row: row.name)
