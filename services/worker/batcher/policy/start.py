"""When an idle device starts a batch, and why; and which rows run between the layers of a long one. Pure.

Every batch records its cause.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from services.worker.batcher.policy.arrival_profile import LEAST_WAIT_S
from services.worker.batcher.policy.cost_curve import CostCurve
from services.worker.batcher.policy.linger import (
    Expected,
    LingerBound,
    linger_bound,
    worthwhile_wait_s,
)

MOST_ROWS: Final = 100
MOST_PADDED_TOKENS: Final = 16_384
MOST_BATCH_BYTES: Final = 32 * 1024 * 1024  # most bytes of one batch's inputs
TURN_LOSS_RATIO: Final = 0.1  # share of a device's throughput that shorter turns of tenants may cost


class StartCause(StrEnum):
    """Why a batch started."""

    FULL = "full"  # the batch may have no more rows
    TOKENS = "tokens"  # one row more would exceed the budget of padded tokens
    MEMORY = "memory"  # one row more would exceed the memory
    BYTES = "bytes"  # one row more would exceed the bytes of inputs
    LINGER = "linger"  # the objective leaves no time to wait
    DEADLINE = "deadline"  # a client's deadline leaves no time to wait
    IDLE = "idle"  # the device is idle and waiting does not pay
    DRAIN = "drain"  # nothing new arrives
    TURN = "turn"  # one row more would let other tenants wait for too long
    BETWEEN = "between"  # it runs between the layers of another tenant's batch


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one batch may have at most. 0: no such limit."""

    rows: int = MOST_ROWS
    padded_tokens: int = 0
    memory_bytes: int = 0
    # Working memory of a batch, measured when the model was loaded.
    row_bytes: int = 0
    token_bytes: int = 0
    # Most bytes of one batch's inputs.
    input_bytes: int = 0

    def rows_at(self, width: int) -> tuple[int, StartCause]:
        """Return the most rows of this width, at least 1, and which limit it is."""
        return self.rows_like(1, width, 0)

    def rows_like(self, rows: int, tokens: int, input_bytes: int) -> tuple[int, StartCause]:
        """Return the most rows like these, at least 1, and which limit it is.

        These ``rows`` have so many padded tokens and bytes of inputs in all. A batch of all of them is within
        the limits if the answer is at least ``rows``.
        """
        found, cause = self.rows, StartCause.FULL
        for budget, used, limit in self._budgets(rows, tokens, input_bytes):
            if budget and used and budget * rows // used < found:
                found, cause = budget * rows // used, limit
        return max(1, found), cause

    def exceeded(self, rows: int, tokens: int, input_bytes: int) -> StartCause | None:
        """Return the budget that a batch of so many rows, tokens and bytes in all exceeds; None: none."""
        for budget, used, limit in self._budgets(rows, tokens, input_bytes):
            if budget and used > budget:
                return limit
        return None

    def _budgets(self, rows: int, tokens: int, input_bytes: int) -> tuple[tuple[int, int, StartCause], ...]:
        """Return each budget, what these rows use of it, and the cause that names it."""
        return (
            (self.padded_tokens, tokens, StartCause.TOKENS),
            (self.memory_bytes, rows * self.row_bytes + tokens * self.token_bytes, StartCause.MEMORY),
            (self.input_bytes, input_bytes, StartCause.BYTES),
        )


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """Rows of one key, at least one, of one width or of all."""

    width: int  # the padded width in tokens; for mixed widths, their mean
    rows: int
    oldest_s: float  # arrival of the oldest
    answer_by_s: float  # the earliest instant at which a row is due by its own latency target
    target_s: float  # latency target of the row that is due first
    deadline_s: float = float("inf")  # the earliest of the clients
    mixed: bool = False  # whether the rows have different widths
    tokens: int = 0  # sum of the tokens of mixed rows
    input_bytes: int = 0  # sum of the rows' inputs


@dataclass(frozen=True, slots=True)
class Device:
    """What holds for all groups of an idle device."""

    curve: CostCurve
    limits: BatchLimits
    level: float = 0.99  # share of the rows that must be answered in time
    transport_s: float = 0.0  # seconds that an answer travels, as observed at that level
    draining: bool = False
    turn_s: float = math.inf  # what a batch of several rows may take

    def rows_at(self, width: int) -> tuple[int, StartCause]:
        """Return the most rows of this width, at least 1, and which limit it is."""
        return self._within_turn(width, *self.limits.rows_at(width))

    def rows_of(self, group: WaitingGroup) -> tuple[int, StartCause]:
        """Return the most rows like those of the group, at least 1, and which limit it is."""
        tokens = group.tokens if group.mixed else group.width * group.rows
        return self._within_turn(group.width, *self.limits.rows_like(group.rows, tokens, group.input_bytes))

    def _within_turn(self, width: int, most: int, cause: StartCause) -> tuple[int, StartCause]:
        if most == 1 or self.turn_s == math.inf:
            return most, cause
        turn = self._turn_rows(width, most)
        return (turn, StartCause.TURN) if turn < most else (most, cause)

    def _turn_rows(self, width: int, most: int) -> int:
        """Return the rows of a turn: no more than make a row cost ``TURN_LOSS_RATIO`` above the least.

        The rows of other tenants wait for its end.
        """

        def row_s(size: int) -> float:
            return self.curve.mean_s(width, size) / size

        def mean_s(size: int) -> float:
            return self.curve.mean_s(width, size)

        within = 1 + bisect_right(range(2, most + 1), self.turn_s, key=mean_s)
        enough_s = (1 + TURN_LOSS_RATIO) * row_s(within)
        return 1 + bisect_left(range(1, within), True, key=lambda size: row_s(size) <= enough_s)

    def row_s(self, width: int) -> float:
        """Return the seconds of one row in a batch of the most rows."""
        most, _ = self.rows_at(width)
        return self.curve.mean_s(width, most) / most


@dataclass(frozen=True, slots=True)
class Start:
    """Start a batch of the group's first ``rows`` rows."""

    rows: int
    cause: StartCause
    bound: LingerBound


@dataclass(frozen=True, slots=True)
class Linger:
    """Decide again at ``until_s``, or when a row arrives."""

    until_s: float
    bound: LingerBound


def decide(group: WaitingGroup, device: Device, expected: Expected, now_s: float) -> Start | Linger:
    """Return whether an idle device starts a batch of this group now."""
    most, limit = device.rows_of(group)
    rows = min(group.rows, most)
    bound = linger_bound(
        device.curve,
        width=group.width,
        rows=rows,
        most_rows=most,
        left_s=min(group.answer_by_s, group.deadline_s) - now_s,
        transport_s=device.transport_s,
        expected=expected,
        level=device.level,
    )
    if group.rows >= most:
        return Start(rows, limit, bound)
    if device.draining:
        return Start(rows, StartCause.DRAIN, bound)
    if bound.linger_s < LEAST_WAIT_S:
        late = StartCause.DEADLINE if group.deadline_s < group.answer_by_s else StartCause.LINGER
        return Start(rows, late, bound)
    wait_s = worthwhile_wait_s(device.curve, width=group.width, rows=rows, most_rows=most, expected=expected)
    if wait_s <= 0.0:
        return Start(rows, StartCause.IDLE, bound)
    return Linger(now_s + min(wait_s, bound.linger_s), bound)


@dataclass(frozen=True, slots=True)
class LongBatch:
    """A batch that runs, between whose layers rows of other tenants may run.

    Such a row waits for one layer in place of the batch's end, and delays the batch by what it takes itself.
    ``whole_s`` is its predicted time without others, ``left_s`` what is left of it.

    ``lent_s``: what batches between its layers were predicted to take so far.
    """

    rows: int
    whole_s: float
    left_s: float
    lent_s: float

    @property
    def most_s(self) -> float:
        """What a batch between its layers may take; 0: there is no time for one.

        All of them take no longer than the batch itself, whose tenant keeps half of the device. One that
        takes longer than what is left would be answered earlier after the end.
        """
        return max(0.0, min(self.left_s, self.whole_s - self.lent_s))

    def rows_between(self, curve: CostCurve, *, width: int, rows: int) -> int:
        """Return how many of so many rows to run between its layers; 0: none, that does not pay.

        It pays where it lowers the sum of the latencies of these rows and those of the batch.
        """
        count = bisect_right(range(1, rows + 1), self.most_s, key=lambda size: curve.mean_s(width, size))
        if not count or self.rows * curve.mean_s(width, count) >= count * self.left_s:
            return 0
        return count
