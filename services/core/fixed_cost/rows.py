"""One row of a fixed-cost model on its way from a gateway to a worker and back.

Structs, not dataclasses: several of each are made for every row.
"""

from __future__ import annotations

from msgspec import Struct

from services.core.errors import FairwayError
from services.core.records import Priority


class RawTensor(Struct, frozen=True, array_like=True, gc=False):
    """One tensor of a row, without the batch dimension. ``data``: row-major, little-endian."""

    name: str
    datatype: str  # a data type of the public inference protocol v2
    shape: tuple[int, ...]
    data: bytes


class RowSpec(Struct, frozen=True):
    """One row to be computed by one worker."""

    request_id: str
    row: int  # its place in the request
    tenant_id: str
    version_digest: str
    inputs: tuple[RawTensor, ...]
    priority: Priority
    route_revision: int = 0
    incarnation: int = 0  # incarnation of the worker that the lease was for
    epoch: int = 0  # epoch of the leader that gave the lease; 0: placed while no leader answered
    time_left_s: float = 0.0  # time until the client's deadline; 0: none
    traceparent: str = ""
    transport_s: float = 0.0  # time there and back of 99 of 100 rows, as the gateway observed; 0: unknown
    # Target from the request's receipt to the answer, by the class's objective; 0: none.
    target_s: float = 0.0
    waited_s: float = 0.0  # how much of the target had passed when the row was sent
    tenant_weight: float = 1.0  # the tenant's share of the device
    node_group: str = ""  # the only nodes that may run it; empty: the shared ones


class BatchWindow(Struct, frozen=True, gc=False):
    """How long a batch might have waited when it started. See BatchWindow in common.proto."""

    width: int  # tokens of its length bucket; 0: rows of the model have no length
    linger_s: float  # the most that it might have waited; negative: it was late
    objective_s: float  # what was left of it to the row due first
    compute_s: float  # the quantile at the size that it would have reached
    transport_s: float
    reached_rows: int
    rate_per_s: float  # rate of open arrivals
    returning_rows: float  # rows on their way back from clients that wait for answers
    target_s: float = 0.0  # the latency target of the row due first


class RowEnd(Struct, frozen=True):
    """How a row ended on a worker: with its outputs, with an error, or lost with its device process."""

    outputs: tuple[RawTensor, ...] = ()
    error: FairwayError | None = None
    lost: bool = False  # it may run once more, on another worker
    device_s: float = 0.0  # its share of the batches that it ran in
    wait_s: float = 0.0  # wait until its batch started
    batch_rows: int = 0  # size of the batch that answered it
    batch_cause: str = ""  # why that batch started
    window: BatchWindow | None = None  # window of that batch, for the first row of a request in it
    stay_s: float = 0.0  # time on the worker; 0: unknown
    worker_id: str = ""  # the worker that ended it; its gateway adds it


class RowsRequest(Struct, frozen=True):
    """The rows of one admitted request, all of one version and one computation."""

    request_id: str
    tenant_id: str
    model: str
    version_digest: str
    rows: tuple[tuple[RawTensor, ...], ...]
    priority: Priority
    route_revision: int = 0
    tenant_weight: float = 1.0
    node_group: str = ""  # the one of ``RowSpec``
    isolation_waits: bool = False  # it waits while no node of its group serves its version
    kv_share: float = 0.0  # the one of ``PlaceSpec``, for rows that an engine computes
    deadline_s: float = float("inf")  # deadline on the injected clock
    traceparent: str = ""
    target_s: float = 0.0  # target from its receipt to its answer, by the class's objective; 0: none
    received_s: float = 0.0  # receipt on the injected clock; the target counts from it
