"""Idempotency records that leave this process only encrypted: a decorator of any ``IdempotencyStore``.

A chunk carries its owner's epoch and its position. A log is valid if its chunks are in the order in which
they were written, without a gap. A chunk may be there twice, because a write whose answer was lost is
repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final
from weakref import WeakKeyDictionary

import structlog

from services.adapters.record_cipher import Opened, RecordCipher
from services.core.errors import IntegrityError
from services.core.generation import Usage
from services.ports.idempotency import (
    Addition,
    Claim,
    Hold,
    IdempotencyStore,
    LogTail,
    Owned,
    RecordKey,
    RecordState,
    Written,
)
from services.ports.limiter import Reservation

log = structlog.get_logger()

_STORED: Final = (Written.KEPT, Written.WATCHED)


class EncryptedRecords:
    """``IdempotencyStore`` whose chunks are sealed before they reach ``store``.

    A record with a chunk that cannot be opened reads as expired, and an error is logged.
    """

    def __init__(self, store: IdempotencyStore, cipher: RecordCipher) -> None:
        self._store = store
        self._cipher = cipher
        # The position of the next chunk, while the owner keeps its hold.
        self._next: WeakKeyDictionary[Hold, int] = WeakKeyDictionary()

    async def claim(self, key: RecordKey, fingerprint: str, owner: str) -> Claim:
        claim = await self._store.claim(key, fingerprint, owner)
        if isinstance(claim, Owned):
            self._next[claim.hold] = claim.chunks
        return claim

    async def append(self, additions: Sequence[Addition]) -> tuple[Written, ...]:
        following: dict[Hold, int] = {}
        sealed = []
        for addition in additions:
            if addition.chunk:
                hold = addition.hold
                position = following.get(hold, self._next.get(hold, 0))
                following[hold] = position + 1
                addition = Addition(hold, self._seal(hold, position, addition.chunk))
            sealed.append(addition)
        answers = await self._store.append(sealed)
        for addition, answer in zip(additions, answers, strict=True):
            if addition.chunk and answer in _STORED:
                self._next[addition.hold] = following[addition.hold]
        return answers

    async def finish(
        self, hold: Hold, chunk: bytes, reservation: Reservation | None, usage: Usage
    ) -> Written:
        return await self._store.finish(hold, self._seal_last(hold, chunk), reservation, usage)

    async def release(
        self, hold: Hold, chunk: bytes, reservation: Reservation | None, usage: Usage
    ) -> Written:
        return await self._store.release(hold, self._seal_last(hold, chunk), reservation, usage)

    async def read(self, key: RecordKey, start: int, *, watch: bool) -> LogTail:
        overlap = 1 if start else 0  # the chunk before ``start``: the next one must follow it
        tail = await self._store.read(key, start - overlap, watch=watch)
        try:
            opened = [self._cipher.open(key, stored) for stored in tail.chunks]
            _check_order(opened, start - overlap)
        except IntegrityError as error:
            log.error("idempotency.record_unreadable", record=key.digest[:12], reason=error.message)
            return LogTail(RecordState.EXPIRED)
        return replace(tail, chunks=tuple(each.chunk for each in opened[overlap:]))

    async def delete(self, key: RecordKey) -> bool:
        return await self._store.delete(key)

    def _seal(self, hold: Hold, position: int, chunk: bytes) -> bytes:
        return self._cipher.seal(hold.key, hold.epoch, position, chunk)

    def _seal_last(self, hold: Hold, chunk: bytes) -> bytes:
        return self._seal(hold, self._next.get(hold, 0), chunk) if chunk else b""


def _check_order(opened: Iterable[Opened], start: int) -> None:
    """Raise IntegrityError unless the chunks from number ``start`` on follow each other."""
    before: Opened | None = None
    for number, each in enumerate(opened, start):
        if before is None:
            fits = number > 0 or each.position == 0
        elif each.epoch == before.epoch:
            fits = each.position in (before.position, before.position + 1)
        else:
            # A new owner counts the chunks that it found.
            fits = each.epoch > before.epoch and each.position == number
        if not fits:
            raise IntegrityError(f"chunk {number} of the log is not the one that was written there")
        before = each
