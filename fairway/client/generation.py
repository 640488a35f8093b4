"""One generation as a stream of events, for any carrier and any number of attempts."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Final, Protocol, Self
from zlib import crc32

from fairway.client import convert
from fairway.client.attempts import Attempts, Core
from fairway.client.endpoints import Endpoint
from fairway.client.errors import FairwayError, StreamDiverged
from fairway.client.guard import Guard
from fairway.client.values import (
    Accepted,
    Completion,
    Event,
    Finished,
    TokenLogprobs,
    Tokens,
    checked_timeout_s,
)
from fairway.formats.answers import CallDelta, OutputPart, answer_of
from fairway.v1 import inference_pb2 as pb

_IDS: Final = "L" if array("I").itemsize < 4 else "I"


@dataclass(slots=True)
class _Choice:
    """Delivered tokens, characters, checksum of ids and size of parts; ``seen_``: the same for the current
    attempt."""

    tokens: int = 0
    chars: int = 0
    check: int = 0
    parts: int = 0
    seen_tokens: int = 0
    seen_chars: int = 0
    seen_check: int = 0
    seen_parts: int = 0


@dataclass(slots=True)
class DeliveryPositions:
    """Positions and a checksum per choice, but no tokens: its size does not grow with the output.

    Text is skipped by characters, not by chunks: a repeated text may be split differently. So are parts, of
    which the head of a call counts one more.
    """

    accepted: Accepted | None = None
    _choices: dict[int, _Choice] = field(default_factory=dict)

    @property
    def delivered_tokens(self) -> int:
        return sum(choice.tokens for choice in self._choices.values())

    @property
    def has_output(self) -> bool:
        """Whether some output was delivered."""
        return any(choice.tokens or choice.chars for choice in self._choices.values())

    @property
    def max_delivered(self) -> int:
        """Delivered tokens of the choice with the most."""
        return max((choice.tokens for choice in self._choices.values()), default=0)

    def delivered(self, choice: int) -> int:
        found = self._choices.get(choice)
        return found.tokens if found else 0

    def attempt_began(self) -> None:
        for choice in self._choices.values():
            choice.seen_tokens = choice.seen_chars = choice.seen_check = choice.seen_parts = 0

    def accept(self, accepted: Accepted) -> bool:
        """Return whether to deliver it. Raises StreamDiverged when output of another run was delivered."""
        before = self.accepted
        if before is None:
            pass
        elif _run(before) == _run(accepted):
            accepted = replace(accepted, replayed=before.replayed)  # a replay to the same stream is not one
        elif self.has_output:
            raise _diverged("it was accepted with another version or seed", accepted.request_id)
        self.accepted = accepted
        return not self.has_output and before != accepted

    def undelivered(self, event: Tokens) -> Tokens | None:
        """Return the undelivered part of the event and count it as delivered; None: there is none.

        Raises StreamDiverged when tokens before it are missing, or when repeated tokens differ.
        """
        at = self._choices.setdefault(event.choice, _Choice())
        if event.offset != at.seen_tokens:
            raise _diverged(
                f"choice {event.choice} continues at token {event.offset} instead of {at.seen_tokens}",
                self._request_id,
            )
        old = min(max(0, at.tokens - at.seen_tokens), len(event.ids))
        at.seen_check = crc32(array(_IDS, event.ids[:old]), at.seen_check)
        if old and at.seen_tokens + old == at.tokens and at.seen_check != at.check:
            raise _diverged(f"choice {event.choice} was sent again with other tokens", self._request_id)
        at.seen_tokens += len(event.ids)
        at.seen_check = crc32(array(_IDS, event.ids[old:]), at.seen_check)
        old_chars = min(max(0, at.chars - at.seen_chars), len(event.text))
        at.seen_chars += len(event.text)
        return self._deliver(at, event, old, old_chars)

    def last(self, event: Finished) -> Finished:
        """Return the end without parts that were delivered."""
        choices = []
        for result in event.choices:
            at = self._choices.setdefault(result.choice, _Choice())
            choices.append(replace(result, parts=_new_parts(at, result.parts)))
        return replace(event, choices=tuple(choices))

    @property
    def _request_id(self) -> str:
        return self.accepted.request_id if self.accepted is not None else ""

    def _deliver(self, at: _Choice, event: Tokens, old: int, old_chars: int) -> Tokens | None:
        before = at.tokens
        if at.seen_tokens >= at.tokens:
            at.tokens, at.check = at.seen_tokens, at.seen_check
        at.chars = max(at.chars, at.seen_chars)
        parts = _new_parts(at, event.parts)
        if not old and not old_chars and parts is event.parts:
            return event
        ids, text = event.ids[old:], event.text[old_chars:]
        if not ids and not text and not parts:
            return None
        return Tokens(event.choice, before, ids, text, event.logprobs[old:], parts)


def _new_parts(at: _Choice, parts: tuple[OutputPart, ...]) -> tuple[OutputPart, ...]:
    """Return the undelivered ones, and count all of them as seen."""
    old = at.parts - at.seen_parts
    at.seen_parts += sum(map(_size, parts))
    at.parts = max(at.parts, at.seen_parts)
    if old <= 0:
        return parts
    found = []
    for part in parts:
        size = _size(part)
        if size > old:
            found.append(_rest(part, old))
        old = max(0, old - size)
    return tuple(found)


def _size(part: OutputPart) -> int:
    return bool(part.name) + len(part.arguments) if isinstance(part, CallDelta) else len(part.text)


def _rest(part: OutputPart, old: int) -> OutputPart:
    """Return a part without its first ``old``, less than its size."""
    if isinstance(part, CallDelta):
        return CallDelta(part.index, arguments=part.arguments[old - bool(part.name) :]) if old else part
    return replace(part, text=part.text[old:])


def _run(accepted: Accepted) -> tuple[str, int]:
    return accepted.version_digest, accepted.seed


def _diverged(what: str, request_id: str) -> StreamDiverged:
    return StreamDiverged(
        f"the stream cannot be continued: {what}; send the request again under a new key",
        reason="STREAM_DIVERGED",
        metadata={"request_id": request_id},
    )


class Attempt(Protocol):
    """One attempt of a generation. ``receive`` raises FairwayError, and TimeoutError after the deadline."""

    endpoint: Endpoint

    async def receive(self) -> Event: ...

    def consumed(self, choice: int, tokens: int) -> None:
        """Record that the reader has taken ``tokens`` of a choice, counted from the start of the output."""
        ...

    async def aclose(self) -> None:
        """Cancel it unless it ended. Idempotent."""
        ...


class Carrier(Protocol):
    """Sends generations: each on its own RPC, or all on one session."""

    async def open(
        self, generation: pb.Generation, attempts: Attempts, positions: DeliveryPositions
    ) -> Attempt: ...


class GenerationStream:
    """The events of one generation: Accepted, Tokens, ..., Finished; an error is raised as FairwayError.

        async with client.generate("tiny", "Once upon a time") as stream:
            async for event in stream: ...

    Every token is yielded once and in order per choice, also when another gateway continues the generation.
    ``Accepted`` may be repeated while nothing was delivered: the last one is valid. Leaving the block, or
    ``aclose``, ends the stream and cancels it at the gateway; so does garbage collection of the stream. A
    generation with a key then runs on for the server's grace period, unless it is part of a session.

    One task reads at a time. Another task of the same loop may call ``aclose``: the reader then gets Closed.
    """

    def __init__(
        self,
        core: Core,
        carrier: Carrier,
        generation: pb.Generation,
        timeout_s: float,
        *,
        own_key: bool = False,
    ) -> None:
        """``own_key``: the client generated the key and may drop it. Raises ValueError for no timeout."""
        self._core = core
        self._carrier = carrier
        self._generation = generation
        self._timeout_s = checked_timeout_s(timeout_s)
        self._own_key = own_key
        self._positions = DeliveryPositions()
        self._guard = Guard()
        self._events = self._run()
        self._finished: Finished | None = None
        self._attempts = 0

    @property
    def idempotency_key(self) -> str:
        """The key of each attempt; empty: none, or the client generated it and the server rejected it."""
        return self._generation.idempotency_key

    @property
    def accepted(self) -> Accepted | None:
        return self._positions.accepted

    @property
    def finished(self) -> Finished | None:
        """The terminal event, once it was read."""
        return self._finished

    @property
    def attempts(self) -> int:
        """How often the generation was sent so far."""
        return self._attempts

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._finished is None:
            self._guard.check()
        return await self._guard.run(anext(self._events))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Return once the stream's local work has ended and the server call is cancelled. Idempotent."""
        if self._guard.busy:
            self._guard.close("the stream was closed while it was read")
            await self._guard.idle()
        else:
            await self._events.aclose()

    async def interrupt(self, why: str) -> None:
        """Close it for a closed client: present and later reads raise Closed."""
        self._guard.close(why)
        await self._guard.idle()
        await self._events.aclose()

    async def text(self, choice: int = 0) -> AsyncIterator[str]:
        """Yield the text of one choice as it arrives; closes the stream at its end."""
        async with aclosing(self):
            async for event in self:
                if isinstance(event, Tokens) and event.choice == choice and event.text:
                    yield event.text

    async def collect(self) -> Completion:
        """Read to the end and return the complete answer, as ``Client.complete`` does."""
        texts: defaultdict[int, list[str]] = defaultdict(list)
        ids: defaultdict[int, list[int]] = defaultdict(list)
        logprobs: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)
        parts: defaultdict[int, list[OutputPart]] = defaultdict(list)
        async with aclosing(self):
            async for event in self:
                if isinstance(event, Tokens):
                    texts[event.choice].append(event.text)
                    ids[event.choice].extend(event.ids)
                    logprobs[event.choice].extend(event.logprobs)
                    parts[event.choice].extend(event.parts)
        accepted, end = self.accepted, self._finished
        assert accepted is not None
        assert end is not None
        choices = []
        for one in sorted(end.choices, key=lambda one: one.choice):
            text = "".join(texts[one.choice])
            answer = answer_of((*parts[one.choice], *one.parts))
            choices.append(
                convert.completed_choice(
                    text,
                    tuple(ids[one.choice]),
                    tuple(logprobs[one.choice]),
                    one,
                    content=answer.content if self._generation.parts else text,
                    reasoning=answer.reasoning,
                    calls=answer.calls,
                )
            )
        return Completion(accepted, tuple(choices), end)

    async def _run(self) -> AsyncGenerator[Event, None]:
        attempts = Attempts(self._core, self._timeout_s)
        while True:
            self._positions.attempt_began()
            attempt = await self._open(attempts)
            self._attempts = attempts.count
            try:
                async with aclosing(attempt):
                    while self._finished is None:
                        event = self._undelivered(await attempt.receive())
                        if event is not None:
                            yield event
                            if isinstance(event, Tokens):
                                attempt.consumed(event.choice, self._positions.delivered(event.choice))
                self._core.pool.succeeded(attempt.endpoint)
                return
            except TimeoutError:
                raise self._with_progress(attempts.deadline_error()) from None
            except FairwayError as error:
                await self._retry(error, attempts, attempt.endpoint)

    async def _open(self, attempts: Attempts) -> Attempt:
        try:
            return await self._carrier.open(self._generation, attempts, self._positions)
        except FairwayError as error:
            raise self._with_progress(error) from None

    def _undelivered(self, event: Event) -> Event | None:
        if isinstance(event, Tokens):
            return self._positions.undelivered(event)
        if isinstance(event, Accepted):
            return event if self._positions.accept(event) else None
        self._finished = self._positions.last(event)
        return self._finished

    async def _retry(self, error: FairwayError, attempts: Attempts, endpoint: Endpoint) -> None:
        may_drop = self._own_key and self._positions.accepted is None
        if may_drop and attempts.drop_key(error, endpoint, self._generation):
            return
        keyed = bool(self.idempotency_key)
        await attempts.failed(
            self._with_progress(error),
            endpoint,
            repeatable=keyed or not self._positions.has_output,
            attaches=keyed and self._positions.accepted is not None,
        )

    def _with_progress(self, error: FairwayError) -> FairwayError:
        error.delivered_tokens = self._positions.delivered_tokens
        return error
