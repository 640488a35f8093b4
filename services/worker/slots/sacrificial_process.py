"""The process in which suspects of a fixed-cost version run, so that they end none that serves.

It exists while a failed batch is searched, holds memory of its own in the ledger, and starts again when a
suspect ended it. If the memory does not suffice for it and the serving process, or it does not load,
the batcher searches in the serving one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from services.core.errors import DoesNotFit, FairwayError
from services.worker.batcher.driver import Batcher
from services.worker.batcher.policy.isolation import RunPlace
from services.worker.engine_protocol import BatchRaised, BatchRan, EngineConfig, Progress, Ready
from services.worker.slots.engine_process import Crashed, EngineExit, RunningEngine, Stopped, batch_events
from services.worker.slots.version_engine import SlotContext
from services.worker.slots.version_memory import VersionMemory

log = structlog.get_logger()

_SUFFIX: Final = "/search"  # suffix of its name in the memory ledger


class SacrificialProcess:
    """Implements ``driver.Sacrifice``: at most one process at a time."""

    def __init__(
        self,
        version_digest: str,
        context: SlotContext,
        memory: VersionMemory,
        *,
        batcher: Callable[[], Batcher | None],
    ) -> None:
        """``memory`` is the serving process's. ``batcher`` returns the batcher that receives the events."""
        self._digest = version_digest
        self._context = context
        self._memory = memory
        self._batcher = batcher
        self._config: EngineConfig | None = None
        self._process: RunningEngine | None = None
        self._starting = self._ready = self._stopping = False

    def use(self, config: EngineConfig) -> None:
        """Start processes with the serving process's configuration from now on."""
        self._config = config

    def start(self) -> None:
        if not self._starting and self._process is None:
            self._starting = True
            self._context.supervisor.spawn(f"sacrifice-{self._digest[:19]}", self._start())

    def stop(self) -> None:
        if self._process is not None and not self._stopping:
            self._stopping = True
            self._context.supervisor.spawn(f"stop-sacrifice-{self._digest[:19]}", self._process.stop())

    async def ended(self) -> None:
        """Return once no process runs."""
        if self._process is not None:
            await self._process.stop()

    async def _start(self) -> None:
        try:
            assert self._config is not None, "no serving process was started"
            self._take_memory(self._config)
            self._ready = self._stopping = False
            events = batch_events(
                on_progress=_ignore, on_ready=self._on_ready, on_batch=self._on_batch, on_exit=self._on_exit
            )
            self._process = self._context.launch(self._config, events)
            await self._process.start()
        except FairwayError as error:
            self._process = None
            self._release()
            self._give_up(error.message)
        finally:
            self._starting = False

    def _take_memory(self, config: EngineConfig) -> None:
        """Raises DoesNotFit if the serving process then would not fit."""
        if not config.memory_bytes:
            return
        ledger, memory = self._context.ledger, self._memory
        serving_bytes = 0 if memory.granted is not None else memory.weight_bytes + config.kv_memory_bytes
        if ledger.free_bytes < serving_bytes + memory.weight_bytes + config.kv_memory_bytes:
            raise DoesNotFit("the memory does not suffice for a second process of the version")
        ledger.grant(
            self._digest + _SUFFIX,
            weight_bytes=memory.weight_bytes,
            kv_bytes=config.kv_memory_bytes,
            min_kv_bytes=config.kv_memory_bytes,
            label="the search of a failed batch",
        )

    def _on_ready(self, event: Ready) -> None:
        batcher, process = self._batcher(), self._process
        self._ready = True
        if batcher is not None and process is not None:
            batcher.attach(RunPlace.SACRIFICIAL, process)

    def _on_batch(self, event: BatchRan | BatchRaised) -> None:
        if (batcher := self._batcher()) is not None:
            batcher.on_batch(RunPlace.SACRIFICIAL, event)

    def _on_exit(self, exit_: EngineExit) -> None:
        self._process = None
        self._release()
        batcher = self._batcher()
        if batcher is None:
            return
        if not self._ready and not isinstance(exit_, Stopped):
            reason = exit_.message if isinstance(exit_, Crashed) else exit_.reason
            self._give_up(f"the sacrificial process did not load: {reason}")
        batcher.detach(RunPlace.SACRIFICIAL, exit_)

    def _give_up(self, reason: str) -> None:
        if (batcher := self._batcher()) is not None:
            batcher.search_in_serving(reason)

    def _release(self) -> None:
        self._context.ledger.release(self._digest + _SUFFIX)


def _ignore(_: Progress) -> None: ...
