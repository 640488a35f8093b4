"""How the rows of a request ran, for operators: values between roles."""

from __future__ import annotations

from msgspec import Struct

from services.core.fixed_cost.rows import BatchWindow
from services.core.records import Priority

MAX_TRIPS = 16  # most trips in one explanation


class RowTrip(Struct, frozen=True):
    """One stay of a row on a worker. See RowTrip in scheduler.proto."""

    row: int
    worker_id: str
    epoch: int  # epoch of the leader whose lease it had; 0: without a leader
    lease_number: int
    lease_slots: int
    slot_wait_s: float  # wait for a slot at the gateway
    stay_s: float  # time from the slot until the gateway received the end
    batch_wait_s: float = 0.0  # wait for a batch on the worker
    batch_rows: int = 0
    batch_cause: str = ""
    window: BatchWindow | None = None
    outcome: str = "ANSWERED"


class RowsExplanation(Struct, frozen=True):
    """How a gateway ran the rows of one request. ``trips`` has the first rows."""

    tenant: str
    model: str
    version_digest: str
    priority: Priority
    queued_unix_s: float
    rows: int
    took_s: float
    trips: tuple[RowTrip, ...] = ()
    gateway_id: str = ""
    target_s: float = 0.0  # latency target by the objective of its model and class; 0: none
