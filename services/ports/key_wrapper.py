"""Port of what encrypts the data keys of tenants: a key-encryption key that may never leave its place.

Implementations: ``adapters/keys/key_file.py``, ``adapters/keys/pkcs11.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A data key under a key-encryption key."""

    wrapper: str  # name of the key-encryption key
    data: bytes


class KeyWrapper(Protocol):
    """Several key-encryption keys: one wraps, all unwrap.

    Every method raises KeyUnavailable, within a bounded time, while the place of the keys cannot be used.
    """

    async def current(self) -> str:
        """Return the name of the key that wraps."""

    async def wrap(self, key: bytes, context: str) -> Wrapped:
        """Encrypt a data key. It unwraps in the same context only."""

    async def unwrap(self, wrapped: Wrapped, context: str) -> bytes:
        """Return the data key.

        Raises KeyUnavailable for a key-encryption key that is not there. For changed bytes or another context
        it raises IntegrityError, or KeyUnavailable where the place of the keys does not report the cause.
        """
