"""One replacement of an engine's weights, from the end of admission until the new version serves.

The version before stays an owner of the engine until then. If the engine ends meanwhile, that version starts
again from its own files: no process computes with a mixture.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from services.core.errors import Unavailable
from services.worker.engine_protocol import Command, ReplaceWeights, WeightsRefused, WeightsReplaced
from services.worker.policy.replacement import hands_back
from services.worker.slots.version_probe import ProbeFailed
from services.worker.streams.sequences import SequenceTable

if TYPE_CHECKING:
    from services.worker.slots.version_engine import SlotContext
    from services.worker.slots.version_slot import VersionSlot

log = structlog.get_logger()

POLL_S: Final = 0.005  # interval at which the end of the running sequences is looked for


@dataclass(frozen=True, slots=True)
class EngineEnded:
    """The engine process ended before it had answered."""


_Answer = WeightsReplaced | WeightsRefused | ProbeFailed | EngineEnded | None


class ReplacementFailed(Exception):
    """The new version does not serve; the one before does, or starts again. ``reason``: a stable word."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Replacement:
    """Single writer: the engine of the two versions, which passes on what its process sends."""

    def __init__(
        self,
        successor: VersionSlot,
        before: VersionSlot,
        table: SequenceTable,
        context: SlotContext,
        send: Callable[[Command], bool],
    ) -> None:
        self.successor = successor
        self.before = before
        self.sent = False  # the engine may have changed weights
        self._table = table
        self._context = context
        self._send = send
        self._answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._refused: WeightsRefused | None = None

    async def drain(self) -> None:
        """Return once no sequence runs and none is admitted. Raises Unavailable if the engine ended."""
        host, clock = self._context.host, self._context.clock
        host.note_replacing(self.before.digest, True)
        began_s = clock.monotonic_s()
        while len(self._table):
            in_place = self.successor.in_place
            if hands_back(0.0 if in_place is None else in_place.finish_s, clock.monotonic_s() - began_s):
                self._table.hand_back()
                break
            await clock.sleep(POLL_S)
        if self._answer.done():
            raise Unavailable("the engine ended while it finished requests of the version before")

    async def exchange(self, folder: Path) -> None:
        """Return once the engine computes with the weights in the folder. Raises ReplacementFailed."""
        self.sent = True
        if not self._send(ReplaceWeights(str(folder))):
            raise _crashed("it took no command")
        answer = await self._answer
        if isinstance(answer, WeightsRefused):
            self.sent = False
            raise ReplacementFailed(answer.reason.upper(), answer.message)
        if not isinstance(answer, WeightsReplaced):
            raise self._ended(answer)
        log.info("weights.replaced", digest=self.successor.digest, pause_s=round(answer.pause_s, 3))
        self._answer = asyncio.get_running_loop().create_future()

    async def probed(self) -> None:
        """Return once the new version has answered its probe. Raises ReplacementFailed."""
        answer = await self._answer
        if answer is not None:
            raise self._ended(answer)

    def resolve(self, answer: _Answer) -> None:
        """Pass on what came from the engine. A refusal halfway is followed by the engine's end."""
        if isinstance(answer, WeightsRefused) and answer.changed:
            self._refused = answer
        elif not self._answer.done():
            self._answer.set_result(answer)

    def _ended(self, answer: _Answer) -> ReplacementFailed:
        if isinstance(answer, ProbeFailed):
            return ReplacementFailed(answer.reason, answer.message)
        if self._refused is not None:
            return ReplacementFailed(self._refused.reason.upper(), self._refused.message)
        return _crashed("its process ended")


def _crashed(why: str) -> ReplacementFailed:
    return ReplacementFailed("REPLACEMENT_CRASHED", f"the engine did not replace its weights: {why}")
