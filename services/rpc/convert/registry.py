"""Manifests and versions between the wire and the core."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from fairway.v1 import registry_pb2
from services.core.manifest import Manifest, ManifestFile
from services.core.records import VersionRecord


def manifest_from_proto(message: registry_pb2.Manifest) -> Manifest:
    return Manifest(
        files=tuple(
            ManifestFile(file.path, file.size_bytes, file.digest, tuple(file.chunks))
            for file in message.files
        ),
        kind=message.kind,
        tokenizer_digest=message.tokenizer_digest,
        chat_template_digest=message.chat_template_digest,
        sampling_defaults_digest=message.sampling_defaults_digest,
        safety_policy_digest=message.safety_policy_digest,
        max_context_tokens=message.max_context_tokens,
        schema=message.schema,
        weights_digest=message.weights_digest,
        engine_limits_digest=message.engine_limits_digest,
    )


def manifest_to_proto(manifest: Manifest) -> registry_pb2.Manifest:
    return registry_pb2.Manifest(
        schema=manifest.schema,
        files=[
            registry_pb2.ManifestFile(
                path=file.path, size_bytes=file.size_bytes, digest=file.digest, chunks=file.chunks
            )
            for file in manifest.files
        ],
        kind=manifest.kind,
        tokenizer_digest=manifest.tokenizer_digest,
        chat_template_digest=manifest.chat_template_digest,
        sampling_defaults_digest=manifest.sampling_defaults_digest,
        safety_policy_digest=manifest.safety_policy_digest,
        max_context_tokens=manifest.max_context_tokens,
        weights_digest=manifest.weights_digest,
        engine_limits_digest=manifest.engine_limits_digest,
    )


def version_to_proto(
    record: VersionRecord, manifest: Manifest | None, tags: Sequence[str] = ()
) -> registry_pb2.Version:
    """Return a version; without a manifest its field stays unset, as in lists."""
    created = Timestamp()
    created.FromMicroseconds(round(record.create_unix_s * 1_000_000))
    return registry_pb2.Version(
        model=record.model,
        digest=record.digest,
        manifest=None if manifest is None else manifest_to_proto(manifest),
        create_time=created,
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
