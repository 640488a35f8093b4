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


class BatcherTelemetry:
    """The instruments of one version's batcher."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._label = label = metrics.models.of(model)
        self._rows = metrics.histogram(
            "fairway_worker_batch_rows", "Rows of a batch", _BY_MODEL, bounds=COUNTS
        ).cell(label)
        self._fill = metrics.histogram(
            "fairway_worker_batch_fill_ratio",
            "Rows of a batch over the most that its width may have",
            _BY_MODEL,
            bounds=_RATIOS,
        ).cell(label)
        self._padding = metrics.histogram(
            "fairway_worker_batch_padding_ratio",
            "Padding among the computed tokens of a batch; of models with a length",
            _BY_MODEL,
            bounds=_RATIOS,
        ).cell(label)
        self._starts = metrics.counter(
            "fairway_worker_batch_starts_total", "Batches that started, by cause", ("model", "cause")
        )
        seconds = metrics.counter(
            "fairway_worker_row_seconds_total",
            "Latency of answered rows on the worker: waiting, from arrival until the batch starts; computing",
            ("model", "part"),
        )
        self._waiting_s, self._computing_s = seconds.cell(label, "waiting"), seconds.cell(label, "computing")
        self._ended = metrics.counter(
            "fairway_worker_rows_ended_total", "Rows that ended, by reason", ("model", "reason")
        )
        self._runs = metrics.counter(
            "fairway_worker_isolation_runs_total",
            "Runs that search a failed batch for its cause, by process: serving, sacrificial",
            ("model", "process"),
        )

    def ran(self, *, lengths: Sequence[int], width: int, most_rows: int, cause: str) -> None:
        """Count an answered batch. ``lengths``: tokens by row; ``width``: of each padded row, 0 without
        padding."""
        rows = len(lengths)
        self._rows.observe(rows)
        self._fill.observe(min(1.0, rows / most_rows))
        if width:
            self._padding.observe(1.0 - sum(lengths) / (width * rows))
        self._starts.add(self._label, cause)

    def answered(self, *, wait_s: float, run_s: float) -> None:
        self._waiting_s.value += wait_s
        self._computing_s.value += run_s

    def ended(self, reason: str) -> None:
        self._ended.add(self._label, reason)

    def searched(self, place: str) -> None:
        self._runs.add(self._label, place)
