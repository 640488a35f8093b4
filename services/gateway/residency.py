"""The last check before a prompt leaves for a worker: the worker is in the region of the tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from services.core.fixed_cost.rows import RowSpec
from services.core.generation import NotAdmittedReason, StartSpec
from services.core.records import REGION_LABEL, Worker
from services.ports.worker import RowClient, RowSink, RunningRow, RunningSequence, SequenceSink, WorkerClient
from services.runtime.fleet_state.informer import RecordView

log = structlog.get_logger()


class Workers(WorkerClient, RowClient, Protocol):
    """What runs sequences and rows."""


class ResidentWorkers:
    """``WorkerClient`` and ``RowClient`` that send nothing of a tenant out of its region.

    A deployment's replicas are placed by its selector, which can change while they run: a worker outside of
    the region answers as one that drains, so that the sequence or row is placed elsewhere.
    """

    def __init__(
        self, workers: Workers, live: RecordView[Worker], residency_of: Callable[[str], str]
    ) -> None:
        """``residency_of`` returns the region of a tenant; empty: any."""
        self._workers = workers
        self._live = live
        self._residency_of = residency_of

    def start(self, spec: StartSpec, sink: SequenceSink) -> RunningSequence:
        if self._leaves(spec.tenant_id, spec.grant.address):
            return _Refused(sink)
        return self._workers.start(spec, sink)

    def start_row(self, address: str, spec: RowSpec, sink: RowSink) -> RunningRow:
        if self._leaves(spec.tenant_id, address):
            return _Refused(sink)
        return self._workers.start_row(address, spec, sink)

    def _leaves(self, tenant: str, address: str) -> bool:
        region = self._residency_of(tenant)
        if not region:
            return False
        if any(
            held.record.address == address and held.record.labels.get(REGION_LABEL) == region
            for held in self._live.view.values()
        ):
            return False
        log.warning("residency.worker_refused", tenant=tenant, region=region, worker=address)
        return True


class _Refused:
    """Implements ``RunningSequence`` and ``RunningRow`` for what was not sent."""

    def __init__(self, sink: SequenceSink | RowSink) -> None:
        loop = asyncio.get_running_loop()
        self._answer = loop.call_soon(sink.on_not_admitted, NotAdmittedReason.DRAINING)

    def credit(self, tokens: int) -> None:
        return None

    def cancel(self) -> None:
        self._answer.cancel()
