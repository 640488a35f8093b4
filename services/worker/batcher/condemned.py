"""The rows of one version that were condemned on this worker, by fingerprint: they do not run again here.

The gateway that receives the error writes the quarantine of the fleet. A client that left before the search
ended received none: its next try is answered from here, and then every gateway refuses the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from services.core.errors import PoisonedInput
from services.core.fixed_cost.rows import RawTensor
from services.core.poison.fingerprint import fingerprint_of_row
from services.worker.batcher.policy.isolation import RunFailure

KEPT_S: Final = 300.0  # long enough for the next try of a client, short after an operator lifts a quarantine
MOST_KEPT: Final = 256
_NO_SECRET: Final = b""  # these fingerprints stay in this process
_FAILED: Final = {
    RunFailure.RAISED: "raised an exception in the model of version {}",
    RunFailure.DIED: "ended the process of version {}",
    RunFailure.KILLED: "ran while the process of version {} was killed",
    RunFailure.HUNG: "did not end within the time limit on version {}",
}


class _Kept(NamedTuple):
    until_s: float
    failure: RunFailure
    deaths: int


class CondemnedRows:
    """Single writer: the batcher. Times are of one monotonic clock; the oldest row goes first."""

    def __init__(self, version_digest: str) -> None:
        self._digest = version_digest
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(
        self, inputs: Sequence[RawTensor], failure: RunFailure, deaths: int, now_s: float
    ) -> PoisonedInput:
        """Refuse these inputs for ``KEPT_S``; return the error. ``deaths``: processes that the row ended
        alone."""
        fingerprint = fingerprint_of_row(inputs, _NO_SECRET)
        self._kept.pop(fingerprint, None)
        if len(self._kept) >= MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        kept = self._kept[fingerprint] = _Kept(now_s + KEPT_S, failure, deaths)
        return self._error(kept)

    def find(self, inputs: Sequence[RawTensor], now_s: float) -> PoisonedInput | None:
        """Return why a row with these inputs is refused, None if it may run. Nothing is hashed while no row
        is kept."""
        while self._kept and next(iter(self._kept.values())).until_s <= now_s:
            del self._kept[next(iter(self._kept))]
        if not self._kept:
            return None
        kept = self._kept.get(fingerprint_of_row(inputs, _NO_SECRET))
        return None if kept is None else self._error(kept)

    def _error(self, kept: _Kept) -> PoisonedInput:
        return PoisonedInput(
            f"this input {_FAILED[kept.failure].format(self._digest)}, alone in its batch; processes that "
            f"ended with it: {kept.deaths}",
            version_digest=self._digest,
            deaths=kept.deaths,
        )
