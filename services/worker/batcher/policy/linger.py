"""How long a batch may wait for more rows, and whether waiting pays. Pure.

**Bound.** A row has its latency target, from its arrival to its answer; the one that is due first bounds the
batch. What is left of it after the computation (the measured quantile at the size that the batch reaches by
then, given the arrival rate) and the transport (as observed) is the most that the batch may linger. A
deadline of a client bounds it alike.

**Whether waiting pays.** While the device is busy, rows gather at no cost. So the question arises for an
idle device only, with ``n`` rows waiting, a batch of which takes ``c(n)``. It waits in two cases.

1. *Rows that come back.* A closed loop sends its next rows when it receives answers, so rows crowd after the
   end of a batch. Its latency is (clients / throughput - their own time), by Little's law, and so is least
   at the highest throughput. If ``R`` rows are on their way back, starting at once answers ``n + R`` rows in
   two batches, ``c(n) + c(R)``, with no idle time; a batch of the ``n`` alone has the rate ``n / c(n)``.
   Waiting ``w`` seconds, by which ``A`` of them are back, answers ``n + A`` rows in ``w + c(n + A)``. The
   device waits while that is more than the better of the other two by ``GAIN_RATIO``, for the ``w`` at which
   it is highest: one batch less must be worth more than the idle time. Open arrivals are left out: they go
   on while the device computes, and so fill the next batch anyway.
2. *The next open row.* It is expected after ``t = 1 / rate`` seconds. Started now, the batch answers the
   ``n`` rows after ``c(n)``, and the next one after ``c(n) + c(1)``. Started with it, it answers all after
   ``t + c(n + 1)``. The sum of latencies is less if ``c(n) + c(1) - c(n + 1) - t > n * (t + c(n + 1) -
   c(n))``, that is if ``(n + 1) * t < c(n) + c(1) - c(n + 1) - n * (c(n + 1) - c(n))``. Gaps without memory
   make this a threshold for ``n``, as the optimal control of a batch server is (Deb and Serfozo, 1973).

In every other case an idle device starts at once: waiting cannot pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.core.fixed_cost.rows import BatchWindow
from services.worker.batcher.policy.cost_curve import CostCurve

GAIN_RATIO: Final = 0.02  # more throughput, for which a device waits
_ROUNDS: Final = 4  # rounds of the search for the size that a batch reaches


@dataclass(frozen=True, slots=True)
class BatchObjective:
    """What answers have to meet. A row whose model and class have an objective has that latency instead."""

    latency_s: float = 0.05  # seconds from a row's arrival to its answer
    level: float = 0.99  # share of the rows that must be answered by then


@dataclass(frozen=True, slots=True)
class Expected:
    """What is expected to arrive, of the rows that may join one batch."""

    rate_per_s: float = 0.0  # rate of open arrivals
    returning: tuple[tuple[float, float], ...] = ()  # seconds from now, rows that are back by then


@dataclass(frozen=True, slots=True)
class LingerBound:
    """The most that a batch may wait from now on, and what it was derived from."""

    linger_s: float  # negative: it is late
    objective_s: float  # what is left of it to the row due first
    compute_s: float
    transport_s: float
    rows: int  # rows that the batch reaches


def linger_bound(
    curve: CostCurve,
    *,
    width: int,
    rows: int,
    most_rows: int,
    left_s: float,
    transport_s: float,
    expected: Expected,
    level: float,
) -> LingerBound:
    """Return the bound for a batch whose row due first has ``left_s`` seconds to its answer."""
    reached, linger_s, compute_s = rows, 0.0, 0.0
    for _ in range(_ROUNDS):
        compute_s = curve.quantile_s(width, reached, level)
        linger_s = left_s - compute_s - transport_s
        more = expected.rate_per_s * max(0.0, linger_s)
        size = int(min(most_rows, rows + more))
        if size == reached:
            break
        reached = size
    return LingerBound(linger_s, left_s, compute_s, transport_s, reached)


def window_of(width: int, bound: LingerBound, expected: Expected, target_s: float) -> BatchWindow:
    """Return what explains the bound of a batch that started. ``target_s`` is that of its row due first."""
    return BatchWindow(
        width=width,
        linger_s=bound.linger_s,
        objective_s=bound.objective_s,
        compute_s=bound.compute_s,
        transport_s=bound.transport_s,
        reached_rows=bound.rows,
        rate_per_s=expected.rate_per_s,
        returning_rows=expected.returning[-1][1] if expected.returning else 0.0,
        target_s=target_s,
    )


def worthwhile_wait_s(
    curve: CostCurve, *, width: int, rows: int, most_rows: int, expected: Expected
) -> float:
    """Return how long an idle device does well to wait; 0: it starts at once."""
    if rows >= most_rows:
        return 0.0
    wait_s = _for_returning(curve, width, rows, most_rows, expected.returning)
    return wait_s or _for_the_next(curve, width, rows, expected.rate_per_s)


def _for_returning(
    curve: CostCurve, width: int, rows: int, most_rows: int, returning: Sequence[tuple[float, float]]
) -> float:
    if not returning or returning[-1][1] < 1.0:
        return 0.0
    all_back, alone_s = returning[-1][1], curve.mean_s(width, rows)
    in_two_per_s = (rows + all_back) / (alone_s + curve.mean_s(width, all_back))
    best_per_s, best_s = (1.0 + GAIN_RATIO) * max(rows / alone_s, in_two_per_s), 0.0
    for wait_s, back in returning:
        size = min(float(most_rows), rows + back)
        per_s = size / (wait_s + curve.mean_s(width, size))
        if per_s > best_per_s:
            best_per_s, best_s = per_s, wait_s
    return best_s


def _for_the_next(curve: CostCurve, width: int, rows: int, rate_per_s: float) -> float:
    if rate_per_s <= 0.0:
        return 0.0
    next_s = 1.0 / rate_per_s
    now_s, with_next_s = curve.mean_s(width, rows), curve.mean_s(width, rows + 1)
    shared_s = now_s + curve.mean_s(width, 1) - with_next_s
    return next_s if (rows + 1) * next_s < shared_s - rows * (with_next_s - now_s) else 0.0
