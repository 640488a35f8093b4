"""The ``tokenizer.json`` of a GGUF file and its other settings, from the vocabulary in its metadata.

A byte-level vocabulary (``gpt2``) carries its merges and the name of its split; a SentencePiece one
(``llama``) its scores, from which the merges follow as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fairway.importing.gguf_file import GgufFile

TOKENS: Final = "tokenizer.ggml.tokens"
MERGES: Final = "tokenizer.ggml.merges"
SCORES: Final = "tokenizer.ggml.scores"
TYPES: Final = "tokenizer.ggml.token_type"
MODEL: Final = "tokenizer.ggml.model"
PRE: Final = "tokenizer.ggml.pre"
MAX_PIECE_CHARS: Final = 256  # longest SentencePiece token: its splits are tried one by one
_UNKNOWN, _CONTROL, _USER = 2, 3, 4
_BLANK: Final = "▁"

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST
_QWEN2: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Split:
    """How text is cut before merges apply, by the rules of llama.cpp."""

    pattern: str = ""  # empty: the expression of GPT-2
    digits: bool = False  # each digit is a piece of its own
    whole_words: bool = False  # a piece that is a token is not merged
    adds_bos: bool = False  # default of ``add_bos_token``


_GPT2: Final = _Split()
_DIGITS: Final = _Split(digits=True)
_LLAMA3_SPLIT: Final = _Split(_LLAMA3, whole_words=True, adds_bos=True)
SPLITS: Final[Mapping[str, _Split]] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _Split(_QWEN2),
    "deepseek-r1-qwen": _Split(_QWEN2),
    "tekken": _Split(_TEKKEN, whole_words=True, adds_bos=True),
}


@dataclass(frozen=True, slots=True)
class GgufTokens:
    """What the metadata decides about tokens."""

    tokenizer: dict[str, Any]  # content of tokenizer.json
    settings: dict[str, Any]  # content of tokenizer_config.json
    ids: dict[str, Any]  # bos_token_id and the like, for config.json
    end_ids: tuple[int, ...]  # tokens at which an output ends
    templates: dict[str, str]  # chat templates by the name of their file


def tokens_of(file: GgufFile, vocab_size: int) -> GgufTokens:
    """Return the tokenizer of a file whose embedding has this many rows. Raises BadGguf."""
    tokens = _list(file, TOKENS, str)
    if not 0 < len(tokens) <= vocab_size:
        raise file.refusal(TOKENS, f"{len(tokens)} tokens, the embedding has {vocab_size} rows")
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        number = next(number for number, token in enumerate(tokens) if vocab[token] != number)
        raise file.refusal(TOKENS, f"token {number} has the text of token {vocab[tokens[number]]}")
    types = _list(file, TYPES, int, len(tokens)) if TYPES in file.metadata else [1] * len(tokens)
    kind = file.metadata.get(MODEL)
    ids = {
        name: _id(file, key, len(tokens))
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    if kind == "gpt2":
        split = _split(file)
        parts, adds_bos = _byte_level(file, vocab, split), split.adds_bos
    elif kind == "llama":
        parts, adds_bos = _sentencepiece(file, tokens, vocab, types), True
    else:
        raise file.refusal(
            MODEL, f"{kind!r} is not supported; supported: gpt2 (byte-level), llama (SentencePiece)"
        )
    added = [
        _added(number, token, special=type_ == _CONTROL)
        for number, (token, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ in (_CONTROL, _USER) and token
    ]
    parts |= {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    first = _marked(file, "add_bos_token", adds_bos, ids["bos"], tokens)
    last = _marked(file, "add_eos_token", False, ids["eos"], tokens)
    if first or last:
        parts["post_processor"] = _template(vocab, first, last)
    named = {f"{name}_token": tokens[number] for name, number in ids.items() if number is not None}
    ends = [ids["eos"], *(_id(file, key, len(tokens)) for key in ("eot", "eom"))]
    return GgufTokens(
        parts,
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named},
        {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad") if ids[name] is not None},
        tuple(dict.fromkeys(number for number in ends if number is not None)),
        _templates(file),
    )


def _list(file: GgufFile, key: str, kind: type, length: int | None = None) -> list[Any]:
    value = file.metadata.get(key)
    if not isinstance(value, list) or any(type(item) is not kind for item in value):
        what = "it is missing" if value is None else f"it is no array of {kind.__name__}"
        raise file.refusal(key, what)
    if length is not None and len(value) != length:
        raise file.refusal(key, f"{len(value)} values, there are {length} tokens")
    return value


def _id(file: GgufFile, name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = file.metadata.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < count):
        raise file.refusal(key, f"{value!r} is no id of the {count} tokens")
    return value


def _flag(file: GgufFile, name: str, default: bool) -> bool:
    key = f"tokenizer.ggml.{name}"
    value = file.metadata.get(key, default)
    if not isinstance(value, bool):
        raise file.refusal(key, f"{value!r} is no bool")
    return value


def _marked(file: GgufFile, name: str, default: bool, number: int | None, tokens: Sequence[str]) -> str:
    """Return the token that the flag puts at an end of each text, or an empty text."""
    return tokens[number] if _flag(file, name, default and number is not None) and number is not None else ""


def _split(file: GgufFile) -> _Split:
    name = file.metadata.get(PRE, "default")
    if not isinstance(name, str) or name not in SPLITS:
        raise file.refusal(PRE, f"the split {name!r} is not supported; supported: {', '.join(SPLITS)}")
    return SPLITS[name]


def _byte_level(file: GgufFile, vocab: Mapping[str, int], split: _Split) -> dict[str, Any]:
    merges = []
    for number, merge in enumerate(_list(file, MERGES, str)):
        # A token may begin with a blank; as in llama.cpp it is not the one between.
        at = merge.find(" ", 1)
        pair = [merge[:at], merge[at + 1 :]] if at > 0 else [merge, ""]
        if not all(text in vocab for text in (*pair, pair[0] + pair[1])):
            raise file.refusal(MERGES, f"merge {number}, {merge[:80]!r}, does not join two tokens to a third")
        merges.append(pair)
    level = {
        "type": "ByteLevel",
        "add_prefix_space": _flag(file, "add_space_prefix", False),
        "trim_offsets": True,
        "use_regex": not split.pattern,
    }
    before: list[dict[str, Any]] = [level]
    if split.digits:
        before.insert(0, {"type": "Digits", "individual_digits": True})
    if split.pattern:
        pattern = {"Regex": split.pattern}
        before.insert(0, {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": before},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocab, merges, None, fallback=False, whole_words=split.whole_words),
    }


def _sentencepiece(
    file: GgufFile, tokens: Sequence[str], vocab: Mapping[str, int], types: Sequence[int]
) -> dict[str, Any]:
    if (longest := max(map(len, tokens))) > MAX_PIECE_CHARS:
        raise file.refusal(TOKENS, f"a token of {longest} characters; at most {MAX_PIECE_CHARS} are read")
    scores = _list(file, SCORES, float, len(tokens))
    if not all(map(math.isfinite, scores)):
        raise file.refusal(SCORES, "a score is not finite")
    unknown = next((token for token, type_ in zip(tokens, types, strict=True) if type_ == _UNKNOWN), None)
    # Older conversions put no blank before a text only where they state it.
    prefix = _flag(file, "add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}
    normalizers: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _BLANK}] if prefix else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*normalizers, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocab, _merges_of(vocab, scores), unknown, fallback=True),
    }


def _merges_of(vocab: Mapping[str, int], scores: Sequence[float]) -> list[list[str]]:
    """Return the merges that the scores imply, the best first; ties as in transformers."""
    merges: list[tuple[float, int, int, list[str]]] = []
    for (token, _), score in zip(vocab.items(), scores, strict=True):
        pairs = [[token[:at], token[at:]] for at in range(1, len(token))]
        found = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        found.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(score, len(pair[0]), len(pair[1]), pair) for pair in found]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [merge[3] for merge in merges]


def _bpe(
    vocab: Mapping[str, int],
    merges: list[list[str]],
    unknown: str | None,
    *,
    fallback: bool,
    whole_words: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fallback,
        "byte_fallback": fallback,
        "ignore_merges": whole_words,
        "vocab": vocab,
        "merges": merges,
    }


def _added(number: int, token: str, *, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {"id": number, "content": token, **flags}


def _template(vocab: Mapping[str, int], first: str, last: str) -> dict[str, Any]:
    """Return the post-processor that puts tokens before and after a text."""

    def piece(token: str, sequence: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": token, "type_id": sequence}}] if token else []

    def around(name: str, sequence: int) -> list[dict[str, Any]]:
        return [
            *piece(first, sequence),
            {"Sequence": {"id": name, "type_id": sequence}},
            *piece(last, sequence),
        ]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in (first, last) if token
        },
    }


def _templates(file: GgufFile) -> dict[str, str]:
    names = {
        "tokenizer.chat_template": "chat_template.jinja",
        "tokenizer.chat_template.tool_use": "additional_chat_templates/tool_use.jinja",
    }
    for key in names:
        if not isinstance(file.metadata.get(key, ""), str):
            raise file.refusal(key, "it is no text")
    return {name: file.metadata[key] for key, name in names.items() if file.metadata.get(key)}
