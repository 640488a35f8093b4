"""Starts requests of fixed-cost models within the gateway's bounds, each in the task of its caller."""

from __future__ import annotations

from typing import Protocol

from services.gateway.rows.run import RowsAnswer, RowsJob, RowsParts, RowsRun
from services.gateway.service import GatewayService


class RowsRuns(Protocol):
    async def answer(self, job: RowsJob) -> RowsAnswer:
        """Return the answer of a request that the gateway is open for. Cancelling the call cancels it."""


class PlainRows:
    """Implements ``RowsRuns``: every request runs."""

    def __init__(self, service: GatewayService, parts: RowsParts) -> None:
        self._service = service
        self._parts = parts

    async def answer(self, job: RowsJob) -> RowsAnswer:
        """See ``RowsRuns.answer``."""
        run = RowsRun(job, self._parts)
        leave = self._service.enter(job.principal.tenant_id, run, job.received.face)
        try:
            return await run.run()
        finally:
            leave()
