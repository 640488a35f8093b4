"""The search of folded text for phrases and expressions, as the text grows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.gateway.safety.automaton import EDGE, Automaton
from services.gateway.safety.layers import Folding, MappedText, without_spaces
from services.gateway.safety.phrases import Found, PhraseScan, PhraseSet

# The characters of which no match may be cut, with the edges next to it.
_KEPT_CHARS: Final = 320
# The kept text is cut once it is longer than this.
_MOST_CHARS: Final = 4_096


@dataclass(frozen=True, slots=True)
class SearchRules:
    """What is searched for. It is compiled once and shared by all searches."""

    phrases: tuple[PhraseSet, ...] = ()
    # Phrases that are found with spaces and signs between their letters.
    spaced: tuple[PhraseSet, ...] = ()
    automaton: Automaton | None = None


class FoldedSearch:
    """Folds pieces of a text and searches them. Ranges that are found are of the original text."""

    def __init__(self, rules: SearchRules, found: Found) -> None:
        self._folding = Folding()
        self._plain = _View(rules.phrases, rules.automaton, found)
        self._spaced = _View(rules.spaced, None, found) if rules.spaced else None

    def held_from(self, chars: int) -> int:
        """Return where in the original text the earliest match begins that may still be completed.

        It is ``chars``, the text's length, if there is none.
        """
        held = self._plain.held_from(self._folding.held_from(chars))
        return held if self._spaced is None else self._spaced.held_from(held)

    def feed(self, piece: MappedText) -> None:
        self._search(self._folding.feed(piece))

    def finish(self) -> None:
        self._search(self._folding.finish())
        self._plain.finish()
        if self._spaced is not None:
            self._spaced.finish()

    def _search(self, piece: MappedText) -> None:
        if piece.text:
            self._plain.feed(piece)
            if self._spaced is not None:
                self._spaced.feed(without_spaces(piece))


class _View:
    """Searches one form of the text. Places are counted in its characters."""

    def __init__(self, phrases: Sequence[PhraseSet], automaton: Automaton | None, found: Found) -> None:
        self._found = found
        self._phrases = [PhraseScan(each, self._report) for each in phrases]
        self._automaton = automaton
        self._state = None if automaton is None else automaton.initial
        self._text = ""
        self._base = 0  # characters before the kept text
        # The pieces of the kept text, and the place of each one's first character.
        self._pieces: list[MappedText] = []
        self._places: list[int] = []

    def feed(self, piece: MappedText) -> None:
        new = piece.text
        if not new:
            return
        if len(self._text) > _MOST_CHARS:
            self._cut()
        before = len(self._text)
        self._pieces.append(piece)
        self._places.append(self._base + before)
        self._text = text = self._text + new
        for phrases in self._phrases:
            phrases.feed(new, text, self._base)
        if self._state is not None:
            self._step(new, before)

    def finish(self) -> None:
        """Report what the end of the text completes. Nothing is live after it."""
        for phrases in self._phrases:
            phrases.finish()
        if self._state is not None:
            self._state = self._state[EDGE]
            self._complete(len(self._text) + 1)

    def held_from(self, chars: int) -> int:
        text, base = self._text, self._base
        size = oldest = base + len(text)
        for phrases in self._phrases:
            live = phrases.live_from(text, base)
            if live < oldest:
                oldest = live
        if self._automaton is not None and self._state is not None:
            live = base + self._automaton.oldest_live(self._state, text, whole=not base)
            if live < oldest:
                oldest = live
        return chars if oldest == size else min(chars, self._find(oldest)[0])

    def _step(self, new: str, before: int) -> None:
        first, completes = self._state, False
        assert first is not None, "an automaton without a state"
        state = first
        for char in new:
            state = state[char]
            if state.endings:
                completes = True
        if not completes:
            self._state = state
            return
        # The places are counted only where there is a match: that is rare.
        state = first
        for end, char in enumerate(new, before + 1):
            self._state = state = state[char]
            if state.endings:
                self._complete(end)

    def _complete(self, end: int) -> None:
        assert self._automaton is not None, "an expression without an automaton"
        assert self._state is not None, "an automaton without a state"
        for ending in self._state.endings:
            match = self._automaton.match(self._state, ending, self._text, end, whole=not self._base)
            if match is not None:
                self._report(ending.sought.rule, self._base + match[0], self._base + match[1])

    def _report(self, rule: int, start: int, end: int) -> None:
        first, last = self._find(start), self._find(end - 1)
        self._found(rule, first[0], last[1])

    def _find(self, place: int) -> tuple[int, int]:
        """Return the range in the original text of the character at a place."""
        index = bisect_right(self._places, place) - 1
        piece, at = self._pieces[index], place - self._places[index]
        return piece.starts[at], piece.ends[at]

    def _cut(self) -> None:
        cut = len(self._text) - _KEPT_CHARS
        self._text = self._text[cut:]
        self._base += cut
        gone = bisect_right(self._places, self._base) - 1
        del self._pieces[:gone], self._places[:gone]
