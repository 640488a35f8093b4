"""Output text of one sequence: detokenised, searched for stop strings, without the part already delivered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from services.worker.text.detokenizer import Detokenizer

_NOTHING: Final[Mapping[int, str]] = {}


class TextStream:
    """Turns a sequence's tokens into final text, each once.

    ``plain``: nothing is held back and no stop string is searched, so the next token's text is its entry in
    the vocabulary's table. ``stop`` is the stop string that was found; no token may be fed after it.
    ``fed``: the text of the last token, before anything is held back.
    """

    __slots__ = (
        "_detokenizer",
        "_fed",
        "_finder",
        "_min_tokens",
        "_skip_chars",
        "_spelled",
        "fed",
        "plain",
        "stop",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str],
        min_tokens: int,
        spelled: Mapping[int, str] = _NOTHING,
    ) -> None:
        """``spelled``: the texts of special tokens that are part of the text."""
        self._detokenizer = detokenizer
        self._spelled = spelled
        self._finder = StopFinder(stops) if stops else None
        self._min_tokens = min_tokens
        self._fed = 0
        self._skip_chars = 0
        self.fed = ""
        self.stop = ""
        self.plain = self._finder is None and not spelled and detokenizer.clean

    def resume(self, produced: Sequence[int], delivered_chars: int) -> str:
        """Rebuild the state after ``produced`` and return its final text beyond ``delivered_chars``."""
        self._skip_chars = delivered_chars
        pieces: list[str] = []
        for token in produced:
            pieces.append(self.feed(token))
            if self.stop:
                break
        self.plain = self.plain and not self._skip_chars
        return "".join(pieces)

    def feed(self, token: int) -> str:
        """Return the text that became final with this token. Sets ``stop`` on a match."""
        self._fed += 1
        text = self._detokenizer.feed(token)
        if self._spelled:
            text += self._spelled.get(token, "")
        self.fed = text
        if self._finder is None:
            self.plain = self._detokenizer.clean and not self._skip_chars and not self._spelled
        elif self._fed >= self._min_tokens:  # below the minimum a stop string does not end the sequence
            text, self.stop = self._finder.feed(text)
        return self._beyond_delivered(text)

    def finish(self) -> str:
        """Return all held-back text; sets ``stop`` if the last bytes completed a stop string."""
        self.plain = False
        if self.stop:
            return ""
        text = self._detokenizer.flush()
        if self._finder is not None:
            text, self.stop = self._finder.feed(text)
            if not self.stop:
                text += self._finder.flush()
        return self._beyond_delivered(text)

    def _beyond_delivered(self, text: str) -> str:
        skip = min(self._skip_chars, len(text))
        if skip:
            self._skip_chars -= skip
            return text[skip:]
        return text


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
