"""The usage ledger and the audit log of a control plane, and the outboxes of processes that report use."""

from __future__ import annotations

from typing import Final

from services.adapters.blobs.s3 import open_bucket
from services.adapters.grpc.leader_calls import GrpcUsage, LeadingPlane
from services.adapters.ledger_stores import AUDIT, FolderLedger, S3Ledger
from services.adapters.usage.outbox import DiskOutbox
from services.app.environment import Environment
from services.app.roles.shared import open_calls
from services.controlplane.usage.ledger import UsageLedger
from services.controlplane.usage.servicer import UsageListing
from services.controlplane.usage.telemetry import LedgerTelemetry
from services.core.errors import FailedPrecondition
from services.ports.usage import LedgerStore, TileStore
from services.runtime.fleet_state.leadership import Election

_DAY_S: Final = 86_400.0


def open_ledger(
    environment: Environment, election: Election, leader: LeadingPlane
) -> tuple[UsageLedger, UsageListing]:
    """Return the usage ledger, and the queries of it."""
    settings, clock = environment.settings, environment.clock
    if settings.usage_dir is not None:
        environment.disk_reserve("usage_dir", settings.usage_dir)
    ledger = UsageLedger(
        open_ledger_store(environment),
        clock,
        election,
        writer=environment.ids.request_id(),
        retention_s=settings.usage_retention_days * _DAY_S,
        telemetry=LedgerTelemetry(
            environment.metrics, waiting=lambda: ledger.waiting, damaged=lambda: ledger.damaged
        ),
    )
    return ledger, UsageListing(ledger, leader, clock)


def open_ledger_store(environment: Environment) -> LedgerStore:
    """Return the store of the settings. Raises ConfigError, StoreUnavailable for an unusable folder."""
    settings = environment.settings
    if settings.usage_dir is None and settings.blob_store != "folder":
        return S3Ledger(open_bucket(settings, environment.clock))
    return FolderLedger(settings.usage_dir or settings.state_dir / "usage")


def open_tile_store(environment: Environment) -> TileStore:
    """Return the store of the audit log. Raises as ``open_ledger_store``."""
    settings = environment.settings
    if settings.audit_dir is None and settings.blob_store != "folder":
        return S3Ledger(open_bucket(settings, environment.clock), AUDIT)
    return FolderLedger(settings.audit_dir or settings.state_dir / "audit", AUDIT)


def open_usage_outbox(environment: Environment) -> DiskOutbox:
    """Return the process's outbox of usage events. ``start_outbox`` follows before the first event."""
    outbox = DiskOutbox(
        environment.settings.state_dir / "usage",
        environment.ids.source_id(),
        open_calls(environment, GrpcUsage),
        environment.clock,
        metrics=environment.metrics,
    )
    environment.closing.push_async_callback(outbox.close)
    return outbox


async def start_outbox(environment: Environment, outbox: DiskOutbox) -> None:
    """Own the outbox's folder and deliver from now on.

    Raises FailedPrecondition when another process owns it.
    """
    try:
        await outbox.recover()
    except OSError as error:
        raise FailedPrecondition(f"the folder of usage events cannot be used: {error.strerror}") from error
    environment.supervisor.spawn("usage outbox", outbox.run())
