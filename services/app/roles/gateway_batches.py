"""Files and batches of a gateway: their stores, their service, and the runner of batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex
from typing import Final

from services.adapters.blobs.folder import FolderBlobs
from services.adapters.blobs.s3 import S3Blobs, open_bucket
from services.adapters.blobs.sealed import SealedParts
from services.adapters.record_cipher import RecordCipher
from services.app.environment import Environment
from services.core.batches import (
    BATCH_OWNERS,
    BATCHES,
    FILES,
    BatchRecord,
    BatchStatus,
    OwnerRecord,
    StoredFile,
    batch_key,
)
from services.core.records import Gateway
from services.gateway.batches.files import FileLimits, FileService
from services.gateway.batches.owner import BatchOwner, OwnerLimits
from services.gateway.batches.ports import BatchPorts
from services.gateway.batches.service import BatchService, TenantBatchLimits
from services.gateway.batches.store import BatchStore
from services.gateway.faces.batches.lines import HttpLines
from services.gateway.faces.openai.exchange import BodyReader
from services.gateway.rows.service import RowsService
from services.gateway.service import GatewayService
from services.ports.blob_store import BlobStore
from services.runtime.fleet_state.informer import RecordView
from services.runtime.fleet_state.lease import LeaseHolder
from services.runtime.identity import KeyDirectory

_DAY_S: Final = 86_400.0
_MAX_BATCHES: Final = 8  # most batches that run at once


@dataclass(frozen=True, slots=True)
class GatewayBatches:
    """``service`` answers at once; ``start`` begins to run batches, and ``close`` leaves them to others."""

    service: BatchService
    _environment: Environment
    _owner: BatchOwner | None

    def start(self) -> None:
        environment = self._environment
        environment.supervisor.spawn("file sweep", self.service.files.sweep_forever(environment.rng))
        if self._owner is not None:
            environment.supervisor.spawn("batches", self._owner.run())

    async def close(self) -> None:
        if self._owner is not None:
            await self._owner.close()


def open_batches(
    environment: Environment,
    service: GatewayService,
    rows: RowsService,
    identity: KeyDirectory,
    gateway_id: str,
    gateways: RecordView[Gateway],
    cipher: RecordCipher,
) -> GatewayBatches:
    """Return the files and batches of this gateway. Raises ConfigError, StoreUnavailable."""
    settings, clock = environment.settings, environment.clock
    store = BatchStore(environment.store, clock)
    parts = SealedParts(_open_blobs(environment), cipher)
    batches = environment.informer(BATCHES, BatchRecord)
    retention_s = settings.files_retention_days * _DAY_S
    limits = FileLimits(settings.files_max_bytes, settings.files_tenant_bytes, retention_s=retention_s)
    view = environment.informer(FILES, StoredFile)
    files = FileService(
        store, parts, view, batches, clock, limits, new_id=_new_id, retention_of=identity.retention_s
    )
    found = BatchService(files, store, batches, clock, TenantBatchLimits(), new_id=_new_id)
    owner = None
    if settings.batch_lines:
        lines = HttpLines(service, rows, BodyReader(settings.max_body_bytes), clock, environment.ids)
        ports = _ports(environment, store, parts, files, lines, identity, batches, service.deployment_of)
        owner = _owner(
            environment,
            ports,
            batches,
            gateways,
            gateway_id,
            serves_others=lambda: service.serves_clients,
            may_hold=identity.may_hold,
        )
    return GatewayBatches(found, environment, owner)


def _ports(
    environment: Environment,
    store: BatchStore,
    parts: SealedParts,
    files: FileService,
    lines: HttpLines,
    identity: KeyDirectory,
    batches: RecordView[BatchRecord],
    deployment_of: Callable[[str], str],
) -> BatchPorts:
    counted = environment.metrics.counter(
        "fairway_gateway_batch_lines_total",
        "Lines of batches: completed, failed, or tried again",
        ("outcome",),
    )
    return BatchPorts(
        store,
        parts,
        lines,
        environment.clock,
        environment.rng,
        tenant_of=identity.still_valid,
        status_of=lambda batch: status_of(batch, batches),
        count=counted.add,
        room_bytes=files.room_bytes,
        deployment_of=deployment_of,
        max_line_bytes=environment.settings.max_body_bytes,
        retention_s=files.retention_s,
    )


def status_of(batch: BatchRecord, batches: RecordView[BatchRecord]) -> BatchStatus:
    """Return the status of a running batch; the view's counts once it is cancelled there."""
    held = batches.view.get(batch_key(batch.tenant, batch.batch_id))
    cancelled = held is not None and held.record.status is BatchStatus.CANCELLING
    return BatchStatus.CANCELLING if cancelled else batch.status


def _owner(
    environment: Environment,
    ports: BatchPorts,
    batches: RecordView[BatchRecord],
    gateways: RecordView[Gateway],
    gateway_id: str,
    serves_others: Callable[[], bool],
    may_hold: Callable[[str], bool],
) -> BatchOwner:
    settings = environment.settings
    owner = BatchOwner(
        ports,
        batches,
        environment.informer(BATCH_OWNERS, OwnerRecord),
        LeaseHolder(environment.store, environment.clock, ttl_s=settings.lease_ttl_s),
        environment.supervisor,
        gateway_id=gateway_id,
        limits=OwnerLimits(_MAX_BATCHES, settings.batch_lines, settings.batch_busy_lines),
        gateways=lambda: len(gateways.view),
        serves_others=serves_others,
        may_hold=may_hold,
    )
    environment.metrics.level(
        "fairway_gateway_batches_running", "Batches that run here", lambda: float(owner.running)
    )
    return owner


def _open_blobs(environment: Environment) -> BlobStore:
    """Return the store of parts. It is not the registry's, whose unreferenced blobs are collected as
    garbage."""
    settings = environment.settings
    if settings.files_dir is None and settings.blob_store != "folder":
        url = settings.blob_store.rstrip("/") + "/files"
        return S3Blobs(open_bucket(settings.model_copy(update={"blob_store": url}), environment.clock))
    folder = settings.files_dir
    if folder is None:
        return FolderBlobs(settings.state_dir / "files", environment.disk)
    return FolderBlobs(folder, environment.disk_reserve("files_dir", folder))


def _new_id() -> str:
    return token_hex(12)
