"""The runs of idempotency keys on this gateway: one for each key and body."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from functools import partial

import structlog

from fairway.task_group import TaskGroup
from services.core.errors import ConcurrencyExceeded, FairwayError
from services.core.shares import share_of
from services.gateway.events import Delivered, RequestSink
from services.gateway.idempotency.followers import RecordFollower, copy_of
from services.gateway.idempotency.ownership import Launch, RecordOwnership
from services.gateway.idempotency.record_writer import PendingRecordEnds, RecordFlusher
from services.gateway.idempotency.run import KeyedRun
from services.gateway.idempotency.telemetry import KeyOutcome
from services.gateway.idempotency.types import KeyedPorts
from services.gateway.service_types import RequestCapacity, subtract
from services.ports.idempotency import RecordKey
from services.runtime.supervisor import Supervisor

log = structlog.get_logger()


class KeyedRuns:
    """Every duplicate of a request that reaches this gateway joins the single run of it."""

    def __init__(self, ports: KeyedPorts, supervisor: Supervisor, capacity: RequestCapacity) -> None:
        self._ports = ports
        self._supervisor = supervisor
        self._capacity = capacity
        self._runs: dict[tuple[RecordKey, str], KeyedRun] = {}
        self._has_runs = asyncio.Event()  # at least one run exists
        self._followers: dict[RecordFollower, str] = {}
        self._per_tenant: Counter[str] = Counter()
        self._flusher = RecordFlusher(ports, self.owned)
        self._pending_ends = PendingRecordEnds(ports, self._forget)
        ports.telemetry.export_levels(
            followers=lambda: len(self._followers),
            owned=lambda: sum(1 for _ in self.owned()),
            pending_ends=lambda: len(self._pending_ends),
        )

    @property
    def busy(self) -> int:
        """How many requests and clients a drain has to wait for."""
        return sum(run.pending_end is None for run in self._runs.values()) + len(self._followers)

    def owned(self) -> Iterator[RecordOwnership]:
        """Yield the records whose requests run on this gateway."""
        return (run.ownership for run in self._runs.values() if run.ownership is not None)

    def attach(
        self,
        key: RecordKey,
        fingerprint: str,
        sink: RequestSink,
        launch: Launch,
        *,
        timeout_s: float,
        client_window: int | None,
        delivered: Delivered | None,
    ) -> RecordFollower:
        """Return the handle of a client of the key's request, which is started, joined or replayed.

        ``launch`` runs the request, if this gateway has to. Raises ConcurrencyExceeded and ResultExpired.
        """
        most = self._ports.limits.max_tenant_followers
        if self._per_tenant[key.tenant_id] >= most:
            self._ports.telemetry.clients(key.tenant_id, KeyOutcome.REFUSED)
            raise ConcurrencyExceeded(
                f"this gateway serves {most} clients of this tenant's idempotency keys, the maximum",
                retry_after_s=1.0,
                limit=most,
            )
        name = (key, fingerprint)
        run = self._runs.get(name)
        first = run is None or not run.joinable
        if run is None or first:
            run = self._runs[name] = KeyedRun(key, fingerprint, self._ports, launch, self._departed)
            self._has_runs.set()
        follower = run.join(sink, client_window, delivered, first=first)
        self._followers[follower] = key.tenant_id
        self._per_tenant[key.tenant_id] += 1
        self._capacity.enter(key.tenant_id)
        follower.limit_to(timeout_s)
        if first:
            task = self._supervisor.spawn(f"keyed {key.digest[:12]}", run.drive())
            run.start(task)
            task.add_done_callback(partial(self._on_run_end, run))
        return follower

    async def flush_forever(self) -> None:
        """Write the output behind the runs, and renew their leases; a task of the process.

        It runs at each interval while there are runs, and sleeps otherwise.
        """
        async with TaskGroup() as group:
            group.create_task(self._pending_ends.write_forever())
            while True:
                await self._has_runs.wait()
                await self._ports.clock.sleep(self._ports.limits.flush_s)
                self._bound_memory()
                self._flusher.start_writes(group)

    async def write_endings(self) -> None:
        """Retry once the ends that the store did not accept."""
        await self._pending_ends.write()

    def stop(self, error: FairwayError) -> None:
        """End every run and client here; other gateways can continue."""
        for run in list(self._runs.values()):
            run.stop(error)
        for follower in list(self._followers):
            follower.failed(copy_of(error))

    def check_integrity(self) -> None:
        assert sum(self._per_tenant.values()) == len(self._followers), "clients are counted wrongly"
        self._pending_ends.check_integrity()

    def _bound_memory(self) -> None:
        """Grant credit, and stop retaining outputs that are too large, the largest first."""
        limits, total = self._ports.limits, 0
        of_tenant: Counter[str] = Counter()
        sized = sorted(
            ((run.broadcast.log.size_bytes, number, run) for number, run in enumerate(self._runs.values())),
            key=lambda found: found[0],
        )
        for size, _, run in sized:
            run.trim_output()
            total += size
            of_tenant[run.key.tenant_id] += size
            crowded = total > limits.max_logs_bytes
            crowded |= of_tenant[run.key.tenant_id] > share_of(limits.max_logs_bytes)
            if run.broadcast.whole and (size > limits.max_log_bytes or crowded):
                log.warning("idempotency.output_not_kept", record=run.key.digest[:12], size_bytes=size)
                run.stop_retaining()

    def _departed(self, follower: RecordFollower) -> None:
        tenant_id = self._followers.pop(follower, None)
        if tenant_id is not None:
            subtract(self._per_tenant, tenant_id)
            self._capacity.leave(tenant_id)

    def _on_run_end(self, run: KeyedRun, _: asyncio.Task[None]) -> None:
        run.close()
        if run.pending_end is None:
            self._forget(run)
        else:
            self._pending_ends.retain(run)

    def _forget(self, run: KeyedRun) -> None:
        name = (run.key, run.fingerprint)
        if self._runs.get(name) is run:
            del self._runs[name]
            if not self._runs:
                self._has_runs.clear()
