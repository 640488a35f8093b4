"""Usage accounting of one version's rows: device time of batches, shared over their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.core.generation import Usage
from services.worker.streams.charges import DeviceTime, Tally
from services.worker.streams.live_row import LiveRow


@dataclass(slots=True)
class _RequestHere:
    """The rows of one request on this worker."""

    live: int = 0
    tokens: int = 0
    device_s: float = 0.0


class RowCharges:
    """Charges each batch once: the shares of its rows add up to its time. Single writer: the batcher.

    A request is reported once its last row here has ended. Time of batches that were not answered is charged
    to nobody.
    """

    def __init__(self, version_digest: str, model: str, tally: Tally, device: DeviceTime | None) -> None:
        """``model``: the deployment. Without ``device`` no device time is reported."""
        self._version_digest = version_digest
        self._model = model
        self._tally = tally
        self._device = device
        self._requests: dict[str, _RequestHere] = {}  # bounded by the rows

    def began(self, row: LiveRow) -> None:
        """Count a row that was accepted."""
        request = self._requests.get(row.spec.request_id)
        if request is None:
            request = self._requests[row.spec.request_id] = _RequestHere()
        request.live += 1

    def ran(self, rows: Sequence[LiveRow], run_s: float) -> None:
        """Share the time of a batch over these rows by their lengths."""
        whole = sum(max(1, row.length) for row in rows)
        for row in rows:
            row.device_s += run_s * max(1, row.length) / whole
        if self._device is not None:
            self._device.busy_s += run_s
            self._device.attributed_s += run_s if rows else 0.0

    def wasted(self, run_s: float) -> None:
        """Count the time of a batch without answers."""
        if self._device is not None:
            self._device.busy_s += run_s

    def ended(self, row: LiveRow) -> None:
        """Count a row that ended, and report its request after the last."""
        self._tally.add_rows((row.spec.tenant_id, self._version_digest, row.spec.priority), 1, row.device_s)
        request = self._requests[row.spec.request_id]
        request.live -= 1
        request.device_s += row.device_s
        request.tokens += row.tokens if row.device_s else 0
        if request.live:
            return
        del self._requests[row.spec.request_id]
        if self._device is not None and request.device_s:
            self._device.rows_ended(
                request_id=row.spec.request_id,
                tenant=row.spec.tenant_id,
                model=self._model,
                version_digest=self._version_digest,
                usage=Usage(prompt_tokens=request.tokens, output_tokens=0, device_s=request.device_s),
            )
