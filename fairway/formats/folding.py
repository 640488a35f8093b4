"""How texts are compared by the rules of a safety pack: characters that readers take for equal become equal.

NFKC, case folding, decimal digits of all scripts as ASCII, look-alikes of Latin letters as these, white space
as one kind of space; what has no width and the marks on letters are dropped. Each character is folded alone,
so the result does not depend on how a text is cut; only one that ``may_compose`` joins with the following.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import Final

# The letters and signs of other scripts that usual fonts draw like these of ASCII, in lower case.
_ALIKE: Final = {
    "a": "аαɑᴀ",
    "b": "вβʙьᏼ",
    "c": "сϲᴄ",
    "d": "ԁᴅɗ",
    "e": "еεᴇ",
    "g": "ɡɢ",
    "h": "һнʜ",
    "i": "іιɩıɪꭵ",
    "j": "јϳᴊ",
    "k": "кκᴋ",
    "l": "ӏʟǀ",
    "m": "мᴍ",
    "n": "ηɴո",
    "o": "оοσᴏօ",
    "p": "рρᴘ",
    "q": "ԛգ",
    "r": "гʀᴦ",
    "s": "ѕꜱʂ",
    "t": "тτᴛ",
    "u": "υᴜսʋ",
    "v": "ѵνᴠ",
    "w": "ԝωᴡա",
    "x": "хχ",
    "y": "уγүʏ",
    "z": "ʐᴢ",
    "-": "‐‑‒–—―−⁃",
    "'": "’‘‚‛`´ʼ",
    '"': "“”„‟",
    ".": "․。",
    "/": "⁄∕",
}
_LOOK_ALIKES: Final = {ord(char): plain for plain, chars in _ALIKE.items() for char in chars}
# Classes of marks that are a part of the letter: nukta, kana voicing, virama; those of Thai, Lao, Tibetan.
_KEPT_MARKS: Final = frozenset((0, 6, 7, 8, 9, 103, 107, 118, 122, 129, 130, 132))
# Letters without a visible form, which are of no category of invisible characters.
_FILLERS: Final = frozenset("\u115f\u1160\u3164\uffa0\u2800")


@lru_cache(maxsize=16_384)
def fold_char(char: str) -> str:
    """Return the characters that stand for this one, none where it is dropped."""
    if char.isspace():
        return " "
    if (digit := unicodedata.decimal(char, None)) is not None:
        return str(digit)
    # A look-alike is replaced before the normal form of it resembles another letter or none.
    plain = char.lower().translate(_LOOK_ALIKES)
    once = _without_marks(unicodedata.normalize("NFKD", plain)).casefold()
    # Folding may decompose anew, and a look-alike may become visible by it.
    return _without_marks(unicodedata.normalize("NFKD", once)).translate(_LOOK_ALIKES)


def _without_marks(text: str) -> str:
    return unicodedata.normalize("NFC", "".join(char for char in text if not _is_dropped(char)))


def _is_dropped(char: str) -> bool:
    kind = unicodedata.category(char)
    if kind in ("Cc", "Cf", "Me", "Cs") or char in _FILLERS:
        return True
    # Variation selectors are marks of class 0.
    return kind == "Mn" and (
        unicodedata.combining(char) not in _KEPT_MARKS or "VARIATION SELECTOR" in unicodedata.name(char, "")
    )


def may_compose(folded: str) -> bool:
    """Return whether a folded character may become another one with a mark or letter that follows it."""
    return "\u0900" <= folded < "\u3400" or "\uac00" <= folded < "\ud7a4"


def composed(folded: str, following: str) -> str:
    """Return the one character that two folded ones form, empty where they form none."""
    joined = unicodedata.normalize("NFC", folded + following)
    return joined if len(joined) == 1 else ""


def fold(text: str) -> str:
    """Return a whole text folded; white space of any length is one space."""
    folded: list[str] = []
    for char in text:
        for piece in fold_char(char):
            if piece == " " and folded and folded[-1] == " ":
                continue
            if folded and may_compose(folded[-1]) and (joined := composed(folded[-1], piece)):
                folded[-1] = joined
            else:
                folded.append(piece)
    return "".join(folded)
