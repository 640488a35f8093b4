"""Encryption of idempotency records: AES-256-GCM by chunk, with keys that belong to one owner's run.

    data key of a tenant --HMAC-SHA256--> key of a record under one epoch

A stored chunk is a header in clear, a random nonce, the ciphertext and its tag:

    version (1 byte), key id (4), epoch (8), position in the log (4), nonce (12), ciphertext, tag (16)

The tag also covers the header, the tenant and the record, so a chunk is valid only where it was written. A
key seals only the chunks of one run, so random nonces of 96 bits do not repeat. Chunks of version 1 have a
key of the tenant that HKDF-SHA256 derives from a secret of the installation; they are opened and not written.

A log is valid if its chunks are in the order in which they were written, without a gap. A chunk may be there
twice, because a write whose answer was lost is repeated.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final
from weakref import WeakKeyDictionary

import structlog
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from services.adapters.keys.tenant_keys import KEY_BYTES, DataKey, TenantKeys
from services.core.errors import IntegrityError, KeyDestroyed
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

_DERIVED: Final = 1
_VERSION: Final = 2
_HEADER: Final = struct.Struct(">B4sQI")
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_PURPOSE: Final = b"fairway record v1\0"
# Bytes that a stored chunk has more than the chunk.
OVERHEAD_BYTES: Final = _HEADER.size + _NONCE_BYTES + _TAG_BYTES


@dataclass(frozen=True, slots=True)
class Opened:
    """A chunk as its writer sealed it: under its epoch, at its position in the log."""

    epoch: int
    position: int
    chunk: bytes


class RecordCipher:
    """Seals with the present key of a tenant, and opens what any of its keys sealed."""

    def __init__(
        self, keys: TenantKeys, random_bytes: Callable[[int], bytes], secrets: Sequence[str] = ()
    ) -> None:
        """``random_bytes`` returns that many unpredictable bytes. ``secrets`` open chunks of version 1."""
        self._keys = keys
        self._random_bytes = random_bytes
        self._secrets = {_key_id(secret): secret.encode() for secret in secrets}

    async def sealing(self, key: RecordKey) -> DataKey:
        """Return the key for ``seal``. Raises KeyUnavailable, KeyDestroyed, StoreUnavailable."""
        return await self._keys.sealing(key.tenant_id)

    def seal(self, data_key: DataKey, key: RecordKey, epoch: int, position: int, chunk: bytes) -> bytes:
        """Return the chunk as it is stored in the record of ``key``."""
        header = _HEADER.pack(_VERSION, data_key.key_id, epoch, position)
        nonce = self._random_bytes(_NONCE_BYTES)
        return header + nonce + _cipher(data_key, key, epoch).encrypt(nonce, chunk, header + _name(key))

    async def opening(self, key: RecordKey, stored: bytes) -> DataKey:
        """Return the key for ``open``. Raises as ``sealing``, and IntegrityError for an unknown key."""
        if len(stored) < OVERHEAD_BYTES:
            raise IntegrityError("a stored chunk is too short")
        version, key_id, _, _ = _HEADER.unpack(stored[: _HEADER.size])
        if version == _VERSION:
            return await self._keys.opening(key.tenant_id, key_id)
        if version != _DERIVED:
            raise IntegrityError(f"a stored chunk has the format {version}")
        if key_id not in self._secrets:
            raise IntegrityError(f"no record key has the id {key_id.hex()}")
        await self._keys.require_present(key.tenant_id)
        derived = HKDF(SHA256(), KEY_BYTES, salt=None, info=_PURPOSE + key.tenant_id.encode())
        return DataKey(key_id, derived.derive(self._secrets[key_id]))

    def open(self, data_key: DataKey, key: RecordKey, stored: bytes) -> Opened:
        """Return the chunk. Raises IntegrityError unless it was sealed for this record and is unchanged."""
        header, rest = stored[: _HEADER.size], stored[_HEADER.size :]
        _, _, epoch, position = _HEADER.unpack(header)
        nonce, sealed = rest[:_NONCE_BYTES], rest[_NONCE_BYTES:]
        try:
            chunk = _cipher(data_key, key, epoch).decrypt(nonce, sealed, header + _name(key))
        except InvalidTag:
            raise IntegrityError("a stored chunk is not authentic") from None
        return Opened(epoch, position, chunk)


def _cipher(data_key: DataKey, key: RecordKey, epoch: int) -> AESGCM:
    run = epoch.to_bytes(8, "big") + key.digest.encode()
    return AESGCM(hmac.digest(data_key.material, run, "sha256"))


def _name(key: RecordKey) -> bytes:
    """Return tenant and record; a tenant's id contains no zero byte."""
    return key.tenant_id.encode() + b"\0" + key.digest.encode()


def _key_id(secret: str) -> bytes:
    return hashlib.sha256(b"fairway record key id v1\0" + secret.encode()).digest()[:4]


log = structlog.get_logger()

_STORED: Final = (Written.KEPT, Written.WATCHED)


class EncryptedRecords:
    """A decorator of any ``IdempotencyStore``: its chunks are sealed before they reach ``store``.

    A record with a chunk that cannot be opened reads as expired, and an error is logged. A claim holds the
    tenant's key for as long as its record is written: a run that began goes on while keys are unavailable.
    """

    def __init__(self, store: IdempotencyStore, cipher: RecordCipher) -> None:
        self._store = store
        self._cipher = cipher
        # The position of the next chunk, and the key, while the owner keeps its hold.
        self._next: WeakKeyDictionary[Hold, int] = WeakKeyDictionary()
        self._keys: WeakKeyDictionary[Hold, DataKey] = WeakKeyDictionary()

    async def claim(self, key: RecordKey, fingerprint: str, owner: str) -> Claim:
        data_key = await self._cipher.sealing(key)  # first: without it the record is not to be claimed
        claim = await self._store.claim(key, fingerprint, owner)
        if isinstance(claim, Owned):
            self._next[claim.hold] = claim.chunks
            self._keys[claim.hold] = data_key
        return claim

    async def append(self, additions: Sequence[Addition]) -> tuple[Written, ...]:
        following: dict[Hold, int] = {}
        sealed = []
        for addition in additions:
            if addition.chunk:
                hold = addition.hold
                position = following.get(hold, self._next.get(hold, 0))
                following[hold] = position + 1
                addition = Addition(hold, await self._seal(hold, position, addition.chunk))
            sealed.append(addition)
        answers = await self._store.append(sealed)
        for addition, answer in zip(additions, answers, strict=True):
            if addition.chunk and answer in _STORED:
                self._next[addition.hold] = following[addition.hold]
        return answers

    async def finish(
        self, hold: Hold, chunk: bytes, reservation: Reservation | None, usage: Usage
    ) -> Written:
        return await self._store.finish(hold, await self._seal_last(hold, chunk), reservation, usage)

    async def release(
        self, hold: Hold, chunk: bytes, reservation: Reservation | None, usage: Usage
    ) -> Written:
        return await self._store.release(hold, await self._seal_last(hold, chunk), reservation, usage)

    async def read(self, key: RecordKey, start: int, *, watch: bool) -> LogTail:
        overlap = 1 if start else 0  # the chunk before ``start``: the next one must follow it
        tail = await self._store.read(key, start - overlap, watch=watch)
        try:
            opened = []
            for stored in tail.chunks:
                opened.append(self._cipher.open(await self._cipher.opening(key, stored), key, stored))
            _check_order(opened, start - overlap)
        except (IntegrityError, KeyDestroyed) as error:
            log.error("idempotency.record_unreadable", record=key.digest[:12], reason=error.message)
            return LogTail(RecordState.EXPIRED)
        return replace(tail, chunks=tuple(each.chunk for each in opened[overlap:]))

    async def delete(self, key: RecordKey) -> bool:
        return await self._store.delete(key)

    async def _seal(self, hold: Hold, position: int, chunk: bytes) -> bytes:
        data_key = self._keys.get(hold) or await self._cipher.sealing(hold.key)
        return self._cipher.seal(data_key, hold.key, hold.epoch, position, chunk)

    async def _seal_last(self, hold: Hold, chunk: bytes) -> bytes:
        return await self._seal(hold, self._next.get(hold, 0), chunk) if chunk else b""


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
