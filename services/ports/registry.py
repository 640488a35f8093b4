"""Ports of model versions: their source, and the check of their text files.

Implementations of the source: ``adapters/grpc/registry_client.py`` over gRPC, ``registry/service.py`` in the
same process.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Protocol

from services.core.manifest import Manifest
from services.core.records import VersionRecord


class VersionSource(Protocol):
    async def get_version(self, model: str, version: str) -> tuple[VersionRecord, Manifest]:
        """Return a version by digest or tag; the manifest has the record's digest.

        Raises NotFound, IntegrityError, StoreUnavailable or Unavailable.
        """

    def download(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a chunk from an offset on. The caller verifies them. Raises NotFound."""


class TextCheck(Protocol):
    async def fault(self, folder: Path, version_digest: str) -> str:
        """Return why a gateway cannot render conversations of this version; empty when it can or need not.

        Raises FailedPrecondition for files that a gateway cannot serve at all, Unavailable where a retry may
        help.
        """
