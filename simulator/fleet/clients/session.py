"""Clients: each sends its request through a gateway, reads the answer and judges it.

A client can compute its expected answer: tokens are a function of seed and position. One whose gateway
is lost retries at another under its idempotency key, or fails without one. One that is refused for now
may retry after the delay in the refusal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from random import Random
from typing import Final, Protocol

from fairway.v1 import inference_pb2
from services.core.errors import FairwayError
from services.core.generation import TokenLogprobs
from services.gateway.events import Accepted, Finished, Handle, RequestSink
from services.rpc.convert.inference import PRIORITIES
from simulator.engine.poison import POISON_TOKENS
from simulator.fleet.clients.client import Due, RequestRecord, SimRequest, request_seed
from simulator.fleet.spec import MODEL, VOCABULARY
from simulator.fleet.violations import Violations
from simulator.kernel.loop import VirtualTimeLoop

GATEWAY_LOST: Final = "GATEWAY_LOST"
UNREACHABLE: Final = "UNREACHABLE"
ONCE: Final = "one-end"
TOKENS: Final = "tokens"
_MAX_ATTEMPTS: Final = 8
_READ_S: Final = 0.25


class Door(Protocol):
    """A gateway's interface to its clients."""

    @property
    def name(self) -> str: ...

    @property
    def reachable(self) -> bool:
        """It accepts connections: its process runs, or is paused."""

    def enter(self, call: Callable[[], None]) -> None:
        """Do something inside its process: later while it is paused, never if it ends before."""

    def submit(
        self, tenant: str, generation: inference_pb2.Generation, sink: RequestSink, *, attempt: int = 0
    ) -> Handle:
        """Hand a request to its service. Raises what the service raises."""


class Clients:
    """All clients of a run, the present ones by number."""

    def __init__(
        self,
        loop: VirtualTimeLoop,
        doors: Callable[[], Iterable[Door]],
        rng: Random,
        violations: Violations,
        on_record: Callable[[RequestRecord], None],
    ) -> None:
        self._doors = doors
        self._rng = rng
        self._on_record = on_record
        self._loop = loop
        self._context = copy_context()  # no process's: clients have no clock and no faults of their own
        self._idle = asyncio.Event()
        self._idle.set()
        self.violations = violations
        self.on_accepted: Callable[[RequestRecord, Accepted], None] = _ignore
        self.present: dict[int, SimSession] = {}
        self.sent = 0

    @property
    def now_s(self) -> float:
        return self._loop.now_s

    def send(self, request: SimRequest) -> SimSession:
        """Begin a request now."""
        self.sent += 1
        session = SimSession(self, self.sent, request)
        self.present[session.record.number] = session
        self._idle.clear()
        session.begin()
        return session

    async def wait_idle(self) -> None:
        """Return when every request has ended."""
        await self._idle.wait()

    def later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.at(self._loop.now_s + delay_s, call, context=self._context)

    def door(self) -> Door | None:
        """Return a gateway that accepts connections, None while none does."""
        reachable = [door for door in self._doors() if door.reachable]
        return self._rng.choice(reachable) if reachable else None

    def jitter(self) -> float:
        return 0.5 + self._rng.random()

    def gateway_lost(self, name: str) -> None:
        """Notify the clients of a gateway that their connections broke."""
        for session in [held for held in self.present.values() if held.gateway == name]:
            session.lost()

    def ended(self, session: SimSession) -> None:
        if self.present.pop(session.record.number, None) is None:
            self.violations.add(ONCE, f"request {session.record.number} ended twice")
            return
        if not self.present:
            self._idle.set()
        self._on_record(session.record)


def _ignore(record: RequestRecord, accepted: Accepted) -> None:
    """Placeholder callback while nothing follows the accepted requests."""


class SimSession:
    """One request of one client, over as many attempts as it takes."""

    __slots__ = ("_attempt", "_timer", "clients", "due", "record", "request")

    def __init__(self, clients: Clients, number: int, request: SimRequest) -> None:
        self.clients = clients
        self.request = request
        self._attempt: _Attempt | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.record = RequestRecord(number, request, clients.now_s)
        self.expect(allowed_tokens(request))

    def expect(self, allowed: int) -> None:
        """From now on the answer has at most ``allowed`` tokens."""
        self.due = Due(self._seed, output_tokens=self.request.output_tokens, allowed_tokens=allowed)

    @property
    def _seed(self) -> int:
        return request_seed(self.record.number, self.request.output_tokens)

    @property
    def gateway(self) -> str:
        return "" if self._attempt is None else self._attempt.door.name

    def begin(self) -> None:
        if self.request.cancel_after_s is not None:
            self._timer = self.clients.later(self.request.cancel_after_s, self.leave)
        self.ask()

    def ask(self) -> None:
        """Send it, or send it again."""
        if self.record.outcome:
            return
        record = self.record
        if record.attempts >= _MAX_ATTEMPTS:
            self.end(UNREACHABLE)
            return
        record.attempts += 1
        door = self.clients.door()
        if door is None:
            self.clients.later(0.5 * self.clients.jitter(), self.ask)
            return
        record.gateway = door.name
        self._attempt = attempt = _Attempt(self, door)
        door.enter(attempt.submit)

    def leave(self) -> None:
        """The client disconnects."""
        attempt = self._attempt
        if attempt is None:
            self.end("CANCELLED")
        else:
            attempt.door.enter(attempt.cancel)

    def lost(self) -> None:
        """The connection to the gateway broke."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        attempt.over = True
        if self.request.key:
            self.clients.later(0.2 * self.clients.jitter(), self.ask)
        else:
            self.end(GATEWAY_LOST)

    def failed(self, error: FairwayError) -> None:
        """It was refused or broken off: sent again where that may help, over otherwise."""
        record = self.record
        again = error.retry_after_s is not None and not record.output_tokens
        if not again or record.refusals >= self.request.retries:
            self.end(error.reason)
            return
        assert error.retry_after_s is not None
        record.refusals += 1
        self._attempt = None
        self.clients.later(error.retry_after_s * self.clients.jitter(), self.ask)

    def end(self, outcome: str) -> None:
        record = self.record
        if record.outcome:
            self.clients.violations.add(
                ONCE, f"request {record.number} ended with {record.outcome}, then with {outcome}"
            )
            return
        record.outcome, record.ended_s = outcome, self.clients.now_s
        self._attempt = None
        if self._timer is not None:
            self._timer.cancel()
        self.clients.ended(self)

    def generation(self) -> inference_pb2.Generation:
        """Return what is sent, the same in every attempt."""
        request = self.request
        generation = inference_pb2.Generation(
            model=MODEL,
            token_ids=inference_pb2.TokenIds(ids=prompt_ids(request, self.record.number)),
            max_output_tokens=allowed_tokens(request),
            priority=PRIORITIES[request.priority],
            idempotency_key=request.key,
            session_key=request.session,
        )
        generation.sampling.seed = self._seed
        if request.deadline_s is not None:
            generation.timeout.FromMicroseconds(round(request.deadline_s * 1e6))
        return generation

    def came(self, received: int) -> None:
        """Record how many tokens of its answer the client has received."""
        record, now_s = self.record, self.clients.now_s
        fresh = received - record.output_tokens
        if fresh <= 0:
            return
        record.output_tokens = received
        if record.first_token_s:
            gap_s = now_s - record.last_token_s
            record.gap_s.append(gap_s)
            record.gap_tokens.append(fresh)
            record.max_gap_s = max(record.max_gap_s, gap_s)
        else:
            record.first_token_s = now_s
        record.last_token_s = now_s

    def violated(self, invariant: str, text: str) -> None:
        self.clients.violations.add(invariant, f"request {self.record.number}: {text}")


def allowed_tokens(request: SimRequest) -> int:
    return request.max_output_tokens if request.max_output_tokens is not None else request.output_tokens


class _Attempt:
    """One attempt through one gateway. Implements ``RequestSink`` and checks what it receives."""

    __slots__ = ("_handle", "_received", "_session", "_unread", "door", "over")

    def __init__(self, session: SimSession, door: Door) -> None:
        self._session = session
        self._handle: Handle | None = None
        self._received = 0
        self._unread = 0
        self.door = door
        self.over = False

    def submit(self) -> None:
        if self.over:
            return
        session = self._session
        tenant, refusals = session.request.tenant, session.record.refusals
        try:
            handle = self.door.submit(tenant, session.generation(), self, attempt=refusals)
        except FairwayError as error:
            self.on_failed(error)
        else:
            if self.over:
                return
            self._handle = handle
            if session.request.read_tokens_per_s is not None:
                session.clients.later(_READ_S, self._read)

    def cancel(self) -> None:
        if self._handle is not None and not self.over:
            self._handle.cancel()

    # --- RequestSink -------------------------------------------------------------------------------

    def on_accepted(self, accepted: Accepted) -> None:
        record = self._session.record
        self._expect_open("accepted")
        self._session.clients.on_accepted(record, accepted)
        if not record.accepted_s:
            record.accepted_s = self._session.clients.now_s
        if accepted.degradations or record.degraded:  # Another gateway may have degraded it at another time.
            record.degraded = bool(accepted.degradations)
            caps = [int(one.applied) for one in accepted.degradations]
            self._session.expect(min([allowed_tokens(self._session.request), *caps]))

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        session = self._session
        if not self._expect_open("tokens"):
            return
        if offset != self._received:
            session.violated(TOKENS, f"token {offset} came where {self._received} was due")
            return
        if list(ids) != session.due.tokens(offset, len(ids)):
            session.violated(TOKENS, f"other tokens than were due from {offset} on")
        self._received += len(ids)
        self._unread += len(ids)
        session.came(self._received)
        if session.request.read_tokens_per_s is None:
            self._credit()

    def on_finished(self, finished: Finished) -> None:
        if not self._expect_open("the end"):
            return
        self._close()
        session, record = self._session, self._session.record
        said = finished.choices[0].output_tokens
        due = session.due.length
        if not said == self._received == due:
            session.violated(TOKENS, f"{self._received} tokens came, {said} were said, {due} were due")
        record.cached_tokens = finished.usage.cached_tokens
        record.resumes = finished.resumes
        record.queue_s = finished.clock.queue_us / 1e6
        session.end("finished")

    def on_failed(self, error: FairwayError) -> None:
        if self._expect_open("an error"):
            self._close()
            self._session.failed(error)

    # --- reading -----------------------------------------------------------------------------------

    def _close(self) -> None:
        """Nothing comes any more. The request holds this sink: without the way back, no cycle is left."""
        self.over = True
        self._handle = None

    def _expect_open(self, what: str) -> bool:
        if self.over:
            self._session.violated(ONCE, f"{what} came after the end")
        return not self.over

    def _credit(self) -> None:
        """All that came is read."""
        if self._handle is not None and self._unread:
            unread, self._unread = self._unread, 0
            self._handle.credit(0, unread)

    def _read(self) -> None:
        """A slow reader takes its next tokens."""
        if not self.over:
            self.door.enter(self._take_some)
            self._session.clients.later(_READ_S, self._read)

    def _take_some(self) -> None:
        rate = self._session.request.read_tokens_per_s
        assert rate is not None
        tokens = min(self._unread, max(1, round(rate * _READ_S)))
        if self._handle is not None and tokens and not self.over:
            self._unread -= tokens
            self._handle.credit(0, tokens)


_LONGEST: Final = 1 << 18
_RAMP: Final = list(range(VOCABULARY)) * (_LONGEST // VOCABULARY + 2)
_NAME_TOKENS: Final = 3  # ids that spell a number to the base of the vocabulary


def prompt_ids(request: SimRequest, number: int) -> list[int]:
    """Return the prompt: ``prefix_tokens`` named by ``prefix_id`` or ``blocks``, the rest by the number.

    Two prompts agree exactly in what they share, so that a cache hit is never by chance.
    """
    if request.poison is not None:
        rest = max(0, request.prompt_tokens - POISON_TOKENS)
        return request.poison.ids + _named(request.poison.number, rest, 4)
    if request.blocks:
        named = [id for block in request.blocks for id in _named(block, request.block_tokens, 3)]
        rest = request.prompt_tokens - len(named)
        return named + _named(number, rest, 2) if rest > 0 else named[: request.prompt_tokens]
    shared = min(request.prefix_tokens, request.prompt_tokens)
    return _named(request.prefix_id, shared, 1) + _named(number, request.prompt_tokens - shared, 2)


def _named(name: int, tokens: int, kind: int) -> list[int]:
    """Return a run of ids that begins with its name."""
    spelled = [kind, name % VOCABULARY, name // VOCABULARY % VOCABULARY][:tokens]
    start = name * 7919 % VOCABULARY
    return spelled + _RAMP[start : start + max(0, tokens - _NAME_TOKENS)]
