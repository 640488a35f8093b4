"""Ranks of an engine that is on another node: ``python -P -m services.worker.engines.vllm.follower``.

Steps reach them from the engine's node by vLLM's own queues; the agent of this node is shown that they run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from msgspec import structs
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from services.worker.engine.load.loading import Report
from services.worker.engine.process import main
from services.worker.engine_protocol import (
    Command,
    EngineConfig,
    EngineHeartbeat,
    EngineMessage,
    Ready,
    Resized,
    StepLink,
)
from services.worker.engines.vllm.executor import files_for_vllm
from services.worker.engines.vllm.loading import unlink_shared, vllm_config_of, watch


class Following:
    """Implements ``StepLoop`` without a step: it holds the ranks."""

    has_work = False

    def __init__(self, ranks: MultiprocExecutor) -> None:
        self._ranks = ranks

    def connect(self, link: StepLink) -> None: ...

    def apply(self, command: Command) -> None: ...

    def step(self) -> EngineMessage:
        raise AssertionError("a follower has no work")

    def heartbeat(self) -> EngineHeartbeat:
        return EngineHeartbeat(0, 0, 0, 0)

    def resized(self) -> Resized | None:
        return None

    def check_integrity(self) -> None: ...


def follow(config: EngineConfig, report: Report) -> tuple[Following, Ready]:
    """Return once the ranks of this node have met those of the others. Raises LoadError."""
    report("weights", 0.0)
    with files_for_vllm(Path(config.model_dir)) as folder:
        base = structs.replace(config, model_dir=str(folder))
        ranks = MultiprocExecutor(vllm_config_of(base), monitor_workers=False)
    watch(ranks)
    unlink_shared(ranks)
    return Following(ranks), Ready(0, config.block_size, 0, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], follow))
