"""The null executor with steps that take as long as their tokens say, for drills.

``drill_faults`` on PYTHONPATH puts it in the place of each engine that a worker starts. A version may be
slower (``drill_step_ratio`` in its ``config.json``), and so may a worker (``live_faults``).
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Final

from services.worker.engine import process
from services.worker.engine.core import Engine
from services.worker.engine.execute.executor import Batch, Executor, Samples
from services.worker.engine.load.loading import Report, load
from services.worker.engine_protocol import EngineConfig, Ready
from tests.support.live_faults import STEP_RATIO, LiveFaults
from tests.support.stack import ROOT

CHECKPOINT: Final = ROOT / "models/tiny/checkpoint"
CONTEXT: Final = 4096
FIELD: Final = "drill_step_ratio"
STEP_S: Final = 0.015
PREFILL_TOKEN_S: Final = 1e-4
DECODE_S: Final = 3e-4


class PacedExecutor:
    """Implements ``Executor`` around another one."""

    runs_ahead = False

    def __init__(self, inner: Executor, faults: LiveFaults, version_ratio: float) -> None:
        self._inner = inner
        self._faults = faults
        self._version_ratio = version_ratio
        self._step_s = 0.0
        self._began_s = 0.0

    def submit(self, batch: Batch) -> None:
        """See ``Executor``."""
        self._began_s = time.monotonic()
        tokens_s = batch.prefill_tokens * PREFILL_TOKEN_S + len(batch.decodes) * DECODE_S
        self._step_s = (STEP_S + tokens_s) * self._version_ratio * self._faults.of(STEP_RATIO, 1.0)
        self._inner.submit(batch)

    def collect(self) -> Samples:
        """See ``Executor``."""
        samples = self._inner.collect()
        time.sleep(max(0.0, self._began_s + self._step_s - time.monotonic()))
        return samples

    def resize(self, blocks: int) -> None:
        """See ``Executor``."""
        self._inner.resize(blocks)


def write_version(folder: Path, step_ratio: float) -> Path:
    """Write a version with a digest of its own, whose steps take so many times as long."""
    shutil.copytree(CHECKPOINT, folder)
    config = folder / "config.json"
    fields = json.loads(config.read_text()) | {FIELD: step_ratio, "max_position_embeddings": CONTEXT}
    config.write_text(json.dumps(fields))
    (folder / "README.md").write_text(f"A version of a drill: {folder.name}.\n")
    return folder


def load_paced(config: EngineConfig, report: Report) -> tuple[Engine, Ready]:
    fields = json.loads((Path(config.model_dir) / "config.json").read_text())
    faults, ratio = LiveFaults(), float(fields.get(FIELD, 1.0))
    return load(config, report, around=lambda inner: PacedExecutor(inner, faults, ratio))


def main(arguments: list[str]) -> int:
    """Run the engine process with these arguments; return its exit code."""
    return process.main(arguments, load=load_paced)
