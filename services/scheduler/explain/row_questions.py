"""Asks the connected gateways how they ran a request of a fixed-cost model: its rows pass no scheduler.

Every gateway answers on its stream, whether or not it remembers the request. Single event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from services.core.errors import QueueFull
from services.core.fixed_cost.explained import RowsExplanation
from services.scheduler.term_streams import GatewaySession

MAX_QUESTIONS: Final = 64  # questions that may wait for answers
ANSWER_S: Final = 0.5  # how long gateways are waited for


@dataclass(slots=True, eq=False)
class _Question:
    request_id: str
    missing: set[int]  # the streams of gateways that have not answered, by number
    found: list[RowsExplanation] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class RowQuestions:
    """The questions that wait for answers."""

    def __init__(self) -> None:
        self._open: dict[_Question, None] = {}

    async def ask(self, request_id: str, gateways: Iterable[GatewaySession]) -> tuple[RowsExplanation, ...]:
        """Return what these gateways remember of the request. Raises QueueFull.

        One that does not answer within ``ANSWER_S`` is left out.
        """
        if len(self._open) >= MAX_QUESTIONS:
            raise QueueFull("too many explanations are asked for at once", retry_after_s=1.0)
        sessions = list(gateways)
        if not sessions:
            return ()
        question = _Question(request_id, {session.number for session in sessions})
        self._open[question] = None
        try:
            for session in sessions:
                session.questions.append(request_id)
                session.wake()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await question.done.wait()
        finally:
            del self._open[question]
        return tuple(question.found)

    def answered(self, session: GatewaySession, request_id: str, found: RowsExplanation | None) -> None:
        """Take a gateway's answer."""
        for question in self._open:
            if question.request_id != request_id or session.number not in question.missing:
                continue
            question.missing.remove(session.number)
            if found is not None:
                question.found.append(replace(found, gateway_id=session.gateway_id))
            if not question.missing:
                question.done.set()
