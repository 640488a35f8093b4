"""Sealed secrets: the answers to repeated requests, stored for the ten minutes of a request id.

The store holds ``nonce, secret XOR pad`` where the pad is an HMAC-SHA256 over nonce and context, under a key
derived for this purpose alone. A reader of the store without the installation's key learns nothing; the hash
that is stored with the key detects a changed secret.
"""

from __future__ import annotations

import hmac
from typing import Final

from services.core.errors import IntegrityError

SECRET_BYTES: Final = 32
_NONCE_BYTES: Final = 16
_PURPOSE: Final = b"fairway sealed answer v1"


class Sealer:
    """Every control plane of an installation has the same ``key``."""

    def __init__(self, key: bytes) -> None:
        if len(key) < 16:
            raise ValueError("a sealing key has at least 16 bytes")
        self._key = hmac.digest(key, _PURPOSE, "sha256")

    def seal(self, secret: bytes, context: str, nonce: bytes) -> str:
        """Return a secret of ``SECRET_BYTES`` as text. ``nonce`` is random and used once."""
        if len(secret) != SECRET_BYTES or len(nonce) < _NONCE_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, a nonce at least {_NONCE_BYTES}")
        nonce = nonce[:_NONCE_BYTES]
        return (nonce + _xor(secret, self._pad(nonce, context))).hex()

    def open(self, sealed: str, context: str) -> bytes:
        """Return the secret sealed in this context. Another context or key gives another secret."""
        try:
            data = bytes.fromhex(sealed)
        except ValueError as exc:
            raise IntegrityError("a sealed answer is malformed") from exc
        if len(data) != _NONCE_BYTES + SECRET_BYTES:
            raise IntegrityError("a sealed answer has another size")
        return _xor(data[_NONCE_BYTES:], self._pad(data[:_NONCE_BYTES], context))

    def _pad(self, nonce: bytes, context: str) -> bytes:
        return hmac.digest(self._key, nonce + context.encode(), "sha256")


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))
