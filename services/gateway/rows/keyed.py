"""Runs requests of fixed-cost models: in the caller's task, or with an idempotency key once for all.

Requests with a key share the records, bounds and clients of generations with a key. The answer is one entry
at the end of the record. A run that was lost left nothing behind: the next one computes all rows, under the
same request id, by which it is charged once. The run has the deadline of the client that started it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

from msgspec.structs import replace

from services.core.errors import DeadlineExceeded, DeadlineUnmeetable, FairwayError
from services.core.generation import TokenLogprobs
from services.gateway.events import Accepted, Finished
from services.gateway.idempotency.ownership import RecordOwnership
from services.gateway.idempotency.record_reader import EarlierRun
from services.gateway.idempotency.service import IdempotentService, fingerprint, record_key
from services.gateway.requests.request import Admit, Request
from services.gateway.requests.terms import RunTerms
from services.gateway.rows.work import Rows, RowsAnswer, RowsJob, RowsParts, decode_answer
from services.rpc import bounds
from services.runtime.identity import KeyDirectory

# How many runs of other clients with less time than this one a client follows before it receives their error.
MAX_RUNS: Final = 4


class RowsRuns:
    """Starts requests of fixed-cost models within the gateway's bounds."""

    def __init__(self, service: IdempotentService, identity: KeyDirectory, parts: RowsParts) -> None:
        """``service``: of the same gateway; it has the records of all keys."""
        self._service = service
        self._identity = identity
        self._parts = parts

    async def answer(self, job: RowsJob) -> RowsAnswer:
        """Return the answer of a request that the gateway is open for.

        Cancelling the call cancels the request, but leaves one with a key running for a while. A caller
        without permission to run it receives nothing of it.
        """
        if not job.message.idempotency_key:
            return await self._without_key(job)
        bounds.check(job.message)
        self._parts.validator.authorise(job.principal, job.message.model)
        deadline_s = job.terms.received.monotonic_s + job.terms.timeout_s
        for number in range(1, MAX_RUNS + 1):
            client = _Client()
            left_s = deadline_s - self._parts.ports.clock.monotonic_s()
            try:
                return await self._attached(job, client, left_s)
            except (DeadlineExceeded, DeadlineUnmeetable):
                late = self._parts.ports.clock.monotonic_s() >= deadline_s
                if client.runs or late or number == MAX_RUNS:
                    raise
        raise AssertionError("the last round returns or raises")

    async def _without_key(self, job: RowsJob) -> RowsAnswer:
        request = Request(job.terms, self._parts.ports)
        rows = Rows(job, self._parts, request)
        leave = self._service.enter(job.principal.tenant_id, request)
        try:
            end = await request.run(rows.admit)
        finally:
            leave()
        if isinstance(end, FairwayError):
            try:
                raise end
            finally:
                del end  # its traceback refers to this frame
        return rows.answer

    async def _attached(self, job: RowsJob, client: _Client, timeout_s: float) -> RowsAnswer:
        """Start, join or repeat the request of the key as ``client``."""
        secret, tenant_id = self._service.names_secret, self._identity.still_valid(job.principal).meta.name
        received = job.terms.received
        follower = self._service.records.attach(
            record_key(secret, tenant_id, job.message.idempotency_key, received),
            fingerprint(secret, tenant_id, job.message, received),
            client,
            partial(self._launch, job, client),
            timeout_s=timeout_s,
            client_window=None,
            delivered=None,
        )
        try:
            finished = await client.ended
        except asyncio.CancelledError:
            follower.cancel()
            raise
        return decode_answer(finished, replayed=not client.runs)

    def _launch(
        self, job: RowsJob, client: _Client, ownership: RecordOwnership, earlier: EarlierRun | None
    ) -> tuple[Request, Admit]:
        """Return the request for this gateway, with the id of the earlier run."""
        client.runs = True
        received = job.terms.received
        if earlier is not None:
            received = replace(received, request_id=earlier.terms.request_id)
        terms = RunTerms(received, job.terms.timeout_s, settlement=ownership)
        request = Request(terms, self._parts.ports)
        return request, Rows(job, self._parts, request).admit


class _Client:
    """The sink of one client. ``runs``: its own call runs the request, here and now."""

    def __init__(self) -> None:
        self.runs = False
        self.ended: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()

    def on_accepted(self, accepted: Accepted) -> None:
        """The answer has it all."""

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        raise AssertionError("rows have no tokens")

    def on_finished(self, finished: Finished) -> None:
        if not self.ended.done():
            self.ended.set_result(finished)

    def on_failed(self, error: FairwayError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
