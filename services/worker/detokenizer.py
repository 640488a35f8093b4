"""Streaming detokenisation: token ids to text, one at a time, with the result of decoding all at once.

For a byte-level vocabulary a table maps token to bytes, so a token costs one look-up; any other decoder uses
windows of the tokenizer's own ``decode``.

There is one exception. A tokenizer with byte fallback replaces a whole run of byte tokens by U+FFFD, one for
each, if the run as a whole is not valid UTF-8. A stream has already sent the characters that were complete
before the first invalid byte: these stay, and each further byte of the run becomes U+FFFD.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
from tokenizers import Tokenizer

from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.tokenizer_files import read_tokenizer_files, require_decodable
from services.core.errors import FailedPrecondition, FairwayError

REPLACEMENT = "\ufffd"
MAX_PENDING_TOKENS = 8  # above the bytes of any UTF-8 character, so that many pending tokens are invalid
# Tokens of a context: enough for the character and for the token that continues the text.
_CONTEXT_TOKENS: Final = 32
MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
_BLANK: Final = "\u2581"  # the leading blank of a piece of SentencePiece
_BYTE_TOKEN: Final = re.compile("<0x[0-9A-Fa-f]{2}>")
_utf8 = codecs.getincrementaldecoder("utf-8")
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


class Detokenizer(Protocol):
    """The text of one sequence. ``clean``: nothing is pending, so the vocabulary's table may be used."""

    clean: bool

    def feed(self, token: int) -> str:
        """Return the text that became final; bytes of an incomplete character are held back."""

    def flush(self) -> str:
        """Return the pending text, invalid bytes as U+FFFD; no token may be fed after it."""


class Vocabulary(Protocol):
    """The token texts of one model version, shared by all its sequences.

    ``texts[token]`` is the token's text in any context, None if it depends on its neighbours. ``texts`` is
    empty if every token's text depends on its neighbours. Only ``cover`` ever changes it.
    """

    @property
    def texts(self) -> Sequence[str | None]: ...

    def open(self, context: Sequence[int] = ()) -> Detokenizer:
        """Return the detokeniser of a new sequence. Its text goes on from that of ``context``."""

    def alone(self, token: int) -> str:
        """Return a token's text, that of a text's middle; for a special token its name."""

    def part(self, token: int) -> bytes:
        """Return the bytes of a token that is part of a character; empty for any other."""

    def cover(self, vocab_size: int) -> None:
        """Extend ``texts`` to every id of a model whose vocabulary is larger than its tokenizer's."""


def load_vocabulary(model_dir: Path) -> Vocabulary:
    """Return the vocabulary of a model folder. Blocks for file I/O. Raises FailedPrecondition."""
    names = [path.name for path in model_dir.iterdir()] if model_dir.is_dir() else []
    try:
        content = read_tokenizer_files(names, partial(_content, model_dir)).tokenizer
        require_decodable(content)
        file = msgspec.json.decode(content, type=_TokenizerFile)
        # The encoding parts are left out: they are not needed here, and can be too expensive.
        tokenizer = Tokenizer.from_buffer(msgspec.json.encode(file))
    except UnsupportedModel as exc:
        raise FailedPrecondition(str(exc)) from exc
    except FairwayError:
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:  # the library raises bare Exception; its panics are not even that
        raise FailedPrecondition("the model's tokenizer.json cannot be read") from exc
    if is_byte_level(file.decoder):
        return ByteLevelVocabulary(tokenizer)
    return WindowedVocabulary(tokenizer, byte_fallback=has_byte_fallback(file.decoder))


def _content(folder: Path, name: str) -> bytes:
    path = folder / name
    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise FailedPrecondition(f"{name} exceeds {MAX_TOKENIZER_BYTES} bytes")
        return path.read_bytes()
    except FileNotFoundError as exc:
        raise FailedPrecondition(f"the version has no {name}") from exc


class _TokenizerFile(msgspec.Struct):
    """The decoding parts of tokenizer.json. Other fields of the file are ignored."""

    model: msgspec.Raw
    added_tokens: msgspec.Raw = msgspec.Raw(b"[]")
    decoder: dict[str, Any] | None = None
    version: str = "1.0"


def is_byte_level(decoder: object) -> bool:
    """Whether a ``decoder`` of tokenizer.json only maps characters to bytes."""
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders")
        return isinstance(parts, list) and len(parts) == 1 and is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


def has_byte_fallback(decoder: object) -> bool:
    """Whether a ``decoder`` of tokenizer.json decodes tokens such as ``<0xE4>`` as bytes."""
    if not isinstance(decoder, dict):
        return False
    parts = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    return isinstance(parts, list) and any(
        isinstance(part, dict) and part.get("type") == "ByteFallback" for part in parts
    )


def byte_of_char() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


class ByteLevelVocabulary:
    def __init__(self, tokenizer: Tokenizer) -> None:
        table = byte_of_char()
        added = tokenizer.get_added_tokens_decoder()
        self._bytes = [b""] * tokenizer.get_vocab_size(with_added_tokens=True)
        self._names: dict[int, str] = {}
        for text, token in tokenizer.get_vocab(with_added_tokens=True).items():
            if token >= len(self._bytes):
                self._bytes.extend([b""] * (token + 1 - len(self._bytes)))
            if token in added and added[token].special:
                self._names[token] = text
            elif all(char in table for char in text):
                self._bytes[token] = bytes(table[char] for char in text)
            else:  # a name with other characters is used unchanged, as in the tokenizers library
                self._bytes[token] = text.encode()
        self._texts = [_complete(data) for data in self._bytes]

    @property
    def texts(self) -> Sequence[str | None]:
        return self._texts

    def cover(self, vocab_size: int) -> None:
        missing = vocab_size - len(self._texts)
        if missing > 0:  # grown in place: live sequences refer to both lists
            self._bytes += [b""] * missing
            self._texts += [""] * missing

    def open(self, context: Sequence[int] = ()) -> Detokenizer:
        detokenizer = _ByteLevelDetokenizer(self._bytes)
        for token in context[-_CONTEXT_TOKENS:]:
            detokenizer.feed(token)
        return detokenizer

    def alone(self, token: int) -> str:
        if (name := self._names.get(token)) is not None:
            return name
        return self._bytes[token].decode("utf-8", "replace") if 0 <= token < len(self._bytes) else ""

    def part(self, token: int) -> bytes:
        return self._bytes[token] if 0 <= token < len(self._texts) and self._texts[token] is None else b""


def _complete(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


class _ByteLevelDetokenizer:
    __slots__ = ("_bytes", "_decoder", "clean")

    def __init__(self, table: Sequence[bytes]) -> None:
        self._bytes = table
        self._decoder = _utf8("replace")
        self.clean = True

    def feed(self, token: int) -> str:
        data = self._bytes[token] if 0 <= token < len(self._bytes) else b""
        text = self._decoder.decode(data)
        self.clean = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        self.clean = True
        return self._decoder.decode(b"", True)


class WindowedVocabulary:
    """For decoders in which a token's text depends on the one before it (Metaspace, byte fallback)."""

    def __init__(self, tokenizer: Tokenizer, *, byte_fallback: bool) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(
            token for token, entry in tokenizer.get_added_tokens_decoder().items() if entry.special
        )
        self._bytes: dict[int, int] = {}
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        plain = min((text for text in vocabulary if len(text) == 1 and text.isalnum()), default=None)
        # A text and its token, behind which tokens have their text of the middle.
        self._anchor = None if plain is None else (tokenizer.decode([vocabulary[plain]]), vocabulary[plain])
        if byte_fallback:
            for text, token in vocabulary.items():
                if _BYTE_TOKEN.fullmatch(text):
                    self._bytes[token] = int(text[3:5], 16)

    @property
    def texts(self) -> Sequence[str | None]:
        return ()

    def cover(self, vocab_size: int) -> None:
        return

    def open(self, context: Sequence[int] = ()) -> Detokenizer:
        detokenizer = _WindowedDetokenizer(self._tokenizer, self._special, self._bytes)
        tail = context[-_CONTEXT_TOKENS:]
        first = 0
        if len(tail) < len(context):  # it may begin within a character
            while first < len(tail) and self._bytes.get(tail[first], 0) & 0xC0 == 0x80:
                first += 1
        for token in tail[first:]:
            detokenizer.feed(token)
        return detokenizer

    def alone(self, token: int) -> str:
        if token in self._special:
            return self._tokenizer.id_to_token(token) or ""
        if token < 0:
            return ""
        if self._anchor is None or not (self._tokenizer.id_to_token(token) or "").startswith(_BLANK):
            return str(self._tokenizer.decode([token]))
        before, anchor = self._anchor  # a text's first blank is not in it
        return str(self._tokenizer.decode([anchor, token])).removeprefix(before)

    def part(self, token: int) -> bytes:
        byte = self._bytes.get(token, 0)
        return bytes((byte,)) if byte >= 0x80 else b""


class _WindowedDetokenizer:
    """Decodes a window that begins with final tokens, which fix the context of the new ones.

    Byte tokens are pending until their character is complete. An invalid run of them stays invalid until it
    ends.
    """

    __slots__ = ("_anchor", "_bytes", "_invalid", "_pending", "_special", "_tokenizer", "_utf8", "clean")

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int], byte_of: Mapping[int, int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._bytes = byte_of
        self._utf8 = _utf8("strict")
        self._invalid = False
        self._anchor: list[int] = []
        self._pending: list[int] = []
        self.clean = False

    def feed(self, token: int) -> str:
        if token < 0 or token in self._special or self._tokenizer.id_to_token(token) is None:
            return ""  # it has no text, and a window must not begin with an empty one
        byte = self._bytes.get(token)
        if byte is not None:
            return self._feed_byte(token, byte)
        ended = self._end_run() if self._bytes else ""
        self._pending.append(token)
        text = self._pending_text()
        # Tokens of other decoders may be parts of a character.
        if not self._bytes and text.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING_TOKENS:
            return ""
        self._anchor, self._pending = self._pending, []
        return ended + text

    def flush(self) -> str:
        if self._bytes:
            return self._end_run()
        text = self._pending_text() if self._pending else ""
        self._pending = []
        return text

    def _feed_byte(self, token: int, byte: int) -> str:
        self._pending.append(token)
        complete = False
        try:
            complete = not self._invalid and bool(self._utf8.decode(bytes((byte,))))
        except UnicodeDecodeError:
            self._invalid = True
        if self._invalid:
            return self._replaced()
        if not complete:
            return ""
        text = self._pending_text()
        self._anchor, self._pending = self._pending, []
        return text

    def _end_run(self) -> str:
        self._invalid = False
        self._utf8.reset()
        return self._replaced()

    def _replaced(self) -> str:
        """Return the pending tokens as invalid bytes; the last one remains as a one-character anchor."""
        text = REPLACEMENT * len(self._pending)
        self._anchor, self._pending = self._pending[-1:] or self._anchor, []
        return text

    def _pending_text(self) -> str:
        before = len(self._tokenizer.decode(self._anchor)) if self._anchor else 0
        return str(self._tokenizer.decode(self._anchor + self._pending)[before:])
