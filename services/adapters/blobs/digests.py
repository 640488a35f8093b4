"""Blob names, validated before one becomes a path."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from services.core.errors import IntegrityError, InvalidInput

PIECE_BYTES: Final = 256 * 1024
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


def hex_of(digest: str) -> str:
    """Return the 64 hex digits of ``sha256:<hex>``. Raises InvalidInput for anything else."""
    if _DIGEST.fullmatch(digest) is None:
        raise InvalidInput("a digest is sha256: and 64 lower-case hex digits", field="digest")
    return digest.removeprefix("sha256:")


def is_name(text: str) -> bool:
    """Return whether a stored object has the name of a blob. The stores delete only objects that have one."""
    return _DIGEST.fullmatch("sha256:" + text) is not None


def is_blob(data: bytes, digest: str) -> bool:
    """Return whether the bytes have that digest."""
    return hashlib.sha256(data).hexdigest() == hex_of(digest)


def damaged(digest: str) -> IntegrityError:
    """Return the error for a blob that was just set aside as damaged."""
    return IntegrityError(
        f"the stored bytes of {digest} are damaged and were set aside: publish a version with them again",
        digest=digest,
    )


class Verifier:
    """Compares the size and sha256 of the bytes fed to it with the announced values."""

    def __init__(self, digest: str, size_bytes: int, *, most_bytes: int) -> None:
        self._hex = hex_of(digest)
        if not 0 <= size_bytes <= most_bytes:
            raise InvalidInput(f"a blob has at most {most_bytes} bytes", field="size_bytes")
        self._digest = digest
        self._size_bytes = size_bytes
        self._received_bytes = 0
        self._hash = hashlib.sha256()

    def expect(self, more_bytes: int) -> None:
        """Raises IntegrityError if that many more bytes exceed the announced size. Call it before storing."""
        self._received_bytes += more_bytes
        if self._received_bytes > self._size_bytes:
            raise IntegrityError(
                f"{self._digest} has more than the announced {self._size_bytes} bytes",
                digest=self._digest,
                size_bytes=self._size_bytes,
            )

    def feed(self, data: bytes) -> None:
        self._hash.update(data)

    def finish(self) -> None:
        """Raises IntegrityError unless exactly the announced bytes were fed."""
        if self._received_bytes != self._size_bytes:
            raise IntegrityError(
                f"{self._digest} has {self._received_bytes} bytes instead of {self._size_bytes}",
                digest=self._digest,
                size_bytes=self._size_bytes,
                received_bytes=self._received_bytes,
            )
        if self._hash.hexdigest() != self._hex:
            raise IntegrityError(f"the bytes are not those of {self._digest}", digest=self._digest)
