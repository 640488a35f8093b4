"""What a text passes through before it is searched. Each layer keeps where its characters come from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from fairway.formats.folding import composed, fold_char, may_compose


class MappedText(NamedTuple):
    """The next text of a layer. ``starts`` and ``ends``: the range in the original text, by character."""

    text: str
    starts: Sequence[int]
    ends: Sequence[int]

    def part(self, start: int, end: int) -> MappedText:
        return MappedText(self.text[start:end], self.starts[start:end], self.ends[start:end])


EMPTY: Final = MappedText("", (), ())


def join(piece: MappedText, following: MappedText) -> MappedText:
    if not piece.text:
        return following
    starts = [*piece.starts, *following.starts]
    return MappedText(piece.text + following.text, starts, [*piece.ends, *following.ends])


class _Writer:
    """Collects the characters of a piece."""

    __slots__ = ("_chars", "_ends", "_starts")

    def __init__(self) -> None:
        self._chars: list[str] = []
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, chars: str, start: int, end: int) -> None:
        """Add characters that stand for one range of the original."""
        self._chars.append(chars)
        self._starts += [start] * len(chars)
        self._ends += [end] * len(chars)

    def copy(self, piece: MappedText) -> None:
        self._chars.append(piece.text)
        self._starts += piece.starts
        self._ends += piece.ends

    def piece(self) -> MappedText:
        return MappedText("".join(self._chars), self._starts, self._ends)


# ASCII that changes by more than its case: control characters, and white space that is not one space.
_UNEVEN: Final = re.compile(r"[\x00-\x1f\x7f`]|  ")
_EVEN: Final = re.compile(r"[!-_a-~]+(?: [!-_a-~]+)*")


class Folding:
    """Folds text as phrases are folded. It holds back one character while another may compose with it."""

    def __init__(self) -> None:
        self._spaced = False  # whether the last character was white space
        self._char = ""
        self._start = self._end = 0

    def held_from(self, chars: int) -> int:
        """Return where in the original text the character begins that is held back, ``chars`` if none is."""
        return self._start if self._char else chars

    def feed(self, piece: MappedText) -> MappedText:
        text = piece.text
        if not text:
            return piece
        doubled = self._spaced and text[0] == " "
        if text.isascii() and not self._char and not doubled and not _UNEVEN.search(text):
            self._spaced = text[-1] == " "
            return MappedText(text.lower(), piece.starts, piece.ends)
        writer, position = _Writer(), 0
        for even in _EVEN.finditer(text):
            self._fold(piece.part(position, even.start()), writer)
            self._release(writer)
            position = even.end()
            plain = piece.part(even.start(), position)
            writer.copy(MappedText(plain.text.lower(), plain.starts, plain.ends))
            self._spaced = False
        self._fold(piece.part(position, len(text)), writer)
        return writer.piece()

    def finish(self) -> MappedText:
        """Return what is held back: the text has ended."""
        writer = _Writer()
        self._release(writer)
        return writer.piece()

    def _fold(self, piece: MappedText, writer: _Writer) -> None:
        for char, start, end in zip(piece.text, piece.starts, piece.ends, strict=True):
            for folded in fold_char(char):
                self._add(folded, start, end, writer)

    def _add(self, folded: str, start: int, end: int, writer: _Writer) -> None:
        if self._char:
            if joined := composed(self._char, folded):
                self._char, self._end = joined, end
                return
            self._release(writer)
        if may_compose(folded):
            self._char, self._start, self._end = folded, start, end
        elif folded != " " or not self._spaced:
            writer.add(folded, start, end)
        self._spaced = folded == " "

    def _release(self, writer: _Writer) -> None:
        if self._char:
            writer.add(self._char, self._start, self._end)
            self._char = ""


def without_spaces(piece: MappedText) -> MappedText:
    """Return letters and digits alone."""
    if piece.text.isalnum() or not piece.text:
        return piece
    kept = [index for index, char in enumerate(piece.text) if char.isalnum()]
    return MappedText(
        "".join([piece.text[index] for index in kept]),
        [piece.starts[index] for index in kept],
        [piece.ends[index] for index in kept],
    )


_HEX: Final = "[0-9a-fA-F]"
_ESCAPE: Final = re.compile(
    rf"\\u([dD][89abAB]{_HEX}{{2}})\\u([dD][c-fC-F]{_HEX}{{2}})|\\u({_HEX}{{4}})|\\([^u])", re.DOTALL
)
# The beginning of an escape, and a first surrogate whose second may follow.
_PARTIAL: Final = re.compile(
    rf"\\(u({_HEX}{{0,3}}|[dD][89abAB]{_HEX}{{2}}(\\(u([dD]([c-fC-F]{_HEX}?)?)?)?)?)?)?"
)
_SIMPLE: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class JsonUnescaping:
    """Decodes the escapes of JSON strings; whatever else JSON has stays as it is written."""

    def __init__(self) -> None:
        self._held = EMPTY

    def held_from(self, chars: int) -> int:
        """Return where in the original text the escape begins that is not complete, ``chars`` if none is."""
        return self._held.starts[0] if self._held.text else chars

    def feed(self, piece: MappedText) -> MappedText:
        if not self._held.text and "\\" not in piece.text:
            return piece
        piece, self._held = join(self._held, piece), EMPTY
        writer, text, position = _Writer(), piece.text, 0
        while (at := text.find("\\", position)) >= 0:
            writer.copy(piece.part(position, at))
            if _PARTIAL.fullmatch(text, at):
                self._held = piece.part(at, len(text))
                return writer.piece()
            found = _ESCAPE.match(text, at)
            position = at + 1 if found is None else found.end()
            char = "\\" if found is None else _unescaped(found)
            writer.add(char, piece.starts[at], piece.ends[position - 1])
        writer.copy(piece.part(position, len(text)))
        return writer.piece()

    def finish(self) -> MappedText:
        held, self._held = self._held, EMPTY
        return held


def _unescaped(found: re.Match[str]) -> str:
    high, low, code, simple = found.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF))
    if code:
        char = chr(int(code, 16))
        return "\ufffd" if "\ud800" <= char <= "\udfff" else char
    return _SIMPLE.get(simple, simple)
