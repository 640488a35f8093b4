"""What a term and its streams share: an object for each stream, and the commands that streams send.

The term fills a stream's object and wakes it, the stream empties it; both run in one event loop. A command
is the term's from the moment that it is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.core.errors import FairwayError
from services.core.fleet import Outcome, PoolMember, PoolPressure, ReportSnapshot, TenantCounter
from services.core.generation import PlaceSpec
from services.core.records import Priority

MAX_COUNTERS: Final = 4096  # in one answer


@dataclass(slots=True, eq=False)
class _Stream:
    """What the term does to either kind: it wakes it, and ends it with an error."""

    number: int
    wake: Callable[[], None]
    error: FairwayError | None = field(default=None, init=False)
    closed: bool = field(default=False, init=False)

    def end(self, error: FairwayError) -> None:
        """The stream finds the error, unless it found another or is closed."""
        if self.error is None and not self.closed:
            self.error = error
            self.wake()


@dataclass(slots=True, eq=False)
class Session(_Stream):
    """What the term knows of a gateway's stream. ``outbox`` is filled here and emptied by the stream, and so
    are ``pressures`` and ``members``, the newest of which counts."""

    gateway_id: str
    zone: str = ""
    outbox: list[Outcome] = field(default_factory=list)
    pressures: tuple[PoolPressure, ...] | None = None
    members: tuple[PoolMember, ...] | None = None
    told_s: float = -math.inf  # of members


@dataclass(slots=True, eq=False)
class Reporter(_Stream):
    """What the term knows of a worker's stream. ``applied`` is the last report that was taken over,
    ``counters`` are to be told with its answer: at most those of the tenants that it told of."""

    worker_id: str = ""
    applied: int = 0
    counters: dict[tuple[str, str, Priority], TenantCounter] = field(default_factory=dict)

    def take_counters(self) -> tuple[TenantCounter, ...]:
        """Return what is to be told with the next answer, once; no more than a message may hold."""
        named = list(self.counters)[:MAX_COUNTERS]
        return tuple(self.counters.pop(key) for key in named)


@dataclass(frozen=True, slots=True)
class Submit:
    """``places``: (placement id, spec, arrival by our clock's measure in Unix microseconds)."""

    session: Session
    places: Sequence[tuple[int, PlaceSpec, int]]


@dataclass(frozen=True, slots=True)
class Cancel:
    session: Session
    placement_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Leave:
    """A gateway's stream ended. ``unsent``: placements whose grants it never saw."""

    session: Session
    unsent: Sequence[int]


@dataclass(frozen=True, slots=True)
class Report:
    reporter: Reporter
    number: int
    snapshot: ReportSnapshot


@dataclass(frozen=True, slots=True)
class Silence:
    """A worker's stream ended."""

    reporter: Reporter


Command = Submit | Cancel | Leave | Report | Silence
