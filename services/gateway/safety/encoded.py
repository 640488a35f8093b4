"""Text that is written as base64."""

from __future__ import annotations

import codecs
import re
from binascii import a2b_base64
from collections.abc import Callable
from typing import Final

from services.gateway.safety.layers import EMPTY, MappedText, join
from services.gateway.safety.search import FoldedSearch

# Shorter runs are not decoded: words are such.
MIN_RUN_CHARS: Final = 16
_RUN: Final = re.compile(r"([A-Za-z0-9+/_-]+)|[^A-Za-z0-9+/_-]+")
_URL_SAFE: Final = str.maketrans("-_", "+/")


class Base64Runs:
    """Searches runs of base64, each from its first four characters on: other letters may come before.

    ``open_search`` returns the search of one such reading. A run may be broken into lines.
    """

    def __init__(self, open_search: Callable[[], FoldedSearch]) -> None:
        self._open_search = open_search
        self._short = EMPTY  # a run that is too short so far
        self._readings: tuple[_Reading, ...] = ()

    def held_from(self, chars: int) -> int:
        """Return where in the original text the earliest part begins that may still decode to a match.

        It is ``chars``, the text's length, if there is none.
        """
        if self._short.text:
            return self._short.starts[0]
        return min([chars, *(reading.held_from(chars) for reading in self._readings)])

    def feed(self, piece: MappedText) -> None:
        for found in _RUN.finditer(piece.text):
            start, end = found.span()
            if found[1]:
                self._extend(MappedText(found[1], piece.starts[start:end], piece.ends[start:end]))
            elif found[0].strip("\r\n"):
                self.finish()

    def finish(self) -> None:
        """End the run, if there is one."""
        self._short = EMPTY
        for reading in self._readings:
            reading.finish()
        self._readings = ()

    def _extend(self, piece: MappedText) -> None:
        if not self._readings:
            piece = join(self._short, piece)
            if len(piece.text) < MIN_RUN_CHARS:
                self._short = piece
                return
            self._short = EMPTY
            self._readings = tuple(_Reading(skipped, self._open_search()) for skipped in range(4))
        for reading in self._readings:
            reading.feed(piece)


class _Reading:
    """Decodes a run from one of its characters on."""

    def __init__(self, skipped: int, search: FoldedSearch) -> None:
        self._skipped = skipped
        self._search = search
        self._left = EMPTY  # less than four characters
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._char_start: int | None = None  # the place of the first byte of an incomplete character

    def held_from(self, chars: int) -> int:
        left = self._left.starts[0] if self._left.text else chars
        char = chars if self._char_start is None else self._char_start
        return self._search.held_from(min(left, char))

    def feed(self, piece: MappedText) -> None:
        if self._skipped:
            skipped = min(self._skipped, len(piece.text))
            self._skipped -= skipped
            piece = piece.part(skipped, len(piece.text))
        piece = join(self._left, piece)
        whole = len(piece.text) // 4 * 4
        self._left = piece.part(whole, len(piece.text))
        self._decode(a2b_base64(piece.text[:whole].translate(_URL_SAFE)), piece)

    def finish(self) -> None:
        left, self._left = self._left, EMPTY
        if len(left.text) > 1:
            padded = left.text.translate(_URL_SAFE).ljust(4, "A")
            self._decode(a2b_base64(padded)[: len(left.text) - 1], left)
        self._char_start = None
        self._search.finish()

    def _decode(self, data: bytes, piece: MappedText) -> None:
        """Search the text of bytes; each byte stands in two characters of the piece."""
        chars: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        for index, byte in enumerate(data):
            at = index // 3 * 4 + index % 3
            start = piece.starts[at] if self._char_start is None else self._char_start
            found = self._utf8.decode(bytes((byte,)))
            chars.append(found)
            starts += [start] * len(found)
            ends += [piece.ends[at + 1]] * len(found)
            if not self._utf8.getstate()[0]:
                self._char_start = None
            elif found or self._char_start is None:
                self._char_start = piece.starts[at]
        self._search.feed(MappedText("".join(chars), starts, ends))
