"""Requests of fixed-cost models with an idempotency key: each runs once, its repeats receive the same answer.

They share the records, bounds and clients of generations with a key. The answer is one entry at the end of
the record. A run that was lost left nothing behind: the next one computes all rows, under the same request
id, by which it is charged once. The run has the deadline of the client that started it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec.structs import replace

from services.core.errors import (
    DeadlineExceeded,
    DeadlineUnmeetable,
    FairwayError,
    IntegrityError,
    RequestCancelled,
)
from services.core.fixed_cost.rows import RawTensor
from services.core.generation import TokenLogprobs
from services.gateway.events import Accepted, Finished, RequestSink
from services.gateway.idempotency.service import IdempotentService, fingerprint, record_key
from services.gateway.idempotency.types import EarlierRun, KeyedRequest
from services.gateway.incidents import incident_of
from services.gateway.requests.terms import Settlement
from services.gateway.rows.run import RowsAnswer, RowsJob, RowsParts, RowsRun
from services.gateway.rows.runs import PlainRows
from services.rpc import bounds
from services.runtime.identity import KeyDirectory

# How many runs of other clients with less time than this one a client follows before it receives their error.
MAX_RUNS: Final = 4


class IdempotentRows:
    """Implements ``RowsRuns``. Requests without a key run as in ``plain``."""

    def __init__(
        self, plain: PlainRows, service: IdempotentService, identity: KeyDirectory, parts: RowsParts
    ) -> None:
        """``service``: of the same gateway; it has the records of all keys."""
        self._plain = plain
        self._service = service
        self._identity = identity
        self._parts = parts

    async def answer(self, job: RowsJob) -> RowsAnswer:
        """See ``RowsRuns.answer``. Cancelling the call leaves a request with a key running for a while.

        A caller without permission to run it receives nothing of it.
        """
        if not job.message.idempotency_key:
            return await self._plain.answer(job)
        bounds.check(job.message)
        self._parts.validator.authorise(job.principal, job.message.model)
        deadline_s = job.received.monotonic_s + job.timeout_s
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

    async def _attached(self, job: RowsJob, client: _Client, timeout_s: float) -> RowsAnswer:
        """Start, join or repeat the request of the key as ``client``."""
        secret, tenant_id = self._service.names_secret, self._identity.still_valid(job.principal).meta.name
        follower = self._service.runs.attach(
            record_key(secret, tenant_id, job.message.idempotency_key, job.received),
            fingerprint(secret, tenant_id, job.message, job.received),
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
        self,
        job: RowsJob,
        client: _Client,
        sink: RequestSink,
        settlement: Settlement,
        earlier: EarlierRun | None,
    ) -> tuple[KeyedRequest, asyncio.Task[None]]:
        """Run the request on this gateway, with the id of the earlier run."""
        client.runs = True
        received = job.received
        if earlier is not None:
            received = replace(received, request_id=earlier.terms.request_id)
        run = RowsRun(replace(job, received=received), self._parts, settlement)
        leave = self._service.enter(job.principal.tenant_id, run, job.received.face)
        drive = self._drive(run, received.request_id, sink)
        task = self._parts.ports.supervisor.spawn(f"request {received.request_id}", drive)
        task.add_done_callback(lambda _: leave())
        return run, task

    async def _drive(self, run: RowsRun, request_id: str, sink: RequestSink) -> None:
        """Return once the sink has the answer or the error."""
        try:
            answer = await run.run()
        except FairwayError as error:
            sink.on_failed(error)
        except asyncio.CancelledError:
            sink.on_failed(RequestCancelled("the request was cancelled"))
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic in a native library is no Exception
            new_incident = self._parts.ports.new_incident
            sink.on_failed(incident_of(error, new_incident, "request.crashed", request_id=request_id))
        else:
            sink.on_finished(Finished((), answer.usage, answer.clock, answer=encode_answer(answer)))


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


class _Answer(msgspec.Struct, array_like=True, frozen=True):
    """The answer in the record. New fields are added at the end, with a default."""

    request_id: str
    model: str
    version_digest: str
    outputs: tuple[RawTensor, ...]
    tokens: tuple[int, ...]


_decoder: Final = msgspec.msgpack.Decoder(_Answer)


def encode_answer(answer: RowsAnswer) -> bytes:
    """Return what a record keeps of an answer."""
    return msgspec.msgpack.encode(
        _Answer(answer.request_id, answer.model, answer.version_digest, answer.outputs, answer.tokens)
    )


def decode_answer(finished: Finished, *, replayed: bool) -> RowsAnswer:
    """Return the answer of a record. Raises IntegrityError for anything that is not one."""
    try:
        found = _decoder.decode(finished.answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IntegrityError("the record of this idempotency key cannot be read; use another key") from error
    return RowsAnswer(
        request_id=found.request_id,
        model=found.model,
        version_digest=found.version_digest,
        outputs=found.outputs,
        tokens=found.tokens,
        usage=finished.usage,
        clock=finished.clock,
        replayed=replayed,
    )
