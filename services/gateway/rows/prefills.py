"""Runs rows of a decoder that embeds: each is a sequence that ends with its prefill, without output.

The scheduler places it as every sequence, by the KV of its tokens, so that it is fair with generations. A
lost row runs again under the rules of sequences: an input that ends engines is found and condemned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import numpy as np

from fairway.task_group import TaskGroup
from services.core.errors import (
    FairwayError,
    StaleRoute,
    first_failure,
)
from services.core.fixed_cost.rows import RawTensor, RowEnd, RowsRequest
from services.core.generation import (
    AnyGrant,
    GenerationSpec,
    OutputLimits,
    PlaceSpec,
    Prompt,
    Sampling,
    SequenceEnd,
    StartSpec,
    TokenLogprobs,
)
from services.core.poison.suspicion import Condemned
from services.gateway.poison import condemned_error
from services.gateway.requests.attempts import Outcome, SequenceAttempts, placed
from services.gateway.service_types import Ports
from services.runtime.secrets import Ticket

MAX_AT_ONCE: Final = 64  # rows of one request that are placed or run
_NO_OUTPUT: Final = OutputLimits(0)
_ANY: Final = Sampling(seed=0, temperature=0.0)


class PrefilledRows:
    """Implements ``ports.rows.RowRunner`` for versions of decoders."""

    def __init__(self, ports: Ports, queue_ttl_s: float = 30.0) -> None:
        """``queue_ttl_s``: the longest time of a row in the scheduler's queue."""
        self._ports = ports
        self._queue_ttl_s = queue_ttl_s

    async def run(self, request: RowsRequest) -> tuple[RowEnd, ...]:
        """See ``ports.rows.RowRunner.run``."""
        unix_s, now_s = self._ports.clock.unix_s(), self._ports.clock.monotonic_s()
        longest = max((len(row[0].data) // 8 for row in request.rows), default=0)
        left_s = min(request.deadline_s - now_s, 86_400.0)
        expire_unix_s, tokens, count = int(unix_s + left_s) + 1, longest, len(request.rows)
        ticket = self._ports.sign_ticket(
            Ticket(request.tenant_id, request.request_id, expire_unix_s, tokens, count)
        )
        arrival_unix_us = round(unix_s * 1e6)
        places, ends = asyncio.Semaphore(MAX_AT_ONCE), [RowEnd()] * len(request.rows)

        async def one(row: int) -> None:
            async with places:
                sequence = _EmbeddedRow(request, row, ticket, arrival_unix_us, self._ports, self._queue_ttl_s)
                ends[row] = await sequence.run()

        try:
            async with TaskGroup() as group:
                for row in range(len(request.rows)):
                    group.create_task(one(row))
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        return tuple(ends)


class _EmbeddedRow(SequenceAttempts):
    """One row, which is placed as a sequence until it has ended."""

    def __init__(
        self,
        request: RowsRequest,
        row: int,
        ticket: bytes,
        arrival_unix_us: int,
        ports: Ports,
        queue_ttl_s: float,
    ) -> None:
        (ids,) = request.rows[row]
        spec = GenerationSpec(
            request_id=request.request_id,
            model=request.model,
            version_digest=request.version_digest,
            route_revision=request.route_revision,
            prompt=Prompt(np.frombuffer(ids.data, np.int64).tolist()),
            sampling=_ANY,
            limits=_NO_OUTPUT,
            priority=request.priority,
        )
        super().__init__(spec, ports, queue_ttl_s)
        self._request = request
        self._row = row
        self._ticket = ticket
        self._arrival_unix_us = arrival_unix_us
        self._began_s = ports.clock.monotonic_s()
        self._wait_s = 0.0

    async def run(self) -> RowEnd:
        """Return how the row ended. Raises what fails the whole request: nothing can place it."""
        excluded: tuple[str, ...] = ()
        while True:
            grant = await placed(self._place_or_wake(), self._place_spec(), excluded)
            outcome = await self._execute(grant)
            if isinstance(outcome, SequenceEnd) and outcome.embedding:
                return self._answer(outcome, grant.worker_id)
            try:
                again = self._after(outcome, grant.worker_id)
                if isinstance(again, Condemned):
                    raise condemned_error(self._spec, again.deaths)
            except StaleRoute:
                raise
            except FairwayError as error:
                return RowEnd(error=error, device_s=self.device_us / 1e6)
            excluded = (again.exclude_worker,) if again.exclude_worker else ()
            if again.delay_s > 0:
                await self._ports.clock.sleep(again.delay_s)

    def _answer(self, end: SequenceEnd, worker_id: str) -> RowEnd:
        vector = RawTensor("embedding", "FP32", (len(end.embedding) // 4,), end.embedding)
        device_s = (self.device_us + end.device_us) / 1e6
        stay_s = self._wait_s + end.run.prefill_us / 1e6
        return RowEnd(
            (vector,),
            device_s=device_s,
            wait_s=self._wait_s,
            batch_rows=1,
            stay_s=stay_s,
            worker_id=worker_id,
        )

    def _place_spec(self) -> PlaceSpec:
        request = self._request
        left_s, waking = self._left_s(), self._ports.waking(request.model)
        patience_s = self._patience_s if waking is None else max(self._patience_s, waking.hold_s)
        return PlaceSpec(
            request_id=request.request_id,
            choice=self._row,
            tenant_id=request.tenant_id,
            priority=request.priority,
            model=request.model,
            version_digest=request.version_digest,
            route_revision=request.route_revision,
            prompt_tokens=len(self._spec.prompt.ids),
            max_output_tokens=0,
            arrival_unix_us=self._arrival_unix_us,
            queue_ttl_s=min(patience_s, left_s),
            ticket=self._ticket,
            traceparent=request.traceparent,
            deadline_left_s=left_s,
            tenant_weight=request.tenant_weight,
            node_group=request.node_group,
            isolation_waits=request.isolation_waits,
            kv_share=request.kv_share,
            ttft_target_s=request.target_s or None,
        )

    def _left_s(self) -> float:
        return max(0.001, min(self._request.deadline_s - self._ports.clock.monotonic_s(), 86_400.0))

    async def _execute(self, grant: AnyGrant) -> Outcome:
        """Run under a grant until the outcome."""
        start = StartSpec(
            generation=self._spec,
            choice=self._row,
            tenant_id=self._request.tenant_id,
            grant=grant,
            node_group=self._request.node_group,
            kv_share=self._request.kv_share,
            initial_credit_tokens=1,
            time_left_s=self._left_s(),
            traceparent=self._request.traceparent,
            apart_tokens=self._trial_tokens,
            embed=True,
        )
        self._wait_s = self._ports.clock.monotonic_s() - self._began_s
        return await self._attempt(start, self)

    def on_tokens(
        self, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """A worker of an earlier release generates: it sends no embedding, and the row fails."""
