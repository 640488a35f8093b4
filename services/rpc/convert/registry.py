"""Manifests and versions between the wire and the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fairway.v1 import registry_pb2
from services.core.manifest import Manifest, ManifestFile
from services.core.records import VersionRecord
from services.rpc.convert.inference import timestamp
from services.rpc.convert.mirror import Mirror

_MANIFEST: Final = Mirror(
    Manifest,
    registry_pb2.Manifest,
    {"files": Mirror(ManifestFile, registry_pb2.ManifestFile).each("files")},
)
manifest_from_proto: Final = _MANIFEST.from_proto
manifest_to_proto: Final = _MANIFEST.to_proto


def version_to_proto(
    record: VersionRecord, manifest: Manifest | None, tags: Sequence[str] = ()
) -> registry_pb2.Version:
    """Return a version; without a manifest its field stays unset, as in lists."""
    return registry_pb2.Version(
        model=record.model,
        digest=record.digest,
        manifest=None if manifest is None else manifest_to_proto(manifest),
        create_time=timestamp(record.create_unix_s),
        size_bytes=record.size_bytes,
        tags=tags,
    )


def record_from_proto(message: registry_pb2.Version) -> VersionRecord:
    return VersionRecord(
        model=message.model,
        digest=message.digest,
        size_bytes=message.size_bytes,
        create_unix_s=message.create_time.ToMicroseconds() / 1_000_000,
    )
