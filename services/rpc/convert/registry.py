"""Manifests and versions between the wire and the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fairway.mirror import Mirror, Pair
from fairway.v1 import registry_pb2
from services.core.manifest import Manifest, ManifestFile
from services.core.records import VersionRecord
from services.core.swarm import ChunkOrder, ChunkOrders, ChunkPeer, ChunkReport, FailedChunk
from services.rpc.convert.inference import duration_of, seconds_of, timestamp

_MANIFEST: Final = Mirror(
    Manifest,
    registry_pb2.Manifest,
    {
        "files": Mirror(
            ManifestFile, registry_pb2.ManifestFile, {"starts": Pair("chunk_starts", unset=True, zero=True)}
        ).each("files")
    },
)
manifest_from_proto: Final = _MANIFEST.from_proto
manifest_to_proto: Final = _MANIFEST.to_proto


_PEER: Final = Mirror(ChunkPeer, registry_pb2.ChunkPeer)
_REPORT: Final = Mirror(
    ChunkReport,
    registry_pb2.ExchangeChunksRequest,
    {
        "node": _PEER.one("node"),
        "failed": Mirror(FailedChunk, registry_pb2.FailedChunk).each("failed"),
    },
)
report_from_proto: Final = _REPORT.from_proto
report_to_proto: Final = _REPORT.to_proto
_ORDERS: Final = Mirror(
    ChunkOrders,
    registry_pb2.ExchangeChunksResponse,
    {
        "orders": Mirror(ChunkOrder, registry_pb2.ChunkOrder, {"peer": _PEER.one("peer", unset=True)}).each(
            "orders"
        ),
        "peers": _PEER.each("peers"),
        "next_report_s": Pair("next_report", duration_of, seconds_of),
    },
)
orders_from_proto: Final = _ORDERS.from_proto
orders_to_proto: Final = _ORDERS.to_proto

_VERSION: Final = Mirror(
    VersionRecord,
    registry_pb2.Version,
    {"create_unix_s": Pair("create_time", timestamp, lambda moment: moment.ToMicroseconds() / 1_000_000)},
    apart=("computation", "engine_problems", "base_model", "base_digest", "kind"),
)
record_from_proto: Final = _VERSION.from_proto


def version_to_proto(
    record: VersionRecord,
    manifest: Manifest | None,
    tags: Sequence[str] = (),
    signatures: Sequence[str] = (),
) -> registry_pb2.Version:
    """Return a version; without a manifest its field stays unset, as in lists."""
    found = None if manifest is None else manifest_to_proto(manifest)
    return _VERSION.to_proto(
        record, manifest=found, tags=tags, servable_by=record.servable_by, signatures=signatures
    )
