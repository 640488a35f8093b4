"""One automaton for many bounded expressions: linear in the text, whatever the text is.

It is the position automaton (Glushkov, 1961). A set of positions is an integer's bits, so that a step is some
operations on integers; sets and their steps are kept as states, as a text needs them, up to a bound. A second
walk, back over the text, finds where the matches that end in a set of positions begin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from fairway.formats.expressions import (
    Alternatives,
    CharSet,
    Expression,
    InOrder,
    Node,
    Repeated,
    is_word,
)

# What is read before the first and after the last character of a text.
EDGE: Final = ""
# Steps that are kept. When they are that many, all are forgotten.
_MAX_STEPS: Final = 32_768
# A distance between positions that at least this many steps have is one shift of the set.
_SHIFTED_STEPS: Final = 8


@dataclass(frozen=True, slots=True)
class Sought:
    """An expression of a rule; ``valid`` decides on the folded text of a match."""

    expression: Expression
    rule: int
    valid: Callable[[str], bool] | None = None


@dataclass(frozen=True, slots=True)
class Accepting:
    """The positions in which an expression's match is complete."""

    bits: int
    sought: Sought
    # Whether the character that completes it comes after the match.
    is_after: bool


class _State(dict[str, "_State"]):
    """A set of positions; the next one by character. ``endings``: what is complete in it."""

    __slots__ = ("back", "begins", "bits", "endings", "open", "owner")

    def __init__(self, owner: Automaton, bits: int, back: bool) -> None:
        super().__init__()
        self.owner = owner
        self.bits = bits
        self.back = back
        # The first state of the walk back to the matches that are open, once it has been needed.
        self.open: _State | None = None
        self.endings = () if back else owner.endings_in(bits)
        # Bit 0: a match begins with the character read last; bit 1: with the one after it.
        self.begins = bool(bits & owner.first_bits) | bool(bits & owner.before_bits) << 1

    def __missing__(self, char: str) -> _State:
        return self.owner.step(self, char)


class Automaton:
    def __init__(self, soughts: Sequence[Sought]) -> None:
        self._builder = builder = _Builder()
        self.first_bits = self.before_bits = starts = 0
        endings = []
        for sought in soughts:
            expression = sought.expression
            part = builder.part(expression.node)
            self.first_bits |= part.first
            starts |= part.first
            if expression.edge_before:
                edge = builder.position(None)
                self.before_bits |= edge
                starts = starts & ~part.first | edge
                builder.link(edge, part.first)
            last = part.last
            if expression.edge_after:
                edge = builder.position(None)
                builder.link(last, edge)
                last = edge
            endings.append(Accepting(last, sought, expression.edge_after))
        # A match whose expression has an edge before it begins where the edge is found, one character before.
        self.first_bits &= starts
        self._starts = starts
        self._endings = tuple(endings)
        self._forward = _Steps(builder.follow)
        self._backward = _Steps(builder.preceding())
        # Positions in which a match has begun and may still go on.
        followed = sum(1 << position for position, bits in enumerate(builder.follow) if bits)
        self._open_bits = followed & ~self.before_bits
        self._char_bits: dict[str, int] = {EDGE: builder.bits_of(EDGE)}
        self._states: dict[tuple[int, bool], _State] = {}
        self._kept_steps = 0

    @property
    def initial(self) -> _State:
        """The state before the first character."""
        return self._state(self.before_bits, back=False)

    def endings_in(self, bits: int) -> tuple[Accepting, ...]:
        return tuple(ending for ending in self._endings if bits & ending.bits)

    def step(self, state: _State, char: str) -> _State:
        """Return the state after one more character, or before it for a state of the walk back."""
        bits = self._char_bits.get(char)
        if bits is None:
            if len(self._char_bits) >= _MAX_STEPS:
                self._char_bits = {EDGE: self._char_bits[EDGE]}
            bits = self._char_bits[char] = self._builder.bits_of(char)
        if state.back:
            reached = self._backward.of(state.bits) & bits
        else:
            reached = (self._forward.of(state.bits) | self._starts) & bits
        if self._kept_steps >= _MAX_STEPS:
            self._forget()
        self._kept_steps += 1
        state[char] = following = self._state(reached, state.back)
        return following

    def oldest_live(self, state: _State, text: str, *, whole: bool) -> int:
        """Return where the earliest match begins that has begun in the text and may still be completed.

        It is the text's length if there is none. ``whole``: the text has no earlier characters.
        """
        index = oldest = len(text)
        back = state.open
        if back is None:
            bits = state.bits & self._open_bits
            back = state.open = self._state(bits, back=True)
        while back.bits and index:
            index -= 1
            if begins := back.begins:
                oldest = index + 1 - (begins & 1)
            back = back[text[index - 1] if index else EDGE]
        return 0 if whole and not index and back.begins & 2 else oldest

    def match(
        self, state: _State, ending: Accepting, text: str, end: int, *, whole: bool
    ) -> tuple[int, int] | None:
        """Return the longest valid match that this state completes after ``text[:end]``, as its range."""
        back = self._state(state.bits & ending.bits, back=True)
        if ending.is_after:
            end -= 1
            back = back[text[end - 1]]
        found = list(self._begins(back, text, end, whole=whole))
        valid = ending.sought.valid
        for begin in reversed(found):
            if valid is None or valid(text[begin:end]):
                return begin, end
        return None

    def _begins(self, state: _State, text: str, end: int, *, whole: bool) -> Iterator[int]:
        """Yield where the matches begin that are in a state of the walk back at the end, the latest first."""
        for index in range(end - 1, -1, -1):
            if begins := state.begins:
                if begins & 2:
                    yield index + 1
                if begins & 1:
                    yield index
            if not state.bits:
                return
            state = state[text[index - 1] if index else EDGE]
        if whole and state.begins & 2:
            yield 0

    def _state(self, bits: int, back: bool) -> _State:
        state = self._states.get((bits, back))
        if state is None:
            state = self._states[bits, back] = _State(self, bits, back)
        return state

    def _forget(self) -> None:
        """Empty all states: a scan that still has one of them continues from it, and nothing else is kept."""
        for state in self._states.values():
            state.clear()
            state.open = None
        self._states.clear()
        self._kept_steps = 0


class _Steps:
    """The union of the positions that follow a set's."""

    def __init__(self, follow: Sequence[int]) -> None:
        edges = [(source, target) for source, bits in enumerate(follow) for target in _indices(bits)]
        counts = Counter(target - source for source, target in edges)
        self._shifts = [
            (distance, sum(1 << source for source, target in edges if target - source == distance))
            for distance, count in sorted(counts.items())
            if count >= _SHIFTED_STEPS
        ]
        shifted = {distance for distance, _ in self._shifts}
        rest: dict[int, int] = {}
        for source, bits in enumerate(follow):
            left = sum(1 << target for target in _indices(bits) if target - source not in shifted)
            if left:
                rest[left] = rest.get(left, 0) | 1 << source
        self._rest = [(sources, targets) for targets, sources in rest.items()]

    def of(self, bits: int) -> int:
        found = 0
        for distance, sources in self._shifts:
            if moved := bits & sources:
                found |= moved << distance if distance >= 0 else moved >> -distance
        for sources, targets in self._rest:
            if bits & sources:
                found |= targets
        return found


@dataclass(frozen=True, slots=True)
class _Part:
    """Positions in which a part of an expression begins and ends; whether it may be empty."""

    first: int = 0
    last: int = 0
    empty: bool = True


class _Builder:
    """Positions, what each accepts, and what follows each."""

    def __init__(self) -> None:
        self.follow: list[int] = []
        self._accepting: dict[CharSet | None, int] = {}

    def position(self, chars: CharSet | None) -> int:
        """Return the bit of a new position; None: it accepts an edge of a word."""
        bit = 1 << len(self.follow)
        self.follow.append(0)
        self._accepting[chars] = self._accepting.get(chars, 0) | bit
        return bit

    def link(self, sources: int, targets: int) -> None:
        for source in _indices(sources):
            self.follow[source] |= targets

    def bits_of(self, char: str) -> int:
        """Return the positions that accept a character, or EDGE."""
        found = 0
        for chars, bits in self._accepting.items():
            if (not is_word(char)) if chars is None else bool(char) and char in chars:
                found |= bits
        return found

    def preceding(self) -> list[int]:
        found = [0] * len(self.follow)
        for source, targets in enumerate(self.follow):
            for target in _indices(targets):
                found[target] |= 1 << source
        return found

    def part(self, node: Node) -> _Part:
        match node:
            case CharSet():
                bit = self.position(node)
                return _Part(bit, bit, empty=False)
            case InOrder(items):
                return self._joined([self.part(item) for item in items])
            case Alternatives(items):
                first = last = 0
                empty = False
                for part in map(self.part, items):
                    first, last, empty = first | part.first, last | part.last, empty or part.empty
                return _Part(first, last, empty)
            case Repeated(item, least, most):
                return self._repeated(item, least, most)

    def _joined(self, parts: list[_Part]) -> _Part:
        joined = _Part()
        for part in parts:
            self.link(joined.last, part.first)
            joined = _Part(
                joined.first | part.first if joined.empty else joined.first,
                joined.last | part.last if part.empty else part.last,
                joined.empty and part.empty,
            )
        return joined

    def _repeated(self, item: Node, least: int, most: int) -> _Part:
        """Write out the repeats. Each follows the one before: optional ones are left out from the end."""
        if not most:
            return _Part()
        parts = [self.part(item) for _ in range(most)]
        for before, after in pairwise(parts):
            self.link(before.last, after.first)
        last = 0
        for part in parts[max(least, 1) - 1 :]:
            last |= part.last
        return _Part(parts[0].first, last, empty=not least)


def _indices(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
