"""What a loaded fixed-cost model takes: time and memory, from a few warm-up batches.

The costs are what is assumed until batches were measured. They are high rather than low: a batch that takes
many times what is assumed counts as one that hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from services.worker.batcher.models.loading import row_of_zeros
from services.worker.batcher.models.model import FixedCostModel
from services.worker.batcher.models.rows import Padded
from services.worker.batcher.policy.start import MOST_BATCH_BYTES, MOST_PADDED_TOKENS, MOST_ROWS
from services.worker.engine.load.memory_meter import MemoryMeter
from services.worker.engine_protocol import RowCosts

ROWS: Final = 8  # size of the larger batches
LONGEST: Final = 512  # tokens of the row that is measured
LARGEST: Final = 144  # tiles of the image that is measured: 384 x 384 pixels
TRIES: Final = 3
LEAST_ROW_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """``largest_row_bytes``: working memory of the longest row alone."""

    costs: RowCosts
    largest_row_bytes: int
    largest_batch_bytes: int
    largest_batch_s: float


def measure(
    model: FixedCostModel, meter: Callable[[], MemoryMeter], *, now_s: Callable[[], float] = time.perf_counter
) -> MeasuredModel:
    """Return the costs after some runs of ``model``. ``meter`` measures the memory of the model's device.

    Rows with a length, in tokens or in tiles of an image, are measured at two lengths.
    """
    facts = model.facts
    alone, several = _batch(model, 1, 1), _batch(model, ROWS, 1)
    alone_s, several_s = _least_s(model, alone, now_s), _least_s(model, several, now_s)
    row_s = max(0.0, several_s - alone_s) / (ROWS - 1)
    if not facts.max_tokens:
        row_bytes = max(LEAST_ROW_BYTES, _peak_bytes(model, several, meter) // ROWS)
        costs = RowCosts(max(0.0, alone_s - row_s), row_s, 0.0, row_bytes, 0)
        return MeasuredModel(costs, row_bytes, MOST_ROWS * row_bytes, alone_s + MOST_ROWS * row_s)
    longest = min(facts.max_tokens, LARGEST if any(spec.is_image for spec in facts.inputs) else LONGEST)
    long = _batch(model, 1, longest)
    token_s = max(0.0, _least_s(model, long, now_s) - alone_s) / max(1, longest - 1)
    token_bytes = max(1, _peak_bytes(model, long, meter) // longest)
    costs = RowCosts(max(0.0, alone_s - row_s), row_s, token_s, LEAST_ROW_BYTES, token_bytes)
    sent_bytes = sum(tensor.nbytes for tensor in long.rows[0].values())
    most_tokens = max(facts.max_tokens, min(MOST_PADDED_TOKENS, MOST_BATCH_BYTES * longest // sent_bytes))
    batch_s = alone_s + MOST_ROWS * row_s + most_tokens * token_s
    row_bytes = LEAST_ROW_BYTES + facts.max_tokens * token_bytes
    batch_bytes = MOST_ROWS * LEAST_ROW_BYTES + most_tokens * token_bytes
    return MeasuredModel(costs, row_bytes, batch_bytes, batch_s)


def _batch(model: FixedCostModel, rows: int, length: int) -> Padded:
    return Padded([row_of_zeros(model.facts.inputs, length)] * rows, length)


def _least_s(model: FixedCostModel, batch: Padded, now_s: Callable[[], float]) -> float:
    found = float("inf")
    for _ in range(TRIES):
        began_s = now_s()
        model.run(batch)
        found = min(found, now_s() - began_s)
    return found


def _peak_bytes(model: FixedCostModel, batch: Padded, new_meter: Callable[[], MemoryMeter]) -> int:
    with new_meter() as meter:
        meter.begin()
        meter.run(lambda: model.run(batch))
        return meter.peak_bytes
