"""The tokens that a version's other files declare besides ``tokenizer.json``, read as transformers reads
them.

Five places of four files declare tokens that a tokenizer reads as one: ``added_tokens`` of tokenizer.json,
``added_tokens_decoder`` and the named and extra special tokens of tokenizer_config.json,
special_tokens_map.json, and added_tokens.json. The rules are those of transformers' generic tokenizer
(``TokenizersBackend``, 5.24): with ``added_tokens_decoder`` the two older files are not read; a declared id
is no more than an order, the vocabulary decides; a token that it lacks gets the next id.

The result is a tokenizer.json that declares them all, so that every reader reads the same tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import msgspec

from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.weights import Read

TOKENIZER: Final = "tokenizer.json"
SETTINGS: Final = "tokenizer_config.json"
SPECIAL_MAP: Final = "special_tokens_map.json"
ADDED: Final = "added_tokens.json"
FILES: Final = (TOKENIZER, SETTINGS, SPECIAL_MAP, ADDED)
MAX_DECLARED: Final = 100_000  # tokens of all places; published versions have some thousands
MAX_TOKEN_CHARS: Final = 16 * 1024

_PLAIN_DECODERS: Final = (
    "ByteLevel",
    "ByteFallback",
    "Fuse",
    "Metaspace",
    "Strip",
    "WordPiece",
    "BPEDecoder",
    "CTC",
)
_MAX_DECODERS: Final = 16

NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_NUMBER: Final = re.compile("[0-9]{1,18}")
_DECODER: Final = "added_tokens_decoder"
_EXTRA: Final = "extra_special_tokens"
_OLD_EXTRA: Final = "additional_special_tokens"


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token with the flags of the tokenizers library. ``normalized`` None: the opposite of ``special``."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False


Value = str | AddedToken


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The tokenizer of a version. ``outside`` has ids of the tokens that only the other files declare."""

    tokenizer: bytes  # its tokenizer.json, with every token that another file declares
    named: Mapping[str, str]  # bos_token and the like, by name, as a template gets them
    outside: Mapping[str, int]
    ids: Mapping[str, int]  # the id of each added token


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Decoding(msgspec.Struct):
    model: _Model
    decoder: dict[str, Any] | None = None


def read_tokenizer_files(names: Collection[str], read: Read) -> TokenizerFiles:
    """Return the tokenizer that the files declare together. Raises UnsupportedModel that names the field."""
    parts = _decoded(TOKENIZER, read, dict[str, msgspec.Raw])
    raw = msgspec.json.decode(parts.get("added_tokens", b"[]"))
    if not isinstance(raw, list) or len(raw) > MAX_DECLARED:
        raise UnsupportedModel(f"{TOKENIZER}: added_tokens", type(raw).__name__)
    tokens = [_token(f"{TOKENIZER}: added_tokens", entry) for entry in raw]
    own = {
        entry["id"]: token for entry, token in zip(raw, tokens, strict=True) if type(entry.get("id")) is int
    }
    declared = _Declared(names, read, own)
    inside = {token.content for token in tokens}
    latest: dict[str, AddedToken] = {}
    outside: list[AddedToken] = []
    for number, token in enumerate(map(_explicit, (*tokens, *declared.to_add(tokens)))):
        before = latest.get(token.content)
        # A token that was special once stays so, which the tokenizers library does too.
        kept = replace(token, special=True) if before is not None and before.special else token
        if number >= len(tokens) and token.content and kept != before:
            outside.append(kept)
        latest[token.content] = kept
    if len(outside) > MAX_DECLARED:
        raise UnsupportedModel(f"{SETTINGS}: tokens", len(outside))
    ids = {token.content: number for number, token in own.items()}
    if outside:
        ids = _ids_of(parts, tokens + outside)
        raw += [{"id": ids[token.content], **asdict(token)} for token in outside]
        parts["added_tokens"] = msgspec.Raw(msgspec.json.encode(raw))
    return TokenizerFiles(
        msgspec.json.encode(parts) if outside else read(TOKENIZER),
        {name: _text(value) for name, value in declared.named.items()},
        {token.content: ids[token.content] for token in outside if token.content not in inside},
        ids,
    )


def require_decodable(tokenizer: bytes) -> None:
    """Return if a tokenizer.json decodes every token with a small bound on its work. Raises UnsupportedModel.

    Workers decode in their event loop: no regular expression, and no replacement that lengthens the text.
    """
    found: _Decoding = _decoded(TOKENIZER, lambda _: tokenizer, _Decoding)
    parts: list[Any] = [found.decoder] if found.decoder is not None else []
    if found.decoder is not None and found.decoder.get("type") == "Sequence":
        parts = found.decoder.get("decoders") or []
    if len(parts) > _MAX_DECODERS or not all(map(_is_plain, parts)):
        raise UnsupportedModel(
            f"{TOKENIZER}: decoder, in which Replace puts no longer text in place of a text, and others are "
            f"{', '.join(_PLAIN_DECODERS)}",
            found.decoder,
        )
    vocab = found.model.vocab
    texts = vocab if isinstance(vocab, dict) else (text for text, _ in vocab)
    if (longest := max(map(len, texts), default=0)) > MAX_TOKEN_CHARS:
        raise UnsupportedModel(f"{TOKENIZER}: a token of at most {MAX_TOKEN_CHARS} characters", longest)


def _is_plain(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    if part.get("type") != "Replace":
        return part.get("type") in _PLAIN_DECODERS
    pattern, content = part.get("pattern"), part.get("content")
    found = pattern.get("String") if isinstance(pattern, dict) else None
    return isinstance(found, str) and isinstance(content, str) and 0 < len(found) >= len(content)


class _Declared:
    """What the files other than tokenizer.json declare: tokens in order, names of tokens, and extra ones."""

    def __init__(self, names: Collection[str], read: Read, own: Mapping[int, AddedToken]) -> None:
        def fields(name: str) -> dict[str, Any]:
            return _decoded(name, read, dict[str, Any]) if name in names else {}

        settings = fields(SETTINGS)
        if _OLD_EXTRA in settings and not settings.get(_EXTRA):
            settings[_EXTRA] = settings.pop(_OLD_EXTRA)
        specific = {
            name: settings.pop(name)
            for name, value in [*settings.items()]
            if name not in NAMED and name.endswith("_token") and isinstance(value, str)
        }
        if isinstance(settings.get(_EXTRA), dict):
            specific |= settings.pop(_EXTRA)
        by_id: dict[int, AddedToken] = {}
        if settings.get(_DECODER) is not None:
            by_id = _decoder(settings[_DECODER])
        else:
            specific |= _merge_special_map(settings, fields(SPECIAL_MAP))
            by_id = _added(fields(ADDED), settings)
            by_id |= own
        if _OLD_EXTRA in settings and _EXTRA not in settings:
            settings[_EXTRA] = settings.pop(_OLD_EXTRA)
        self._tokens = [by_id[number] for number in sorted(by_id)]
        by_text = {token.content: token for token in by_id.values()}
        named: dict[str, Any] = dict.fromkeys(NAMED)
        for name in NAMED:
            if (value := settings.get(name)) is not None:
                named[name] = by_text.get(_text(value), value)
        for name, value in settings.items():
            # Further names: strings, and tokens that state their type.
            if (
                name not in NAMED
                and name.endswith("_token")
                and (isinstance(value, Value) or _is_typed(value))
            ):
                named[name] = value
        named |= specific
        self.named: dict[str, Value] = {
            name: _value(f"{SETTINGS}: {name}", value) for name, value in named.items() if value is not None
        }
        self._extra = _values(settings.get(_EXTRA))

    def to_add(self, own: list[AddedToken]) -> list[AddedToken]:
        """Return the tokens in the order in which transformers adds them to those of tokenizer.json."""
        seen = {token.content for token in (*own, *self._tokens)}
        rest = [value for value in (*self.named.values(), *self._extra) if _text(value) not in seen]
        special = {_text(value) for value in self.named.values()}
        return [
            AddedToken(value, special=True)
            if isinstance(value, str)
            else replace(value, special=value.special or value.content in special)
            for value in (*self._tokens, *dict.fromkeys(rest))
        ]


def _decoder(found: Any) -> dict[int, AddedToken]:
    field = f"{SETTINGS}: {_DECODER}"
    if not isinstance(found, dict) or len(found) > MAX_DECLARED or not all(map(_NUMBER.fullmatch, found)):
        raise UnsupportedModel(field, found)
    return {int(number): _token(f"{field}: {number}", entry) for number, entry in found.items()}


def _merge_special_map(settings: dict[str, Any], special: Mapping[str, Any]) -> dict[str, Any]:
    """Put special_tokens_map.json over the settings, and return the further names that it gives tokens."""
    for name, value in special.items():
        if isinstance(value, dict) and name != _EXTRA:
            value = replace(_token(f"{SPECIAL_MAP}: {name}", value), special=True)
        elif name == _EXTRA and isinstance(value, list):
            field = f"{SPECIAL_MAP}: {name}"
            before = settings.get(_EXTRA) or []
            _values(before)  # raises where it is no list of tokens
            if len(value) > MAX_DECLARED:
                raise UnsupportedModel(field, f"{len(value)} tokens")
            found = {each for each in before if isinstance(each, Value)}
            listed = dict.fromkeys(_special(field, each) for each in value)
            value = [*before, *(each for each in listed if each not in found)]
        settings[name] = value
    return settings.pop(_EXTRA) if isinstance(settings.get(_EXTRA), dict) else {}


def _added(found: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens.json; those that are named or extra too are special."""
    values = [settings.get(name) for name in NAMED] + list(settings.get(_EXTRA) or [])
    special = {_text(value) for value in values if isinstance(value, Value)}
    tokens = {}
    for text, number in found.items():
        if type(number) is not int:
            raise UnsupportedModel(f"{ADDED}: {text[:80]}", number)
        tokens[number] = AddedToken(text, normalized=text not in special, special=text in special)
    return tokens


def _ids_of(parts: Mapping[str, msgspec.Raw], tokens: list[AddedToken]) -> dict[str, int]:
    """Return the id that each added token gets: the vocabulary's, else the next one after all."""
    vocab = _decoded(f"{TOKENIZER}: model", lambda _: bytes(parts.get("model", b"{}")), _Model).vocab
    size = len(vocab)
    if isinstance(vocab, list):
        vocab = {text: number for number, (text, _) in enumerate(vocab)}
    ids: dict[str, int] = {}
    following = size
    for token in tokens:
        if token.content not in ids:
            ids[token.content] = vocab.get(token.content, following)
            following = max(following, ids[token.content] + 1)
    return ids


def _token(field: str, entry: Any) -> AddedToken:
    fields = entry if isinstance(entry, dict) else {}
    flags = {name: fields[name] for name in AddedToken.__slots__ if fields.get(name) is not None}
    content = flags.pop("content", None)
    if not isinstance(content, str) or not all(isinstance(value, bool) for value in flags.values()):
        raise UnsupportedModel(field, entry)
    if len(content) > MAX_TOKEN_CHARS:
        raise UnsupportedModel(f"{field}, a token", f"{len(content)} characters")
    return AddedToken(content, **flags)


def _special(field: str, value: Any) -> Value:
    return replace(_token(field, value), special=True) if isinstance(value, dict) else _value(field, value)


def _value(field: str, value: Any) -> Value:
    """Return a token: a text, or an object. One without its type counts as special."""
    if isinstance(value, Value):
        return value
    token = _token(field, value)
    return token if _is_typed(value) else replace(token, special=True)


def _is_typed(value: Any) -> bool:
    return isinstance(value, dict) and value.get("__type") == "AddedToken"


def _values(listed: Any) -> list[Value]:
    field = f"{SETTINGS}: {_EXTRA}"
    if not isinstance(listed, list | None) or len(listed or ()) > MAX_DECLARED:
        raise UnsupportedModel(field, listed)
    return [_value(field, value) for value in listed or ()]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value.content if isinstance(value, AddedToken) else str(value)


def _explicit(token: AddedToken) -> AddedToken:
    normalized = not token.special if token.normalized is None else token.normalized
    return replace(token, normalized=normalized)


def _decoded(name: str, read: Read, kind: Any) -> Any:
    try:
        return msgspec.json.decode(read(name), type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UnsupportedModel(name, f"malformed: {error}") from error
