"""Encryption of the chunks of idempotency records: AES-256-GCM, with keys that belong to one owner's run.

    installation's secret --HKDF-SHA256--> key of a tenant --HMAC-SHA256--> key of a record under one epoch

A stored chunk is a header in clear, a random nonce, the ciphertext and its tag:

    version (1 byte), key id (4), epoch (8), position in the log (4), nonce (12), ciphertext, tag (16)

The tag also covers the header, the tenant and the record, so a chunk is valid only where it was written. A
key seals only the chunks of one run, so random nonces of 96 bits do not repeat.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from services.core.errors import IntegrityError
from services.ports.idempotency import RecordKey

_VERSION: Final = 1
_HEADER: Final = struct.Struct(">B4sQI")
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_KEY_BYTES: Final = 32
_PURPOSE: Final = b"fairway record v1\0"
# Derived keys that stay in memory: of tenants and of runs.
_CACHED_KEYS: Final = 4096
# Bytes that a stored chunk has more than the chunk.
OVERHEAD_BYTES: Final = _HEADER.size + _NONCE_BYTES + _TAG_BYTES


@dataclass(frozen=True, slots=True)
class Opened:
    """A chunk as its writer sealed it: under its epoch, at its position in the log."""

    epoch: int
    position: int
    chunk: bytes


class RecordCipher:
    """Seals with the first of the secrets, and opens what any of them sealed."""

    def __init__(self, secrets: Sequence[str], random_bytes: Callable[[int], bytes]) -> None:
        """``random_bytes`` returns that many unpredictable bytes."""
        self._secrets = {_key_id(secret): secret.encode() for secret in secrets}
        self._key_id = _key_id(secrets[0])
        self._random_bytes = random_bytes
        self._tenant_key = lru_cache(_CACHED_KEYS)(self._derive_tenant_key)
        self._cipher = lru_cache(_CACHED_KEYS)(self._derive_cipher)

    def seal(self, key: RecordKey, epoch: int, position: int, chunk: bytes) -> bytes:
        """Return the chunk as it is stored in the record of ``key``."""
        header = _HEADER.pack(_VERSION, self._key_id, epoch, position)
        nonce = self._random_bytes(_NONCE_BYTES)
        cipher = self._cipher(self._key_id, key, epoch)
        return header + nonce + cipher.encrypt(nonce, chunk, header + _name(key))

    def open(self, key: RecordKey, stored: bytes) -> Opened:
        """Return the chunk. Raises IntegrityError unless it was sealed for this record and is unchanged."""
        if len(stored) < OVERHEAD_BYTES:
            raise IntegrityError("a stored chunk is too short")
        header, rest = stored[: _HEADER.size], stored[_HEADER.size :]
        version, key_id, epoch, position = _HEADER.unpack(header)
        if version != _VERSION:
            raise IntegrityError(f"a stored chunk has the format {version}")
        if key_id not in self._secrets:
            raise IntegrityError(f"no record key has the id {key_id.hex()}")
        nonce, sealed = rest[:_NONCE_BYTES], rest[_NONCE_BYTES:]
        try:
            chunk = self._cipher(key_id, key, epoch).decrypt(nonce, sealed, header + _name(key))
        except InvalidTag:
            raise IntegrityError("a stored chunk is not authentic") from None
        return Opened(epoch, position, chunk)

    def _derive_cipher(self, key_id: bytes, key: RecordKey, epoch: int) -> AESGCM:
        run = epoch.to_bytes(8, "big") + key.digest.encode()
        return AESGCM(hmac.digest(self._tenant_key(key_id, key.tenant_id), run, "sha256"))

    def _derive_tenant_key(self, key_id: bytes, tenant_id: str) -> bytes:
        info = _PURPOSE + tenant_id.encode()
        return HKDF(SHA256(), _KEY_BYTES, salt=None, info=info).derive(self._secrets[key_id])


def _name(key: RecordKey) -> bytes:
    """Return tenant and record; a tenant's id contains no zero byte."""
    return key.tenant_id.encode() + b"\0" + key.digest.encode()


def _key_id(secret: str) -> bytes:
    return hashlib.sha256(b"fairway record key id v1\0" + secret.encode()).digest()[:4]
