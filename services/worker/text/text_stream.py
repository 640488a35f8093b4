"""Output text of one sequence: detokenised, searched for stop strings, without the part already delivered."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.text.detokenizer import Detokenizer
from services.worker.text.stop_strings import StopFinder


class TextStream:
    """Turns a sequence's tokens into final text, each once.

    ``plain``: nothing is held back and no stop string is searched, so the next token's text is its entry in
    the vocabulary's table. ``stop`` is the stop string that was found; no token may be fed after it.
    """

    __slots__ = ("_detokenizer", "_fed", "_finder", "_min_tokens", "_skip_chars", "plain", "stop")

    def __init__(self, detokenizer: Detokenizer, *, stops: Sequence[str], min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._finder = StopFinder(stops) if stops else None
        self._min_tokens = min_tokens
        self._fed = 0
        self._skip_chars = 0
        self.stop = ""
        self.plain = self._finder is None and detokenizer.clean

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
        if self._finder is None:
            self.plain = self._detokenizer.clean and not self._skip_chars
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
