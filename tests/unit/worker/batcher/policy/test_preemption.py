"""How many rows run between the layers of a long batch."""

from __future__ import annotations

import pytest

from services.worker.batcher.policy.cost_curve import CostCurve, CostPrior
from services.worker.batcher.policy.start import LongBatch

CURVE = CostCurve(CostPrior(batch_s=0.001, row_s=0.0, token_s=0.0001))


@pytest.mark.parametrize(
    ("batch", "waiting", "rows"),
    [
        (LongBatch(rows=1, whole_s=0.020, left_s=0.019, lent_s=0.0), 3, 3),
        (LongBatch(rows=1, whole_s=0.020, left_s=0.0195, lent_s=0.0), 100, 18),  # those that fit what is left
        (LongBatch(rows=1, whole_s=0.020, left_s=0.019, lent_s=0.0165), 100, 2),  # and half of the device
        (LongBatch(rows=1, whole_s=0.020, left_s=0.019, lent_s=0.020), 100, 0),
        (LongBatch(rows=1, whole_s=0.020, left_s=0.0015, lent_s=0.0), 100, 0),  # its end is as near
        (LongBatch(rows=1, whole_s=0.020, left_s=-1.0, lent_s=0.0), 100, 0),
        (LongBatch(rows=20, whole_s=0.020, left_s=0.019, lent_s=0.0), 2, 0),  # twenty rows wait for two
        (LongBatch(rows=20, whole_s=0.020, left_s=0.019, lent_s=0.0), 0, 0),
        (LongBatch(rows=4, whole_s=0.020, left_s=0.019, lent_s=0.0), 2, 2),
    ],
)
def test_rows_run_between_the_layers_where_that_lowers_the_latencies(
    batch: LongBatch, waiting: int, rows: int
) -> None:
    assert batch.rows_between(CURVE, width=10, rows=waiting) == rows
