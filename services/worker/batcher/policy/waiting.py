"""The rows that wait for a batch: bounded, by deadline, and while tenants share the device by their turns.

Pure.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.core.errors import DeadlineUnmeetable, FairwayError, QueueFull
from services.worker.batcher.policy.batch_key import BatchKey
from services.worker.batcher.policy.cost_curve import CostCurve
from services.worker.batcher.policy.start import BatchLimits, StartCause, WaitingGroup

MOST_WAITING: Final = 4096  # rows


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """One row. ``number`` counts arrivals; times are of one monotonic clock."""

    number: int
    tenant: str
    key: BatchKey
    width: int  # the padded width of its bucket
    arrived_s: float
    answer_by_s: float  # instant at which it is due by its latency target
    target_s: float  # the latency target
    deadline_s: float = float("inf")  # instant at which the client stops waiting
    input_bytes: int = 0
    weight: float = 1.0  # the tenant's share of the device

    @property
    def due_s(self) -> float:
        """By the target or the client's deadline, whichever is earlier: the order."""
        return min(self.answer_by_s, self.deadline_s)


Tags = Mapping[int, float]  # start tags of ``turns`` by row: the order while tenants share the device
_Group = tuple[BatchKey, int]
_Entry = tuple[float, int, WaitingRow]


class WaitingRows:
    """Single writer."""

    def __init__(self, most_rows: int = MOST_WAITING) -> None:
        self._most_rows = most_rows
        self._groups: dict[_Group, list[_Entry]] = {}
        self._places: dict[int, WaitingRow] = {}
        self._of_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    @property
    def tenants(self) -> Collection[str]:
        """The tenants with rows that wait."""
        return self._of_tenant.keys()

    def numbers(self) -> tuple[int, ...]:
        return tuple(self._places)

    def least_target_s(self, most_s: float) -> float:
        """Return the least latency target of the rows, at most ``most_s``."""
        return min([most_s, *(row.target_s for row in self._places.values())])

    def add(
        self,
        row: WaitingRow,
        curve: CostCurve,
        limits: BatchLimits,
        *,
        now_s: float,
        busy_until_s: float = 0.0,
        transport_s: float = 0.0,
    ) -> FairwayError | None:
        """Add the row, or return why it is not: the queue is full, or its deadline cannot be met."""
        if len(self) >= self._most_rows:
            return QueueFull(f"{self._most_rows} rows wait on this worker")
        if row.deadline_s != float("inf"):
            start_s = max(0.0, busy_until_s - now_s) + self._ahead_s(row, curve, limits)
            predicted_s = start_s + curve.mean_s(row.width, 1) + transport_s
            if now_s + predicted_s > row.deadline_s:
                return DeadlineUnmeetable(
                    f"the row would be answered in {predicted_s:.3f} s; "
                    f"the deadline is in {row.deadline_s - now_s:.3f} s"
                )
        insort(self._groups.setdefault((row.key, row.width), []), (row.due_s, row.number, row))
        self._places[row.number] = row
        self._of_tenant[row.tenant] += 1
        return None

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove rows that run, or were cancelled; others are ignored."""
        for number in numbers:
            if (row := self._places.pop(number, None)) is None:
                continue
            self._of_tenant[row.tenant] -= 1
            if not self._of_tenant[row.tenant]:
                del self._of_tenant[row.tenant]
            place = (row.key, row.width)
            entries = self._groups[place]
            del entries[bisect_left(entries, (row.due_s, number))]
            if not entries:
                del self._groups[place]

    def unmeetable(self, curve: CostCurve, *, now_s: float, transport_s: float = 0.0) -> list[WaitingRow]:
        """Return the rows whose deadline passes before a batch with them could end, if it started now."""
        found = []
        for (_, width), entries in self._groups.items():
            least_s = now_s + curve.mean_s(width, 1) + transport_s
            found += [row for _, _, row in entries if row.deadline_s < least_s]
        return found

    def by_due(self) -> list[WaitingRow]:
        """Return all rows by due time."""
        return [row for _, _, row in heapq.merge(*self._groups.values(), key=lambda entry: entry[:2])]

    def groups(self, tags: Tags | None = None) -> Iterator[tuple[BatchKey, WaitingGroup]]:
        """Yield all groups, the one with the earliest due row first, or with the least tag."""

        def first(item: tuple[_Group, list[_Entry]]) -> tuple[float, float, int]:
            due_s, number, _ = item[1][0]
            least = 0.0 if tags is None else min(tags[row.number] for _, _, row in item[1])
            return least, due_s, number

        for (key, width), entries in sorted(self._groups.items(), key=first):
            yield key, _group_of([row for _, _, row in entries], width)

    def mixed_groups(self, width_of: Callable[[float], int]) -> Iterator[tuple[BatchKey, WaitingGroup]]:
        """Yield one group of each key, of all widths, the one with the earliest due row first.

        ``width_of``: the width that stands for rows of this mean width.
        """
        found: dict[BatchKey, list[list[_Entry]]] = {}
        for (key, _), entries in self._groups.items():
            found.setdefault(key, []).append(entries)
        for key, parts in sorted(found.items(), key=lambda item: min(part[0][:2] for part in item[1])):
            rows = [row for part in parts for _, _, row in part]
            tokens = sum(row.width for row in rows)
            yield key, _group_of(rows, width_of(tokens / len(rows)), mixed=True, tokens=tokens)

    def select(
        self,
        key: BatchKey,
        width: int | None,
        rows: int,
        tags: Tags | None = None,
        *,
        without: Collection[str] = (),
    ) -> list[WaitingRow]:
        """Return up to ``rows`` rows of a group by tag, then by deadline.

        ``width`` None selects rows of all widths. Rows of the tenants in ``without`` are left out.
        """
        found = [row for _, _, row in self._entries_of(key, width) if row.tenant not in without]
        if tags is not None:
            found.sort(key=lambda row: tags[row.number])
        return found[:rows]

    def _entries_of(self, key: BatchKey, width: int | None) -> Iterable[_Entry]:
        if width is not None:
            return self._groups.get((key, width), ())
        parts = [entries for (of, _), entries in self._groups.items() if of == key]
        return heapq.merge(*parts, key=lambda entry: entry[:2])

    def check_integrity(self) -> None:
        """Every row stands in its group, in order, once."""
        rows = [row for entries in self._groups.values() for _, _, row in entries]
        assert sorted(row.number for row in rows) == sorted(self._places), "rows are lost or doubled"
        assert Counter(row.tenant for row in rows) == self._of_tenant, "the counts of tenants are wrong"
        for (key, width), entries in self._groups.items():
            assert entries, "an empty group stays"
            assert entries == sorted(entries, key=lambda entry: entry[:2]), "a group is out of order"
            assert all((row.key, row.width) == (key, width) for _, _, row in entries), "a row is misplaced"

    def _ahead_s(self, row: WaitingRow, curve: CostCurve, limits: BatchLimits) -> float:
        """Return the time of the batches that start before one with this row does."""
        ahead_s = 0.0
        for (key, width), entries in self._groups.items():
            most, _ = limits.rows_at(width)
            earlier = bisect_left(entries, (row.due_s, row.number))
            batches, rest = divmod(earlier, most)
            ahead_s += batches * curve.mean_s(width, most)
            if rest and (key, width) != (row.key, row.width):  # it joins the last one of its own group
                ahead_s += curve.mean_s(width, rest)
        return ahead_s


def mean_width(rows: Sequence[WaitingRow]) -> float:
    return sum(row.width for row in rows) / len(rows)


def fitting(
    rows: Sequence[WaitingRow], limits: BatchLimits, *, others: int = 0, other_tokens: int = 0
) -> tuple[int, StartCause | None]:
    """Return how many of the first rows fit a batch by what each of them has, and which budget leaves the
    next one out; None: all fit.

    At least one fits, unless ``others`` share the memory with the batch: rows with so many tokens.
    """
    tokens, size = other_tokens, 0
    for count, row in enumerate(rows):
        tokens += row.width
        size += row.input_bytes
        cause = limits.exceeded(count + others + 1, tokens, size)
        if cause is not None and count + others:
            return count, cause
    return len(rows), None


def _group_of(
    rows: Sequence[WaitingRow], width: int, *, mixed: bool = False, tokens: int = 0
) -> WaitingGroup:
    oldest_s, deadline_s = min(row.arrived_s for row in rows), min(row.deadline_s for row in rows)
    first = min(rows, key=lambda row: row.answer_by_s)
    return WaitingGroup(
        width,
        len(rows),
        oldest_s,
        first.answer_by_s,
        first.target_s,
        deadline_s,
        mixed,
        tokens,
        sum(row.input_bytes for row in rows),
    )
