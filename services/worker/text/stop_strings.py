"""Stop strings in streamed text: found across pieces, removed, and never sent in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Finds stop strings in one sequence's text, independent of how the text is split into pieces.

    The match that ends first wins; of two with the same end, the one that starts first.
    """

    __slots__ = ("_chars", "_held", "_longest", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._chars = frozenset("".join(self._stops))
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """Return the text that is final now, and the stop string that was found ("" for none).

        No text may be fed after a match. The start of a possible match is held back.
        """
        if not self._held and self._chars.isdisjoint(text):
            return text, ""
        buffer = self._held + text
        found = self._first_match(buffer)
        if found is not None:
            start, stop = found
            self._held = ""
            return buffer[:start], stop
        keep = self._possible_prefix(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], ""

    def flush(self) -> str:
        """Return the text held back; for a sequence that ended without completing a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        best: tuple[int, int] | None = None  # (end, start): the smallest wins
        best_stop = ""
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
                best_stop = stop
        return None if best is None else (best[1], best_stop)

    def _possible_prefix(self, buffer: str) -> int:
        """Return the length of the longest suffix of ``buffer`` that is a prefix of a stop string."""
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            tail = buffer[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
