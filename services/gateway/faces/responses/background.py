"""Responses that run without a client, each under an idempotency key of its own.

The gateway that begins one drives it: it follows the key's run and stores the answer. If that gateway is
lost, the first to retrieve the response drives it: the key's record decides whether the run is followed,
continued or over, so it never runs twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from fairway.task_group import TaskGroup
from fairway.v1 import inference_pb2
from services.core.errors import (
    ConcurrencyExceeded,
    Draining,
    FairwayError,
    InternalError,
    OverQuota,
    RequestCancelled,
    ResultExpired,
    Unavailable,
)
from services.core.generation import Principal
from services.gateway.events import Accepted, Event, Received
from services.gateway.faces.openai.exchange import primary_failure
from services.gateway.faces.responses.answers import ResponseEvents, ResponseFrames, failed_response
from services.gateway.faces.responses.types import ModelResponse
from services.gateway.faces.transport.event_ids import EventNumbers
from services.gateway.faces.transport.event_stream import GenerationStreams, collect
from services.gateway.incidents import incident_of
from services.gateway.responses.store import BegunResponse, ResponseAnswer, ResponseStore
from services.gateway.service_types import subtract
from services.ports.clock import Clock
from services.runtime.ids import ANSWER_PREFIXES
from services.runtime.supervisor import Supervisor

log = structlog.get_logger()

# Responses of one tenant that one gateway drives.
MAX_TENANT_RUNS: Final = 256
# How long a response waits for room, after which its last error ends it.
GIVE_UP_S: Final = 3600.0
_WATCH_S: Final = 1.0
_RETRY_S: Final = 1.0
_MAX_RETRY_S: Final = 30.0
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(ModelResponse).decode


@dataclass(frozen=True, slots=True)
class ResponseParts:
    """What keeps responses: their store, and the process's tasks, which include those in the background.

    ``remembered_s``: how long an idempotency key is remembered after its last write, at least.
    """

    store: ResponseStore
    supervisor: Supervisor
    new_incident: Callable[[], str]
    remembered_s: float


def answer_of(response: ModelResponse) -> ResponseAnswer:
    """Return a response that has ended, as it is stored."""
    return ResponseAnswer(_encode(response), _encode(response.output))


def response_of(stored: bytes) -> ModelResponse:
    """Return a response from its stored form."""
    return _decode(stored)


def generation_of(response_id: str, begun: BegunResponse) -> inference_pb2.Generation:
    """Return the generation of a response in the background, under an internal key."""
    generation = inference_pb2.Generation.FromString(begun.generation)
    generation.idempotency_key = f"response {response_id}"
    return generation


class BackgroundRun:
    """One response that this gateway drives.

    ``accepted`` is set once the request was accepted, or can no longer be; then ``failure`` is set.
    """

    def __init__(self) -> None:
        self.accepted = asyncio.Event()
        self.over = asyncio.Event()
        self.failure: FairwayError | None = None
        self.stopped = asyncio.Event()


class BackgroundResponses:
    """The responses that this gateway drives, as tasks of the process."""

    def __init__(self, service: GenerationStreams, parts: ResponseParts, clock: Clock) -> None:
        self._new_incident = parts.new_incident
        # Half of it: clocks differ.
        self._takeover_s = parts.remembered_s / 2
        self._service = service
        self._store = parts.store
        self._clock = clock
        self._supervisor = parts.supervisor
        self._runs: dict[tuple[str, str], BackgroundRun] = {}
        self._per_tenant: Counter[str] = Counter()

    def drive(
        self, principal: Principal, response_id: str, begun: BegunResponse, *, is_new: bool
    ) -> BackgroundRun:
        """Return the run of a response, started if this gateway does not drive it.

        ``is_new``: the caller answers for a failure before its acceptance. Raises ConcurrencyExceeded.
        """
        name = (principal.tenant_id, response_id)
        run = self._runs.get(name)
        if run is not None:
            return run
        if self._per_tenant[principal.tenant_id] >= MAX_TENANT_RUNS:
            raise ConcurrencyExceeded(
                f"this gateway runs {MAX_TENANT_RUNS} responses of this tenant in the background, the "
                "maximum",
                retry_after_s=1.0,
                limit=MAX_TENANT_RUNS,
            )
        run = self._runs[name] = BackgroundRun()
        self._per_tenant[principal.tenant_id] += 1
        task = self._supervisor.spawn(
            f"response {response_id}", self._drive(run, principal, response_id, begun, is_new=is_new)
        )
        task.add_done_callback(lambda _: self._done(name, run))
        return run

    def stop(self, tenant_id: str, response_id: str) -> None:
        """End the run of a response that has an answer or is deleted; other gateways notice by themselves."""
        run = self._runs.get((tenant_id, response_id))
        if run is not None:
            run.stopped.set()

    def _done(self, name: tuple[str, str], run: BackgroundRun) -> None:
        del self._runs[name]
        subtract(self._per_tenant, name[0])
        run.accepted.set()
        run.over.set()

    async def _drive(
        self,
        run: BackgroundRun,
        principal: Principal,
        response_id: str,
        begun: BegunResponse,
        *,
        is_new: bool,
    ) -> None:
        head = response_of(begun.response)
        until_s, pause_s = self._clock.monotonic_s() + GIVE_UP_S, _RETRY_S
        while not run.stopped.is_set():
            try:
                self._check_age(head)
                await self._once(run, principal, response_id, begun)
                return
            except Draining as error:  # another gateway continues it
                run.failure = error
                return
            except RequestCancelled as error:
                run.failure = error
                if run.stopped.is_set():
                    return
                failure: FairwayError = error
            except FairwayError as error:
                run.failure = failure = error
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:  # a panic in a native library is no Exception
                run.failure = failure = self._incident(error, response_id)
            if is_new and not run.accepted.is_set():
                return
            log.info("response.interrupted", response_id=response_id, reason=failure.reason)
            is_over = not _may_pass(failure) or self._clock.monotonic_s() >= until_s
            if is_over and await self._fail(principal.tenant_id, response_id, begun, failure):
                return
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_S)

    def _check_age(self, head: ModelResponse) -> None:
        """Raise ResultExpired for a response whose key may be forgotten: it would run a second time."""
        if self._clock.unix_s() - head.created_at > self._takeover_s:
            raise ResultExpired("the run was lost, and its output is no longer stored; send it again")

    async def _once(
        self, run: BackgroundRun, principal: Principal, response_id: str, begun: BegunResponse
    ) -> None:
        """Follow the run to its end and store its answer. Raises RequestCancelled if it has one already."""
        tenant_id, generation = principal.tenant_id, generation_of(response_id, begun)

        async def keep(response: ModelResponse) -> bool:
            await self._store.end(tenant_id, response_id, answer_of(response))
            return True

        frames = ResponseFrames(
            response_of(begun.response),
            request_id=begun.request_id,
            keep=keep,
            events=ResponseEvents(EventNumbers()),
            now_s=self._clock.unix_s,
        )
        received = Received(
            self._clock.monotonic_s(),
            int(self._clock.unix_s() * 1e6),
            begun.request_id,
            face="http",
            internal=True,
        )
        source = self._service.stream(principal, generation, received=received, withdraws=lambda: True)
        try:
            async with TaskGroup() as group:
                watcher = group.create_task(self._watch(run, tenant_id, response_id))
                try:
                    await collect(_noting(source, run), frames)
                finally:
                    watcher.cancel()
        except BaseExceptionGroup as failures:
            raise primary_failure(failures) from None

    async def _watch(self, run: BackgroundRun, tenant_id: str, response_id: str) -> None:
        await self.until_stopped(run, tenant_id, response_id)
        raise RequestCancelled("the response was cancelled or deleted")

    async def until_stopped(self, run: BackgroundRun, tenant_id: str, response_id: str) -> None:
        """Return once the response has an answer or was deleted, by any gateway."""
        while not run.stopped.is_set():
            try:
                async with asyncio.timeout(_WATCH_S):
                    await run.stopped.wait()
            except TimeoutError:
                try:
                    if not await self._store.is_open(tenant_id, response_id):
                        run.stopped.set()
                except FairwayError:  # the store is unavailable
                    continue

    async def _fail(
        self, tenant_id: str, response_id: str, begun: BegunResponse, failure: FairwayError
    ) -> bool:
        """End a response with an error. Return whether its end is stored, by this call or another."""
        try:
            failed = failed_response(response_of(begun.response), failure)
            await self._store.end(tenant_id, response_id, answer_of(failed))
        except FairwayError:
            return False
        except Exception as error:  # the task may not fail; the next retrieval tries again
            self._incident(error, response_id)
        return True

    def _incident(self, error: BaseException, response_id: str) -> InternalError:
        return incident_of(error, self._new_incident, "response.crashed", response_id=response_id)


async def _noting(source: AsyncGenerator[Event, None], run: BackgroundRun) -> AsyncGenerator[Event, None]:
    """Yield the events, and note the acceptance."""
    try:
        async for event in source:
            if isinstance(event, Accepted):
                run.accepted.set()
            yield event
    finally:
        await source.aclose()


def begun_response(response_id: str, head: ModelResponse, created_unix_s: int) -> ModelResponse:
    """Return a response that is about to run in the background."""
    return msgspec.structs.replace(head, id=response_id, created_at=created_unix_s, status="queued")


def response_id_of(request_id: str) -> str:
    return ANSWER_PREFIXES["responses"] + request_id


def _may_pass(error: FairwayError) -> bool:
    """Whether a later attempt may succeed."""
    return isinstance(error, Unavailable | OverQuota) and error.retry_after_s is not None
