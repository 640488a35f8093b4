"""The levels of the current term that metrics read when they are scraped."""

from __future__ import annotations

from services.core.records import Priority
from services.ports.clock import Clock
from services.scheduler.fleet.view import FleetView
from services.scheduler.health.worker_health import FleetHealth
from services.scheduler.overload.pool_load import Overload
from services.scheduler.queue.flow_queue import FlowQueue
from services.scheduler.queue.report import counter_gaps
from services.scheduler.term_streams import TermStreams


class TermLevels:
    """Reads the parts of a term. Changes nothing."""

    def __init__(
        self,
        fleet: FleetView,
        queue: FlowQueue,
        health: FleetHealth,
        overload: Overload,
        streams: TermStreams,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._queue = queue
        self._health = health
        self._overload = overload
        self._streams = streams
        self._clock = clock

    def workers_by_state(self) -> dict[str, int]:
        return self._fleet.workers_by_state

    def grants_outstanding(self) -> int:
        return self._fleet.outstanding

    def gateways(self) -> int:
        return len(self._streams.sessions)

    def inbox(self) -> int:
        return len(self._streams)

    def prompt_tokens(self) -> dict[str, int]:
        """Return the prompt tokens since the term began, by kind."""
        return self._fleet.prefix_tokens.by_kind()

    def indexed_blocks(self) -> int:
        return len(self._fleet.prefixes)

    def pressure_by_model(self) -> dict[str, float]:
        return self._overload.pressure_by_model()

    def pools_out_by_state(self) -> dict[str, int]:
        return self._health.pools_by_state()

    def counter_gaps(self) -> dict[tuple[str, Priority], float]:
        """Return the spread of the counters of waiting tenants, by model and class."""
        return counter_gaps(self._queue)

    def view_age_s(self) -> float:
        """Return the age of the oldest last report of a connected worker; 0 without workers."""
        return self._fleet.view_age_s(self._clock.monotonic_s())
