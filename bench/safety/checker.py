"""Which planted phrases a text has, found without any part of the product.

A text is read as a person would read it: compatibility forms, case, marks, invisible characters and letters
of other scripts that look alike make no difference (UTS 39, "confusables"), and neither do the escapes of
JSON strings.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Final

# Letters of other scripts by the ASCII letter that they resemble; lower case.
LOOK_ALIKES: Final = {
    "a": "аα",
    "b": "ьв",
    "c": "сϲ",
    "d": "ԁ",
    "e": "еε",
    "g": "ɡ",
    "h": "һн",
    "i": "іι",
    "j": "ј",
    "k": "кκ",
    "l": "ӏ",
    "m": "м",
    "n": "ո",
    "o": "оοօ",
    "p": "рρ",
    "q": "ԛ",
    "r": "г",
    "s": "ѕ",
    "t": "тτ",
    "u": "υս",
    "v": "ѵν",
    "w": "ԝω",
    "x": "хχ",
    "y": "уγ",
    "z": "ᴢ",
}
_PLAIN: Final = str.maketrans({char: plain for plain, chars in LOOK_ALIKES.items() for char in chars})
_ESCAPE: Final = re.compile(r"\\u([0-9a-fA-F]{4})")
_INVISIBLE: Final = ("Mn", "Me", "Cf", "Cc")


def normalised(text: str) -> str:
    """Return the letters that a reader sees, in lower case, with one space for any white space."""
    plain = text.lower().translate(_PLAIN)  # before the normal form: it makes an o of a lunate sigma
    spaced = re.sub(r"\s+", " ", unicodedata.normalize("NFKD", plain))
    seen = "".join(char for char in spaced if unicodedata.category(char) not in _INVISIBLE)
    return re.sub(" +", " ", seen.casefold().translate(_PLAIN))


def planted_in(text: str, phrases: Iterable[str]) -> int:
    """Return how often a text has one of the phrases, as it is or with its escapes decoded."""
    written = normalised(text)
    decoded = normalised(_ESCAPE.sub(lambda found: chr(int(found[1], 16)), text))
    return sum(max(written.count(phrase), decoded.count(phrase)) for phrase in phrases)
