"""Port of the registry: the source of model versions.

Implementations: ``adapters/grpc/registry_client.py`` over gRPC, ``registry/service.py`` in the same process.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
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
