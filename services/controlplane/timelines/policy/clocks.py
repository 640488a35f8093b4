"""Correction of a host's clock from what is known about one request.

An outer interval on the reference clock encloses an inner one on the host's: the request was sent before it
arrived, and answered after it was computed. As in NTP (RFC 5905, section 8) half the difference of both ends
is the estimate of the offset, and half the time outside of the host bounds its error.
"""

from __future__ import annotations

from typing import NamedTuple


class Interval(NamedTuple):
    """Microseconds of one clock."""

    start_us: int
    end_us: int


class Correction(NamedTuple):
    """What is added to a host's times. Within ``error_us`` clocks agree, and ``offset_us`` is 0."""

    offset_us: int
    error_us: int


def correction_of(outer: Interval, inner: Interval) -> Correction:
    """Return what to add to the inner interval's clock, so that the outer one encloses it.

    An inner interval that is longer than the outer one, by clocks of different speed, is centred on it.
    """
    offset_us = (outer.start_us - inner.start_us + outer.end_us - inner.end_us) // 2
    error_us = abs(outer.end_us - outer.start_us - inner.end_us + inner.start_us) // 2
    encloses = outer.start_us <= inner.start_us and inner.end_us <= outer.end_us
    return Correction(0 if encloses else offset_us, error_us)


def laid_out(steps: list[Interval]) -> list[Interval]:
    """Return the steps of one engine, the oldest first, without overlaps and with their durations.

    A step is dated when its message arrives, which may be late; it ended before the next one started.
    """
    found = list[Interval]()
    next_us: int | None = None
    for start_us, end_us in reversed(steps):
        late_us = 0 if next_us is None else max(0, end_us - next_us)
        next_us = start_us - late_us
        found.append(Interval(next_us, end_us - late_us))
    return found[::-1]
