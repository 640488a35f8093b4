"""Stored responses of the Responses API, tenant by tenant, shared by all gateways.

A response is a record of the same kind as that of an idempotency key, with a key space of its own, encrypted
and bounded likewise, for the retention time. Its log is what began it, then its answer. A record without an
answer is one that runs in the background. It is never held for longer than a write: what runs it is the
record of its idempotency key.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog
from msgspec import Struct

from services.core.errors import FairwayError, InvalidInput, OverQuota, ResultExpired, StoreUnavailable
from services.core.errors import IdempotencyKeysExceeded as RecordsExceeded
from services.core.generation import Usage
from services.ports.clock import Clock
from services.ports.idempotency import (
    Expired,
    IdempotencyStore,
    Owned,
    RecordKey,
    RecordState,
    Running,
    Written,
)

log = structlog.get_logger()

# What began a response, at most; its answer may have as much.
MAX_BEGIN_BYTES: Final = 2 * 1024**2
# A tenant's name has no slash: the space is that of responses.
RESPONSES_SPACE: Final = "/responses"
_FINGERPRINT: Final = "response"
_PAUSE_S: Final = 0.05
_PATIENCE_S: Final = 10.0
_NONE: Final = Usage(0, 0)
_STORED: Final = (Written.KEPT, Written.WATCHED)
_encode: Final = msgspec.msgpack.Encoder().encode


class BegunResponse(Struct, array_like=True, frozen=True, tag="b"):
    """What began a response. New fields are added at the end, with a default."""

    # Names its request in logs, usage and explanations.
    request_id: str
    # The requested model.
    model: str
    # The response that it continues; empty for none.
    previous_id: str
    background: bool
    # JSON: the response as it began, and its input items.
    response: bytes
    items: bytes
    # The generation that runs in the background, in the wire format; empty without one.
    generation: bytes = b""
    # A hash of the request, of a response with a client's idempotency key.
    digest: bytes = b""


class ResponseAnswer(Struct, array_like=True, frozen=True, tag="a"):
    """JSON: the whole response, and its output items again."""

    response: bytes
    output: bytes


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """``answer`` is None while the response runs in the background."""

    begun: BegunResponse
    answer: ResponseAnswer | None

    @property
    def size_bytes(self) -> int:
        """The size of its items."""
        return len(self.begun.items) + (len(self.answer.output) if self.answer is not None else 0)


_Entry = BegunResponse | ResponseAnswer
_decode: Final = msgspec.msgpack.Decoder(tuple[_Entry, ...]).decode


class ResponseStore:
    """The stored responses. Another tenant's id is not found.

    Raises StoreUnavailable, within a bounded time, when the shared state cannot be reached.
    """

    def __init__(self, store: IdempotencyStore, names_secret: bytes, owner: str, clock: Clock) -> None:
        """``store`` deletes a record when the retention time is over, and keeps open ones where others make
        room. ``owner``: this gateway's id."""
        self._store = store
        self._secret = names_secret
        self._owner = owner
        self._clock = clock

    async def begin(self, tenant_id: str, response_id: str, begun: BegunResponse) -> StoredResponse | None:
        """Store what begins a response. Return the response that has this id already, None if it is new.

        Raises InvalidInput when it is too large, OverQuota when the tenant has as many as may be or open ones
        leave no room for it, ResultExpired when the response of this id made room for others.
        """
        chunk = begin_chunk(begun)
        key = self._key(tenant_id, response_id)
        until_s = self._clock.monotonic_s() + _PATIENCE_S
        while self._clock.monotonic_s() < until_s:
            claim = await self._claim(key)
            if isinstance(claim, Owned):
                found = claim.chunks > 0
                written = await self._store.release(claim.hold, b"" if found else chunk, None, _NONE)
                if written is Written.TOO_LARGE:
                    raise _full(len(chunk))
                if not found and written in _STORED:
                    return None
            stored = await self.find(tenant_id, response_id)
            if stored is not None:
                return stored
            if isinstance(claim, Expired):
                raise ResultExpired(
                    "the response of this idempotency key is no longer stored: use another key"
                )
            await self._clock.sleep(_PAUSE_S)
        raise _busy()

    async def end(self, tenant_id: str, response_id: str, answer: ResponseAnswer) -> bool:
        """Store the answer of a response. Return whether this call did: False if it has one, or is gone.

        Raises OverQuota when it is too large: the response has no answer then, and a smaller one may be
        stored.
        """
        key, chunk = self._key(tenant_id, response_id), _encode((answer,))
        until_s = self._clock.monotonic_s() + _PATIENCE_S
        while self._clock.monotonic_s() < until_s:
            claim = await self._claim(key)
            if isinstance(claim, Owned):
                if not claim.chunks:  # it was deleted
                    await self._store.release(claim.hold, b"", None, _NONE)
                    return False
                written = await self._store.finish(claim.hold, chunk, None, _NONE)
                if written is Written.TOO_LARGE:
                    raise _too_large(len(chunk))
                return written in _STORED
            if not isinstance(claim, Running):
                return False
            await self._clock.sleep(_PAUSE_S)
        raise _busy()

    async def keep(
        self, tenant_id: str, response_id: str, begun: BegunResponse, answer: ResponseAnswer
    ) -> bool:
        """Store a response that is complete. Return whether it is stored; a failure is logged."""
        try:
            claim = await self._claim(self._key(tenant_id, response_id))
            if not isinstance(claim, Owned):  # the same one, of a repeated idempotency key
                return not isinstance(claim, Expired)
            written = await self._store.finish(claim.hold, _encode((begun, answer)), None, _NONE)
        except FairwayError as error:
            log.warning("response.not_stored", response_id=response_id, reason=error.reason)
            return False
        return written in _STORED

    async def find(self, tenant_id: str, response_id: str) -> StoredResponse | None:
        """Return a response; None if the tenant has none of this id."""
        tail = await self._store.read(self._key(tenant_id, response_id), 0, watch=False)
        return _stored(tail.chunks)

    async def is_open(self, tenant_id: str, response_id: str) -> bool:
        """Whether the response is stored and has no answer."""
        tail = await self._store.read(self._key(tenant_id, response_id), 1, watch=False)
        return tail.state in (RecordState.FREE, RecordState.RUNNING)

    async def delete(self, tenant_id: str, response_id: str) -> bool:
        """Delete a response; return whether there was one."""
        return await self._store.delete(self._key(tenant_id, response_id))

    def id_of_key(self, tenant_id: str, idempotency_key: str) -> str:
        """Return the request id of the response that has a client's idempotency key."""
        text = f"fairway response key v1\0{tenant_id}\0{idempotency_key}".encode()
        return "req_" + hmac.digest(self._secret, text, "sha256").hex()[:24]

    async def _claim(self, key: RecordKey) -> object:
        try:
            return await self._store.claim(key, _FINGERPRINT, self._owner)
        except RecordsExceeded as error:
            raise OverQuota(
                f"{error.metadata['limit']} responses of this tenant are stored, the most; delete some, or "
                "send store: false",
                retry_after_s=error.retry_after_s,
                limit=error.metadata["limit"],
            ) from None

    def _key(self, tenant_id: str, response_id: str) -> RecordKey:
        text = f"fairway stored response v1\0{tenant_id}\0{response_id}".encode()
        digest = hmac.digest(self._secret, text, "sha256").hex()[:32]
        return RecordKey(tenant_id + RESPONSES_SPACE, digest)


def begin_chunk(begun: BegunResponse) -> bytes:
    """Return what begins a response, encoded. Raises InvalidInput when it is too large."""
    chunk = _encode((begun,))
    if len(chunk) > MAX_BEGIN_BYTES:
        raise InvalidInput(
            f"the request has {len(chunk)} bytes, and a stored response at most {MAX_BEGIN_BYTES}; "
            "send store: false",
            field="store",
        )
    return chunk


def _stored(chunks: Iterable[bytes]) -> StoredResponse | None:
    begun: BegunResponse | None = None
    answer: ResponseAnswer | None = None
    for chunk in chunks:
        for entry in _decode(chunk):
            if isinstance(entry, BegunResponse):
                begun = entry
            else:
                answer = entry
    return StoredResponse(begun, answer) if begun is not None else None


def _too_large(size_bytes: int) -> OverQuota:
    return OverQuota(
        f"the answer has {size_bytes} bytes, more than a response may store; limit it, or send store: false"
    )


def _full(size_bytes: int) -> OverQuota:
    return OverQuota(
        f"there is no room to store {size_bytes} bytes of this response beside the tenant's others that run "
        "in the background; wait until one ends, cancel or delete one, or send a smaller one",
        retry_after_s=5.0,
    )


def _busy() -> StoreUnavailable:
    return StoreUnavailable("another gateway writes this response; send it again", retry_after_s=1.0)
