"""Telemetry of batches: size, fill, padding, cause, waiting, isolation.

``fairway_worker_row_seconds_total`` shows whether the window is right: the share of ``waiting`` in the
latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from services.runtime.telemetry.metrics import COUNTS, Metrics

_BY_MODEL: Final = ("model",)
_RATIOS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

MOST_LINGERS: Final = 256  # models and widths


class BatchInstruments:
    """The instruments of all batchers of a worker process."""

    def __init__(self, metrics: Metrics) -> None:
        self.models = metrics.models
        self.rows = metrics.histogram(
            "fairway_worker_batch_rows", "Rows of a batch", _BY_MODEL, bounds=COUNTS
        )
        self.fill = metrics.histogram(
            "fairway_worker_batch_fill_ratio",
            "Rows of a batch over the most that its limits allow",
            _BY_MODEL,
            bounds=_RATIOS,
        )
        self.padding = metrics.histogram(
            "fairway_worker_batch_padding_ratio",
            "Padding among the computed tokens of a batch, of models that compute padding",
            _BY_MODEL,
            bounds=_RATIOS,
        )
        self.starts = metrics.counter(
            "fairway_worker_batch_starts_total",
            "Answered batches, by the cause of their start",
            ("model", "cause"),
        )
        self.seconds = metrics.counter(
            "fairway_worker_row_seconds_total",
            "Latency of answered rows on the worker: waiting, from arrival until the batch starts; computing",
            ("model", "part"),
        )
        self.ended = metrics.counter(
            "fairway_worker_rows_ended_total", "Rows that ended, by reason", ("model", "reason")
        )
        self.runs = metrics.counter(
            "fairway_worker_isolation_runs_total",
            "Runs that search a failed batch for its cause, by process: serving, sacrificial",
            ("model", "process"),
        )
        self.lingers: dict[tuple[str, str], float] = {}  # bound of the last decision by model and width
        metrics.gauge(
            "fairway_worker_batch_linger_bound_seconds",
            "The most that a batch may wait, as derived at the last decision: objective minus computing",
            self.lingers.items,
            ("model", "width"),
        )
        self.sacrificed = metrics.counter(
            "fairway_worker_sacrificed_processes_total",
            "Sacrificial processes that ended, or were killed for hanging, while they ran suspects",
            _BY_MODEL,
        )


class BatcherTelemetry:
    """The instruments of one version's batcher."""

    def __init__(self, instruments: BatchInstruments, model: str) -> None:
        self._all = instruments
        self._label = label = instruments.models.of(model)
        self._rows = instruments.rows.cell(label)
        self._fill = instruments.fill.cell(label)
        self._padding = instruments.padding.cell(label)
        self._waiting_s = instruments.seconds.cell(label, "waiting")
        self._computing_s = instruments.seconds.cell(label, "computing")

    def ran(
        self,
        *,
        lengths: Sequence[int],
        width: int,
        most_rows: int,
        cause: str,
        waited_s: float = 0.0,
        run_s: float = 0.0,
    ) -> None:
        """Count an answered batch. ``lengths`` are the tokens of each row; ``width`` is that of each padded
        row, 0 without padding; ``waited_s`` is the sum over the rows, ``run_s`` the time of the batch."""
        rows = len(lengths)
        self._rows.observe(rows)
        self._fill.observe(min(1.0, rows / most_rows))
        if width:
            self._padding.observe(1.0 - sum(lengths) / (width * rows))
        self._all.starts.add(self._label, cause)
        self._waiting_s.value += waited_s
        self._computing_s.value += rows * run_s

    def decided(self, *, width: int, linger_s: float) -> None:
        """Store the bound of the last decision. Widths are chosen anew now and then: old ones are dropped."""
        lingers, key = self._all.lingers, (self._label, str(width))
        if key not in lingers and len(lingers) >= MOST_LINGERS:
            lingers.clear()
        lingers[key] = max(0.0, linger_s)

    def ended(self, reason: str) -> None:
        """Count a row that ended, answered or not."""
        self._all.ended.add(self._label, reason)

    def sacrificed(self) -> None:
        """Count a sacrificial process that a batch ended."""
        self._all.sacrificed.add(self._label)

    def searched(self, place: str) -> None:
        """Count a run that searches a failed batch."""
        self._all.runs.add(self._label, place)
