"""The layers of a safety pack that read text: phrases, patterns and personal data, searched in a stream.

A match is reported at its earliest end, and is extended while it goes on. What may still become a match is
not safe to send; everything before that is, so that a stream is held back by exactly what is undecided.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fairway.formats.expressions import parse
from fairway.formats.folding import fold
from fairway.formats.safety import SafetyPack, Scope, TextList
from services.gateway.safety.automaton import Automaton, Sought
from services.gateway.safety.encoded import Base64Runs
from services.gateway.safety.layers import JsonUnescaping, MappedText
from services.gateway.safety.personal_data import recognisers
from services.gateway.safety.phrases import PhraseSet
from services.gateway.safety.search import FoldedSearch, SearchRules


@dataclass(frozen=True, slots=True)
class TextMatch:
    """A match, or several of one rule that overlap. ``start`` and ``end``: characters of the original text.

    ``rule``: the index of the pack's list; those of personal data follow the lists.
    """

    category: str
    start: int
    end: int
    rule: int


class TextRules:
    """The rules of a pack for inputs or outputs, compiled: up to half a second for the largest pack."""

    def __init__(self, pack: SafetyPack, scope: Scope) -> None:
        personal_data = [rule.category for rule in pack.personal_data]
        self.categories = (*(rule.category for rule in pack.lists), *personal_data)
        lists = [(index, rule) for index, rule in enumerate(pack.lists) if scope in rule.scopes]
        personal = [
            sought
            for index, rule in enumerate(pack.personal_data, len(pack.lists))
            if scope in rule.scopes
            for kind in rule.kinds
            for sought in recognisers(kind, index)
        ]
        self.plain = _compiled(lists, personal)
        decoded = [(index, rule) for index, rule in lists if "base64" in rule.decode]
        self.base64 = _compiled(decoded, []) if decoded else None


def _compiled(lists: Sequence[tuple[int, TextList]], soughts: Sequence[Sought]) -> SearchRules:
    plain: dict[str, list[int]] = {}
    whole: dict[str, list[int]] = {}
    spaced: dict[str, list[int]] = {}
    expressions = list(soughts)
    for index, rule in lists:
        phrases = spaced if rule.fold_spaces else whole if rule.whole_words else plain
        for phrase in map(fold, rule.phrases):
            text = "".join(filter(str.isalnum, phrase)) if rule.fold_spaces else phrase
            rules = phrases.setdefault(text, [])
            if index not in rules:
                rules.append(index)
        for pattern in rule.patterns:
            expression = parse(pattern)
            if rule.whole_words:
                expression = replace(expression, edge_before=True, edge_after=True)
            expressions.append(Sought(expression, index))
    sets = [(plain, False), (whole, True)]
    return SearchRules(
        tuple(PhraseSet(phrases, whole_words=edges) for phrases, edges in sets if phrases),
        (PhraseSet(spaced, whole_words=False),) if spaced else (),
        Automaton(expressions) if expressions else None,
    )


class TextScan:
    """Searches one text as it grows; ``arguments``: the text is JSON, whose strings have escapes.

    However the text is cut, the matches are the same.
    """

    def __init__(self, rules: TextRules, *, arguments: bool = False) -> None:
        self.chars = 0  # the length of the text so far
        self.revision = 0  # changes of the matches
        self._categories = rules.categories
        self._unescaping = JsonUnescaping() if arguments else None
        self._search = FoldedSearch(rules.plain, self._add)
        encoded = rules.base64
        self._base64 = None if encoded is None else Base64Runs(lambda: FoldedSearch(encoded, self._add))
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._finished = False

    @property
    def matches(self) -> tuple[TextMatch, ...]:
        """The matches so far, by their place in the text."""
        found = [
            TextMatch(self._categories[rule], start, end, rule)
            for rule, spans in self._spans.items()
            for start, end in spans
        ]
        return tuple(sorted(found, key=lambda match: (match.start, match.end, match.rule)))

    @property
    def safe_chars(self) -> int:
        """How many characters of the text no match can include that is not complete. It never decreases.

        A match has at most 256 folded characters; white space and marks within it add any number to them.
        """
        if self._finished:
            return self.chars
        safe = self._search.held_from(self.chars)
        if self._unescaping is not None:
            safe = min(safe, self._unescaping.held_from(self.chars))
        return safe if self._base64 is None else min(safe, self._base64.held_from(self.chars))

    def forget(self, chars: int) -> None:
        """Drop the matches that end within the first ``chars`` characters."""
        for spans in self._spans.values():
            if spans and spans[0][1] <= chars:
                del spans[: bisect_right(spans, chars, key=lambda span: span[1])]

    def feed(self, text: str) -> None:
        start = self.chars
        self.chars = end = start + len(text)
        piece = MappedText(text, range(start, end), range(start + 1, end + 1))
        self._scan(piece if self._unescaping is None else self._unescaping.feed(piece))

    def finish(self) -> None:
        """Report what the end of the text completes. All of it is decided after that."""
        if self._unescaping is not None:
            self._scan(self._unescaping.finish())
        self._search.finish()
        if self._base64 is not None:
            self._base64.finish()
        self._finished = True

    def _scan(self, piece: MappedText) -> None:
        if not piece.text:
            return
        self._search.feed(piece)
        if self._base64 is not None:
            self._base64.feed(piece)

    def _add(self, rule: int, start: int, end: int) -> None:
        """Add a match, as one with those of its rule that it overlaps."""
        self.revision += 1
        spans = self._spans.setdefault(rule, [])
        first = last = bisect_right(spans, start, key=lambda span: span[1])
        while last < len(spans) and spans[last][0] < end:
            start, end = min(start, spans[last][0]), max(end, spans[last][1])
            last += 1
        spans[first:last] = [(start, end)]
