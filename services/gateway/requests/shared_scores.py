"""The log-probabilities of a request's prompt, computed once for all its choices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from services.core.generation import TokenLogprobs

# Takes the next of them: the place of the first, the tokens and their entries.
Take = Callable[[int, Sequence[int], Sequence[TokenLogprobs]], None]


class SharedScores:
    """The first choice receives them from its worker, for all that follow it.

    Of an earlier run a choice may have less than the first has: it does not follow, and has its own computed.
    Written by the token path of the first choice.
    """

    def __init__(self, tokens: int, had: int) -> None:
        """``tokens``: of the prompt, 0 where nothing of it is asked for. ``had``: those of an earlier run."""
        self._tokens = tokens
        self._had = had
        self._takers: list[Take] = []
        self._complete = asyncio.Event()
        self._note(had)

    def follow(self, had: int, take: Take) -> bool:
        """Return whether a choice that has the entries of ``had`` tokens receives the rest by ``take``."""
        follows = self._had <= had < self._tokens
        if follows:
            self._takers.append(take)
        return follows

    def add(self, offset: int, ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> None:
        """Give what the first choice received to those that follow it."""
        for take in self._takers:
            take(offset, ids, entries)
        self._note(offset + len(ids))

    async def complete(self) -> None:
        """Return once the whole prompt is scored."""
        await self._complete.wait()

    def _note(self, scored: int) -> None:
        if scored >= self._tokens:
            self._complete.set()
