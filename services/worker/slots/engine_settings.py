"""The common settings of a worker's engines, and the configuration of one version's engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from msgspec import structs

from services.core.errors import FailedPrecondition
from services.worker.engine_protocol import EngineConfig
from services.worker.slots.engine_process import EngineTimeouts

Executor = Literal["torch", "null", "rows", "vllm", "vllm_rows"]

# Time in which gateways observe an update and place the requests accepted before it.
RETIRE_MARGIN_S: Final = 5.0

_EXECUTORS: Final[Mapping[str, Executor]] = {"null": "null", "vllm": "vllm"}

Speculation = Literal["off", "prompt_lookup", "draft"]


def speculation_of(wished: Speculation, draft: Path | None) -> Speculation:
    """Return the engine's speculation mode: without a draft, "draft" becomes prompt lookup."""
    return "prompt_lookup" if wished == "draft" and draft is None else wished


def executor_of(assigned: str) -> Executor:
    """Return the executor of an assignment's engine; a name that a newer control plane wrote is "torch"."""
    return _EXECUTORS.get(assigned, "torch")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What all engines of a worker have in common. Sizes in bytes, times in seconds.

    A field that ``EngineConfig`` also has is copied into it and documented there.
    """

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = 0
    block_size: int = 16
    kv_memory_bytes: int = 256 * 1024 * 1024
    token_budget: int = 512
    max_sequences: int = 64
    itl_target_s: float = 0.05
    mode: Literal["auto", "exact", "free"] = "auto"
    operators: Literal["auto", "native", "torch"] = "auto"
    operators_cache: str = ""
    prefix_cache: bool = True
    # "draft" applies to versions with a draft model; others use prompt lookup.
    speculation: Speculation = "off"
    max_proposals: int = 8
    null_step_s: float = 0.0
    # Fixed window of batches of fixed-cost models; negative: derived.
    batch_window_s: float = -1.0
    # How long a parked sequence may stay without credit.
    slow_reader_s: float = 30.0
    request_log_per_s: float = 200.0
    # How long running sequences may continue on a version that is being removed.
    drain_s: float = 30.0
    # How long a retiring version stays after its last sequence.
    retire_s: float = 30.0 + RETIRE_MARGIN_S
    # Pauses before a new attempt after crashes and transient failures.
    crash_backoff_first_s: float = 0.5
    crash_backoff_most_s: float = 30.0
    # The same after other failures.
    failed_backoff_first_s: float = 2.0
    failed_backoff_most_s: float = 60.0
    timeouts: EngineTimeouts = field(default_factory=EngineTimeouts)  # limits of the engine process
    devices: int = 1  # devices of this node
    followers: tuple[str, ...] = ()  # addresses of followers, each with as many devices

    def nodes_of(self, ranks: int) -> int:
        """Return on how many nodes so many ranks run, equally many on each. Raises FailedPrecondition."""
        most = 1 + len(self.followers)
        for nodes in range(1, most + 1):
            if ranks <= nodes * self.devices and ranks % nodes == 0:
                return nodes
        raise FailedPrecondition(
            f"{ranks} ranks do not divide evenly among up to {most} nodes of {self.devices} devices: "
            "choose other sizes, or set FAIRWAY_DEVICES and FAIRWAY_FOLLOWERS"
        )

    def config(
        self, folder: Path, executor: Executor, *, memory_bytes: int, draft: Path | None
    ) -> EngineConfig:
        """Return the engine configuration for the version and the draft in these folders."""
        shared = {name: getattr(self, name) for name in EngineConfig.__struct_fields__ if hasattr(self, name)}
        settings = EngineConfig(
            socket_path="", model_dir=str(folder), executor=executor, memory_bytes=memory_bytes, **shared
        )
        return structs.replace(
            settings,
            speculation=speculation_of(self.speculation, draft),
            draft_model_dir="" if draft is None else str(draft),
        )
