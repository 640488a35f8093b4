"""A check of a version's text files: loads them once in a separate text process, as a gateway does.

The registry runs it before it creates a version, a worker before the version is READY. It finds files that a
gateway could not load, with the same bounds and the same code.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from services.core.errors import InternalError
from services.gateway.text.child import Cause, ProcessEnded, TextLimits, TextProcess, own
from services.gateway.text.messages import Loaded, LoadText, TextRefused, error_of
from services.ports.clock import Clock
from services.runtime.supervisor import Supervisor

MAX_CHECKS: Final = 2


class TextProcessCheck:
    """Implements ``TextCheck``. Event loop only."""

    def __init__(self, clock: Clock, supervisor: Supervisor, limits: TextLimits | None = None) -> None:
        self._clock = clock
        self._supervisor = supervisor
        self._limits = limits if limits is not None else TextLimits()
        self._running = asyncio.Semaphore(MAX_CHECKS)

    async def fault(self, folder: Path, version_digest: str) -> str:
        """See ``TextCheck``."""
        limits = self._limits
        order = LoadText(str(folder), version_digest, limits.load_cpu_s, limits.memory_bytes)
        process = TextProcess(self._clock, nice=False)
        async with self._running:
            try:
                process.start()
                own(self._supervisor, "text check", process, self._reap(process))
                await process.connect()
                async with asyncio.timeout(limits.wait_s(limits.load_cpu_s)):
                    answer = await process.send_order(order, patience_s=limits.wait_s(limits.load_cpu_s))
            except ProcessEnded as ended:
                raise limits.load_error(ended.cause, version_digest) from None
            except TimeoutError:
                raise limits.load_error(Cause.HUNG, version_digest) from None
            finally:
                process.kill(Cause.STOPPED)
        match answer:
            case Loaded(model=model):
                return model.template_fault
            case TextRefused():
                raise error_of(answer)
        raise InternalError("no answer to Load")

    async def _reap(self, process: TextProcess) -> None:
        """Own a started process until it has ended."""
        await process.wait()
