"""A batcher that pads, as on an accelerator, and whose batches take as long as their padded tokens say.

``drill_faults`` on PYTHONPATH puts it in the place of each batcher process that a worker starts.
"""

from __future__ import annotations

import time
from typing import Final

from msgspec import structs

from services.worker.batcher.models.model import FixedCostModel, Outputs, Pause, no_pause
from services.worker.batcher.models.rows import Batch, Padded
from services.worker.batcher.process import BatchRunner, load
from services.worker.engine import process
from services.worker.engine.load.loading import Report
from services.worker.engine_protocol import EngineConfig, Ready
from tests.support.wrapped_model import WrappedModel

BATCH_S: Final = 0.04
TOKEN_S: Final = 5e-6


class PacedModel(WrappedModel):
    """Its batches take as long as their padded tokens say."""

    def run(self, batch: Batch, pause: Pause = no_pause) -> list[Outputs]:
        """See ``FixedCostModel``."""
        began_s = time.monotonic()
        outputs = super().run(batch, pause)
        padded = len(batch.rows) * batch.width if isinstance(batch, Padded) else 0
        time.sleep(max(0.0, began_s + BATCH_S + padded * TOKEN_S - time.monotonic()))
        return outputs


def load_padding(config: EngineConfig, report: Report) -> tuple[BatchRunner, Ready]:
    """Load as the product does, but rows of different widths are not computed together."""
    found: list[PacedModel] = []

    def around(inner: FixedCostModel) -> FixedCostModel:
        found.append(PacedModel(inner))
        return found[0]

    _, ready = load(config, report, around=around)
    assert ready.rows is not None, "the version has sequences"
    return BatchRunner(found[0], packs=False), structs.replace(
        ready, rows=structs.replace(ready.rows, packs=False)
    )


def main(arguments: list[str]) -> int:
    """Run the batcher process with these arguments; return its exit code."""
    return process.main(arguments, load=load_padding)
