"""One row of a fixed-cost model on this worker, and what the worker's streams need of a version's batcher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.core.fixed_cost.rows import RowEnd, RowSpec
from services.core.fleet import PoolSnapshot

if TYPE_CHECKING:
    from services.worker.streams.outbox import Outbox


@dataclass(slots=True, eq=False)
class LiveRow:
    """Owned by its batcher until it ends."""

    spec: RowSpec  # the row as received
    outbox: Outbox  # frames of its gateway stream
    handle: int  # the gateway's
    number: int  # the batcher's
    accepted_s: float  # monotonic
    deadline_s: float  # monotonic; inf: none
    length: int = 0  # tokens, or tiles of an image; 0: rows of the model have no length
    tokens: int = 0
    device_s: float = 0.0  # its shares of batches so far
    dropped: bool = False  # cancelled: nothing is sent

    def end(self, end: RowEnd) -> None:
        """Queue the end for the gateway, unless it cancelled the row."""
        if not self.dropped:
            self.outbox.end_row(self.handle, end)


class RowTable(Protocol):
    """The rows of one version on this worker."""

    @property
    def version_digest(self) -> str: ...

    @property
    def ready(self) -> bool:
        """Whether a process runs batches."""

    @property
    def has_room(self) -> bool:
        """Whether one row more may be in flight."""

    @property
    def row_slots(self) -> int:
        """The most rows in flight."""

    @property
    def alone(self) -> int:
        """Rows in flight that gateways placed while no leader answered."""

    def __len__(self) -> int: ...

    def start(self, outbox: Outbox, handle: int, spec: RowSpec) -> None:
        """Run the row; its end goes to the outbox, at once if it cannot run."""

    def cancel(self, rows: Sequence[LiveRow]) -> None:
        """Drop rows that the gateway does not wait for any more."""

    def sweep(self, now_s: float) -> None:
        """Apply time limits. Called several times a second."""

    def reset_silence(self) -> None:
        """Start time limits again after a pause of this process."""

    def report(self, *, ready: bool) -> PoolSnapshot: ...

    def check_integrity(self) -> None: ...
