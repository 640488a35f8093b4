"""Phrases of lists, searched all at once (Aho and Corasick, 1975)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import ahocorasick

from fairway.formats.expressions import is_word

# Takes a rule and the range of its match in the searched text.
Found = Callable[[int, int, int], None]


class PhraseSet:
    """Folded phrases with their rules. With ``whole_words``, no letter of a word may be next to a match."""

    def __init__(self, phrases: Mapping[str, Sequence[int]], *, whole_words: bool) -> None:
        self.automaton = ahocorasick.Automaton()
        for phrase, rules in phrases.items():
            self.automaton.add_word(phrase, (len(phrase), tuple(rules)))
        self.automaton.make_automaton()
        self.whole_words = whole_words
        self.longest = max(map(len, phrases))
        ordered = sorted(phrases)
        extended = {one for one, other in pairwise(ordered) if other.startswith(one)}
        # Phrases that are final once they are complete: no other continues them, and no edge has to follow.
        self.final = frozenset(() if whole_words else phrases.keys() - extended)


class PhraseScan:
    """Searches a text as it grows. ``text`` and ``base``: what is kept of it, and the length before that."""

    def __init__(self, phrases: PhraseSet, found: Found) -> None:
        self._phrases = phrases
        self._found = found
        self._at_end: list[tuple[int, int, tuple[int, ...]]] = []  # matches without their next character
        self._live = 0

    def feed(self, new: str, text: str, base: int) -> None:
        """Search the text's new characters, at its end."""
        phrases, size = self._phrases, base + len(text)
        if self._at_end:
            if not is_word(new[0]):
                self.finish()
            self._at_end.clear()
        before = size - len(new)
        # The iterator is a new one: pyahocorasick 2.3.1 frees foreign memory when one is set to another text
        # that has characters beyond U+FFFF. No match that ends in the new characters begins before this.
        begin = min(max(self._live, before - phrases.longest + 1), before)
        for last, (length, rules) in phrases.automaton.iter(text[begin - base :]):
            end = begin + last + 1
            if end <= before:
                continue
            start = end - length
            if phrases.whole_words:
                if start and is_word(text[start - base - 1]):
                    continue
                if end == size:
                    self._at_end.append((start, end, rules))
                    continue
                if is_word(text[end - base]):
                    continue
            for rule in rules:
                self._found(rule, start, end)

    def finish(self) -> None:
        """Report the matches that the end of the text completes."""
        for start, end, rules in self._at_end:
            for rule in rules:
                self._found(rule, start, end)

    def live_from(self, text: str, base: int) -> int:
        """Return where the earliest phrase begins that the text's end may be a part of; else its size."""
        phrases, size = self._phrases, len(text)
        prefix, whole_words, final = phrases.automaton.longest_prefix, phrases.whole_words, phrases.final
        start = self._live - base
        if size - start > phrases.longest:
            start = size - phrases.longest
        follows_word = whole_words and start > 0 and is_word(text[start - 1])
        while start < size:
            if not follows_word:
                tail = text[start:]
                if prefix(tail) == size - start and tail not in final:
                    break
            if whole_words:
                char = text[start]
                follows_word = char.isalnum() or char == "_"
            start += 1
        self._live = start = base + start
        return start
