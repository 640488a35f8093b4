"""Record ends that the store did not accept at first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

import structlog

from fairway.task_group import TaskGroup
from services.core.errors import StoreUnavailable
from services.core.shares import share_of
from services.gateway.idempotency.run import KeyedRun
from services.gateway.idempotency.settlement import write_ending
from services.gateway.idempotency.telemetry import EndingOutcome
from services.gateway.idempotency.types import KeyedPorts
from services.ports.idempotency import Written

log = structlog.get_logger()

MAX_UNWRITTEN: Final = 10_000
_AT_ONCE: Final = 8


class UnwrittenEndings:
    """Retains ends until the store accepts them, and replays them from memory. Above the bound, the oldest
    are dropped. A tenant with more than half of the bound loses its own oldest.
    """

    def __init__(self, ports: KeyedPorts, gone: Callable[[KeyedRun], None]) -> None:
        """``gone`` is called for each run that is no longer retained."""
        self._ports = ports
        self._gone = gone
        self._runs: OrderedDict[KeyedRun, None] = OrderedDict()
        self._of_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._runs)

    def keep(self, run: KeyedRun) -> None:
        tenant_id = run.key.tenant_id
        self._runs[run] = None
        self._of_tenant[tenant_id] += 1
        crowded = self._of_tenant[tenant_id] > share_of(MAX_UNWRITTEN)
        if crowded or len(self._runs) > MAX_UNWRITTEN:
            dropped = next(each for each in self._runs if not crowded or each.key.tenant_id == tenant_id)
            self._remove(dropped)
            self._ports.telemetry.ending(EndingOutcome.DROPPED)
            log.error("idempotency.end_dropped", record=dropped.key.digest[:12])
            self._gone(dropped)

    async def write_forever(self) -> None:
        while True:
            await self._ports.clock.sleep(self._ports.limits.flush_s)
            await self.write()

    async def write(self) -> None:
        """Try each end once, oldest first; stop when the store accepts nothing."""
        runs = list(self._runs)
        for start in range(0, len(runs), _AT_ONCE):
            async with TaskGroup() as group:
                tries = [group.create_task(self._write(run)) for run in runs[start : start + _AT_ONCE]]
            if not any(found.result() for found in tries):
                return

    async def _write(self, run: KeyedRun) -> bool:
        """Whether it is written. An unwritten end moves behind the others."""
        assert run.unwritten is not None
        try:
            written = await write_ending(self._ports, run.unwritten)
        except StoreUnavailable:
            if run in self._runs:
                self._runs.move_to_end(run)
            return False
        if run in self._runs:  # not dropped meanwhile, nor written by another call of ``write``
            self._remove(run)
            fenced = written is Written.FENCED
            self._ports.telemetry.ending(EndingOutcome.FENCED if fenced else EndingOutcome.WRITTEN)
            self._gone(run)
        return True

    def _remove(self, run: KeyedRun) -> None:
        del self._runs[run]
        self._of_tenant[run.key.tenant_id] -= 1
        if not self._of_tenant[run.key.tenant_id]:
            del self._of_tenant[run.key.tenant_id]

    def check_integrity(self) -> None:
        assert self._of_tenant == Counter(run.key.tenant_id for run in self._runs), (
            "tenants are counted wrongly"
        )
        assert len(self._runs) <= MAX_UNWRITTEN, "more endings are kept than the bound allows"
        assert all(run.unwritten is not None for run in self._runs), "a kept run has nothing to write"
