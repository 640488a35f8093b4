"""Key-encryption keys in a file, one secret per line: the first wraps, all unwrap.

The file is read at every use, which caches of unwrapped keys make rare: a changed file needs no restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from services.core.errors import IntegrityError, KeyUnavailable
from services.ports.key_wrapper import Wrapped
from services.runtime.config import ConfigError, read_secrets

_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_PURPOSE: Final = b"fairway key encryption v1"


class KeyFile:
    """``KeyWrapper`` on the secrets of a file: AES-256-GCM under keys that HKDF-SHA256 derives."""

    def __init__(self, path: Path, random_bytes: Callable[[int], bytes]) -> None:
        self._path = path
        self._random_bytes = random_bytes

    async def current(self) -> str:
        return _name(self._secrets()[0])

    async def wrap(self, key: bytes, context: str) -> Wrapped:
        secret, nonce = self._secrets()[0], self._random_bytes(_NONCE_BYTES)
        return Wrapped(_name(secret), nonce + _cipher(secret).encrypt(nonce, key, context.encode()))

    async def unwrap(self, wrapped: Wrapped, context: str) -> bytes:
        secret = next((each for each in self._secrets() if _name(each) == wrapped.wrapper), None)
        if secret is None:
            raise KeyUnavailable(
                f"the key file has no key {wrapped.wrapper}: add its line again, behind the first",
                retry_after_s=5.0,
                key=wrapped.wrapper,
            )
        nonce, data = wrapped.data[:_NONCE_BYTES], wrapped.data[_NONCE_BYTES:]
        try:
            return _cipher(secret).decrypt(nonce, data, context.encode())
        except (InvalidTag, ValueError):
            raise IntegrityError("a wrapped key is not authentic") from None

    def _secrets(self) -> tuple[str, ...]:
        try:
            return read_secrets(self._path)
        except ConfigError as error:
            raise KeyUnavailable("the key file of this service cannot be read", retry_after_s=5.0) from error


def _cipher(secret: str) -> AESGCM:
    return AESGCM(HKDF(SHA256(), _KEY_BYTES, salt=None, info=_PURPOSE).derive(secret.encode()))


def _name(secret: str) -> str:
    return "file:" + hashlib.sha256(b"fairway key name v1\0" + secret.encode()).hexdigest()[:8]
