"""Events of the stores: when etcd, Redis or the room for data is lost, and when it is back."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from fairway.task_group import TaskGroup
from services.controlplane.event_log import EventRecorder
from services.controlplane.leading import repeat_while_leading
from services.controlplane.policy.events import FleetEvent
from services.core.errors import StoreUnavailable
from services.core.records import EventKind
from services.ports.clock import Clock
from services.runtime.fleet_state.leadership import Leadership

PERIOD_S: Final = 2.0
_KEPT: Final = 64
_STALE_S: Final = 600.0


class StoreEvents:
    """Watches in every control plane; the leading one writes what it has seen, also after a loss of etcd."""

    def __init__(
        self,
        problems: Mapping[str, Callable[[], str]],
        leadership: Leadership,
        clock: Clock,
        *,
        events: EventRecorder,
        ping: Callable[[], Awaitable[object]],
    ) -> None:
        """``problems``: per store, its problem or an empty text. ``ping`` calls Redis: it may be idle."""
        self._problems = problems
        self._leadership = leadership
        self._clock = clock
        self._events = events
        self._ping = ping
        self._lost: dict[str, float] = {}
        self._seen: deque[tuple[float, FleetEvent]] = deque(maxlen=_KEPT)

    def look(self) -> None:
        """Note the stores that were lost or came back since the last look."""
        now_s = self._clock.monotonic_s()
        for name, problem in self._problems.items():
            text, since_s = problem(), self._lost.get(name)
            if text and since_s is None:
                self._lost[name] = now_s
                event = FleetEvent(EventKind.PROCESS, name, "STORE_LOST", text, warning=True)
                self._seen.append((now_s, event))
            elif not text and since_s is not None:
                del self._lost[name]
                message = f"after {now_s - since_s:.0f} s"
                self._seen.append((now_s, FleetEvent(EventKind.PROCESS, name, "STORE_RETURNED", message)))

    async def run(self) -> None:
        """Watch the stores, and write what was seen while leading, until cancelled."""
        async with TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(
                repeat_while_leading(
                    self._leadership,
                    self._clock,
                    self.write,
                    each_s=PERIOD_S,
                    failed="store_events.store_lost",
                )
            )

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):
                await self._ping()
            self.look()
            await self._clock.sleep(PERIOD_S)

    async def write(self, epoch: int) -> None:
        """Write what was seen; the leader of that time has written what is old."""
        while self._seen:
            seen_s, event = self._seen[0]
            if self._clock.monotonic_s() - seen_s < _STALE_S:
                fence = self._leadership.fence(epoch)
                await self._events.record((event,), self._events.revision, fence=fence)
            self._seen.popleft()
