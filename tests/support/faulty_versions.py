"""Versions of the null executor with a fault of their own, for drills of rollouts.

A version names its fault in ``config.json`` (``drill_fault``). ``rollout_faults`` on PYTHONPATH puts the
faulty engine in the place of each engine that a worker starts. Nothing of it is in the product.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from services.worker.engine import process
from services.worker.engine.core import Engine
from services.worker.engine.execute.executor import Batch, Executor, Samples
from services.worker.engine.load.config import eos_ids, vocab_size_of
from services.worker.engine.load.loading import WARM_UP_TOKENS, Report, load
from services.worker.engine.sequence import SequenceState
from services.worker.engine_protocol import EngineConfig, Ready
from tests.support.stack import ROOT

CHECKPOINT: Final = ROOT / "models/tiny/checkpoint"
FIELD: Final = "drill_fault"
WORKING: Final = "drill_working_bytes"  # what each step allocates, as activations are
CRASHING_ID: Final = 507  # a prompt that begins with it ends the engine of a crashing version
_FAILING_OF: Final = 20
_SHORT_FROM: Final = 4


class VersionFault(StrEnum):
    GOOD = "good"
    SLOW = "slow"  # steps take 1.5 times as long
    FAILING = "failing"  # one sequence in 20 ends with an error
    COSTLY = "costly"  # twice the device time for a token
    GARBAGE = "garbage"  # outputs end after a few tokens
    CRASHING = "crashing"  # some prompts end the engine
    UNANSWERING = "unanswering"  # prompts longer than that of the warm-up end with an error


_STEP_RATIOS: Final = {VersionFault.SLOW: 1.5, VersionFault.COSTLY: 2.0}


class FaultyExecutor:
    """Implements ``Executor`` around another one."""

    runs_ahead = False

    def __init__(self, inner: Executor, fault: VersionFault, eos_id: int, working_bytes: int) -> None:
        self._inner = inner
        self._fault = fault
        self._eos_id = eos_id
        self._working_bytes = working_bytes
        self._batch: Batch | None = None

    def submit(self, batch: Batch) -> None:
        """See ``Executor``."""
        self._batch = batch
        bytearray(self._working_bytes)  # a mapping of its own: it fails where the process may have no more
        self._inner.submit(batch)

    def collect(self) -> Samples:
        """See ``Executor``."""
        batch, samples = self._batch, self._inner.collect()
        assert batch is not None
        match self._fault:
            case VersionFault.FAILING:
                return _with_errors(samples, batch, lambda one: one.key % _FAILING_OF == 0)
            case VersionFault.UNANSWERING:
                return _with_errors(samples, batch, lambda one: one.prompt_tokens > WARM_UP_TOKENS)
            case VersionFault.GARBAGE:
                tokens = [
                    self._eos_id if len(one.tokens) - one.prompt_tokens >= _SHORT_FROM else token
                    for one, token in zip(batch.sampled, samples.tokens, strict=True)
                ]
                return Samples(tokens, samples.logprobs, samples.errors)
            case VersionFault.CRASHING:
                if any(one.tokens[0] == CRASHING_ID for one in batch.sampled):
                    raise RuntimeError("device-side assert triggered")
            case VersionFault.GOOD | VersionFault.SLOW | VersionFault.COSTLY:
                pass
        return samples

    def resize(self, blocks: int) -> None:
        """See ``Executor``."""
        self._inner.resize(blocks)


def _with_errors(samples: Samples, batch: Batch, fails: Callable[[SequenceState], bool]) -> Samples:
    errors = {row: "a fault of the drill" for row, one in enumerate(batch.sampled) if fails(one)}
    return Samples(samples.tokens, samples.logprobs, errors)


def write_version(folder: Path, fault: VersionFault, number: int, *, working_bytes: int = 0) -> Path:
    """Write the bundled checkpoint with a fault, as a version with a digest of its own."""
    shutil.copytree(CHECKPOINT, folder)
    config = folder / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, FIELD: fault.value, WORKING: working_bytes}))
    (folder / "README.md").write_text(f"A version of a drill: {folder.name}, number {number}.\n")
    return folder


def main(arguments: list[str]) -> int:
    """Run the engine process with these arguments; return its exit code."""
    return process.main(arguments, load=load_faulty)


def load_faulty(config: EngineConfig, report: Report) -> tuple[Engine, Ready]:
    """Load as the product does, with the fault that the version's ``config.json`` names."""
    folder = Path(config.model_dir)
    fields = json.loads((folder / "config.json").read_text())
    fault = VersionFault(fields.get(FIELD, VersionFault.GOOD))
    eos_id = min(eos_ids(folder, fields, vocab_size_of(fields)), default=0)
    working_bytes = fields.get(WORKING, 0)

    def around(inner: Executor) -> Executor:
        return FaultyExecutor(inner, fault, eos_id, working_bytes)

    stretched = msgspec.structs.replace(config, null_step_s=config.null_step_s * _STEP_RATIOS.get(fault, 1.0))
    return load(stretched, report, around=around)
