"""How much of its quota etcd uses.

At the quota it refuses every write, new leases included, until an operator acts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import structlog
from aetcd import rpc

from services.adapters.etcd.channel import EtcdChannel
from services.core.errors import FairwayError
from services.core.records import ASSIGNMENTS, EVENTS, STORE_GENERATION
from services.ports.clock import Clock
from services.ports.store import Condition, ModRevisionIs, Operation, Put
from services.runtime.reserve import RESERVE_RATIO, Reserve

log = structlog.get_logger()

_MEASURE_S: Final = 5.0
# New keys that keep the fleet going. Leases, updates and deletions are never refused.
_NEEDED: Final = (ASSIGNMENTS, EVENTS, STORE_GENERATION)


class EtcdSpace:
    """The space of one etcd cluster: new objects of tenants and operators leave a part of the quota free."""

    def __init__(self, quota_bytes: int, clock: Clock) -> None:
        mend = "delete what is not needed, or raise etcd's quota and FAIRWAY_ETCD_QUOTA_BYTES"
        self.reserve = Reserve("etcd", mend, clock)
        self._quota_bytes = quota_bytes
        self._clock = clock
        self._alarm = False

    def problem(self) -> str:
        """Return why etcd takes no writes; empty while it does."""
        return (
            "etcd has raised the alarm NOSPACE and takes no writes: free space, defragment it and disarm the "
            "alarm, as docs/operations/troubleshooting.md describes"
            if self._alarm
            else ""
        )

    def check(self, operations: Sequence[Operation], conditions: Sequence[Condition]) -> None:
        """Raise StorageFull for a commit that adds an object when the reserve is reached."""
        if not self.reserve.reached:
            return
        absent = {one.key for one in conditions if isinstance(one, ModRevisionIs) and not one.revision}
        for operation in operations:
            adds = isinstance(operation, Put) and not operation.lease_id and operation.key in absent
            if adds and not operation.key.startswith(_NEEDED):
                raise self.reserve.refusal()

    async def run(self, channel: EtcdChannel) -> None:
        """Measure every few seconds, until cancelled."""
        while True:
            try:
                self.note(await channel.unary(lambda s: s.maintenance.Status, rpc.StatusRequest(), 3.0))
            except FairwayError as error:
                log.debug("etcd.not_measured", error=error.message)
            await self._clock.sleep(_MEASURE_S)

    def note(self, status: Any) -> None:
        """Take what a member reports of itself."""
        alarm = any("NOSPACE" in each for each in status.errors)
        if alarm != self._alarm:
            log.warning("etcd.alarm_changed", raised=alarm, used_bytes=status.dbSizeInUse)
        self._alarm = alarm
        # The free pages of the file are used again, so that it does not grow past what was once in use.
        used_bytes = self._quota_bytes if alarm else status.dbSizeInUse
        self.reserve.measured(self._quota_bytes - used_bytes, int(self._quota_bytes * RESERVE_RATIO))
