"""State shared by a term and its streams: an object for each stream, and the commands that streams send.

The term fills a stream's object and wakes the stream, which empties it; both run in one event loop. The term
owns a command from the moment it is sent.
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
    """Common part of both kinds of stream: the term wakes it, and ends it with an error."""

    number: int
    wake: Callable[[], None]
    error: FairwayError | None = field(default=None, init=False)
    closed: bool = field(default=False, init=False)

    def end(self, error: FairwayError) -> None:
        """End the stream with the error, unless it has ended or is closed."""
        if self.error is None and not self.closed:
            self.error = error
            self.wake()


@dataclass(slots=True, eq=False)
class GatewaySession(_Stream):
    """The term's state of a gateway's stream. The term fills ``outbox``, ``pressures`` and ``members``, and
    the stream empties them; of the last two only the newest value is sent."""

    gateway_id: str
    zone: str = ""
    outbox: list[Outcome] = field(default_factory=list)
    pressures: tuple[PoolPressure, ...] | None = None
    members: tuple[PoolMember, ...] | None = None
    told_s: float = -math.inf  # when ``members`` was last set


@dataclass(slots=True, eq=False)
class WorkerSession(_Stream):
    """The term's state of a worker's stream. ``applied``: the last report that was applied. ``counters``:
    sent with its answer, at most those of the tenants in the worker's reports."""

    worker_id: str = ""
    applied: int = 0
    counters: dict[tuple[str, str, Priority], TenantCounter] = field(default_factory=dict)

    def take_counters(self) -> tuple[TenantCounter, ...]:
        """Return and remove the counters for the next answer, at most as many as a message may contain."""
        named = list(self.counters)[:MAX_COUNTERS]
        return tuple(self.counters.pop(key) for key in named)


@dataclass(frozen=True, slots=True)
class SubmitPlacements:
    """Placements to queue. ``places``: (placement id, spec, arrival by our clock in Unix microseconds)."""

    session: GatewaySession
    places: Sequence[tuple[int, PlaceSpec, int]]


@dataclass(frozen=True, slots=True)
class CancelPlacements:
    session: GatewaySession
    placement_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class GatewayDisconnected:
    """A gateway's stream ended. ``unsent``: placements whose grants were not sent to it."""

    session: GatewaySession
    unsent: Sequence[int]


@dataclass(frozen=True, slots=True)
class Report:
    reporter: WorkerSession
    number: int
    snapshot: ReportSnapshot


@dataclass(frozen=True, slots=True)
class WorkerDisconnected:
    """A worker's stream ended."""

    reporter: WorkerSession


Command = SubmitPlacements | CancelPlacements | GatewayDisconnected | Report | WorkerDisconnected
