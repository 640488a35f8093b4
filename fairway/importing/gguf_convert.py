"""A checkpoint folder from a GGUF file: the values of its tensors, its tokenizer and its templates.

Quantised tensors are stored as float32, so that their values are those of the file; halves stay as they are.
Tensors are read and written by rows: memory is bounded, whatever the file's size.

Its ``config.json`` is the shape of its decoder, or a refusal by the key that is not served: every key of the
architecture is either read here or must have a value that changes nothing, so that no file is computed
otherwise than it states.

The ``tokenizer.json`` of a GGUF file and its other settings, from the vocabulary in its metadata.

A byte-level vocabulary (``gpt2``) carries its merges and the name of its split; a SentencePiece one
(``llama``) its scores, from which the merges follow as in transformers.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.decoder_config import parse_config
from fairway.formats.weights import SINGLE, expected_shapes
from fairway.importing.gguf_file import BadGguf, GgufFile, GgufTensor, read_gguf

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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


EMBEDDING: Final = "token_embd.weight"
HEAD: Final = "output.weight"
ROPE_DIVISORS: Final = "rope_freqs.weight"
# Llama 3 was trained at this length; its conversions write divisors in place of these numbers.
LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# The names of architectures in ``general.architecture``, and those of transformers.
ARCHITECTURES: Final[Mapping[str, tuple[str, str]]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
MISTRAL: Final = ("MistralForCausalLM", "mistral")  # a llama with a window

_SIZES: Final[Mapping[str, str]] = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
# Keys of an architecture that are read elsewhere in this module.
_READ: Final = frozenset(
    (
        *_SIZES,
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "vocab_size",
    )
)
# Values of other keys with which nothing changes.
_INERT: Final[Mapping[str, tuple[Any, ...]]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0,),
    "rope.scaling.finetuned": (True, False),
    "rope.scale_linear": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "tensor_data_layout": ("Meta AI original pth", "reference"),
    "use_parallel_residual": (False,),
}


@dataclass(frozen=True, slots=True)
class _Keys:
    """The metadata of one architecture, read with a check of each value."""

    file: GgufFile
    architecture: str

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def get(self, key: str) -> Any:
        return self.file.metadata.get(self.name(key))

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.file.refusal(self.name(key), f"{_shown(value)} is no size")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.file.refusal(self.name(key), f"{_shown(value)} is no positive number")
        return float(value)


def _shown(value: object) -> str:
    return "it is missing" if value is None else repr(value)[:80]


def config_of(file: GgufFile, rope_divisors: Sequence[float] | None) -> dict[str, Any]:
    """Return the fields of ``config.json`` but those of tokens; ``rope_divisors`` are the file's, if any.

    Raises BadGguf.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        served = ", ".join(ARCHITECTURES)
        raise file.refusal(
            "general.architecture",
            f"{_shown(architecture)} is not supported; supported: {served} (also Mistral)",
        )
    _require_whole(file)
    keys = _Keys(file, architecture)
    _require_inert(keys)
    fields: dict[str, Any] = {name: keys.size(key) for key, name in _SIZES.items()}
    heads = fields["num_attention_heads"]
    name, model_type = ARCHITECTURES[architecture]
    window = keys.size("attention.sliding_window") if keys.get("attention.sliding_window") else None
    if window is not None:
        if architecture != "llama":
            raise file.refusal(
                keys.name("attention.sliding_window"),
                f"{window}: the layers with a window are not in the file",
            )
        name, model_type = MISTRAL
        fields["sliding_window"] = window
    embedding = file.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise file.refusal(EMBEDDING, "the embedding is missing, or not rows of numbers")
    fields |= {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": _head_dim(keys, fields["hidden_size"], heads),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": HEAD not in file.tensors,
        "hidden_act": "silu",
        "dtype": "float32",
    }
    if architecture == "llama" and name != MISTRAL[0]:
        fields["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    fields["rope_theta"] = keys.number("rope.freq_base", 10000.0)
    if scaling := _scaling(keys, fields, rope_divisors):
        fields["rope_scaling"] = scaling
    return fields


def _require_whole(file: GgufFile) -> None:
    """Return if the file is a whole model. Raises BadGguf."""
    if (parts := file.metadata.get("split.count", 0)) not in (0, 1):
        raise file.refusal("split.count", f"one of {parts} parts; join them with `llama-gguf-split --merge`")
    if (kind := file.metadata.get("general.type", "model")) != "model":
        raise file.refusal("general.type", f"{_shown(kind)} is not a model")


def _require_inert(keys: _Keys) -> None:
    prefix = keys.architecture + "."
    for key, value in keys.file.metadata.items():
        own = key.removeprefix(prefix)
        if key.startswith(prefix) and own not in _READ and value not in _INERT.get(own, ()):
            raise keys.file.refusal(key, f"{_shown(value)} is not supported")


def _head_dim(keys: _Keys, hidden: int, heads: int) -> int:
    if keys.get("attention.key_length") is None and hidden % heads:
        raise keys.file.refusal(keys.name("attention.head_count"), f"{heads} heads do not divide {hidden}")
    head_dim = keys.size("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := keys.size(key, head_dim)) != head_dim:
            raise keys.file.refusal(keys.name(key), f"{found} differs from a head's {head_dim}")
    if head_dim % 2:
        raise keys.file.refusal(keys.name("attention.key_length"), f"a head of {head_dim} has no halves")
    return head_dim


def _scaling(
    keys: _Keys, fields: Mapping[str, Any], divisors: Sequence[float] | None
) -> dict[str, Any] | None:
    """Return how positions are scaled, which keys state, or a tensor of divisors as in Llama 3."""
    kind = keys.get("rope.scaling.type")
    if kind not in (None, "none", "linear", "yarn"):
        raise keys.file.refusal(keys.name("rope.scaling.type"), f"{_shown(kind)} is not supported")
    if divisors is not None:
        if kind not in (None, "none"):
            raise keys.file.refusal(ROPE_DIVISORS, f"the file has them beside a scaling of type {kind}")
        return _llama3(keys.file, fields["head_dim"], fields["rope_theta"], divisors)
    if kind in (None, "none"):
        return None
    found: dict[str, Any] = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        original = keys.size("rope.scaling.original_context_length", fields["max_position_embeddings"])
        found["original_max_position_embeddings"] = original
    return found


def _llama3(file: GgufFile, head_dim: int, theta: float, divisors: Sequence[float]) -> dict[str, Any] | None:
    """Return the scaling of Llama 3 that has these divisors; their last one is its factor."""
    if len(divisors) != head_dim // 2:
        raise file.refusal(ROPE_DIVISORS, f"{len(divisors)} divisors, not the {head_dim // 2} of a head")
    factor = divisors[-1]
    if all(divisor == 1.0 for divisor in divisors):
        return None
    if math.isfinite(factor) and factor > 1:
        expected = [_divisor(factor, 2 * math.pi * theta ** (2 * i / head_dim)) for i in range(head_dim // 2)]
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(divisors, expected, strict=True)):
            return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    raise file.refusal(ROPE_DIVISORS, "the divisors are not those of Llama 3 with any factor")


def _divisor(factor: float, wavelength: float) -> float:
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    turns = LLAMA3["original_max_position_embeddings"] / wavelength
    if turns > high:
        return 1.0
    if turns < low:
        return factor
    smooth = (turns - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


PIECE_VALUES: Final = 256 * 1024  # dequantised at once
_KEPT: Final = {"F32": "F32", "F16": "F16", "BF16": "BF16"}  # types stored as they are
_VALUE_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_DIVISORS: Final = 4096

# Names in a GGUF file by those of a checkpoint.
_OUTER: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

Report = Callable[[int, int], object]  # done and total bytes


@dataclass(frozen=True, slots=True)
class _Planned:
    """A tensor to write."""

    source: str  # name in the GGUF file
    tensor: GgufTensor  # its place there
    dtype: str  # type in the checkpoint
    heads: int  # number of heads whose rows are to be reordered; 0: none

    @property
    def size_bytes(self) -> int:
        return math.prod(self.tensor.shape) * _VALUE_BYTES[self.dtype]


def convert_gguf(path: Path, folder: Path, report: Report = lambda done, total: None) -> None:
    """Write a checkpoint that Fairway loads into an empty folder. Raises BadGguf, OSError."""
    file = read_gguf(path)
    config = config_of(file, _rope_divisors(file))
    tokens = tokens_of(file, config["vocab_size"])
    plan = _plan(file, config)
    needed = sum(planned.size_bytes for planned in plan.values())
    if needed > (free := shutil.disk_usage(folder).free):
        raise BadGguf(path, "tensors", f"the checkpoint takes {needed} bytes, {free} are free in {folder}")
    _write_small(folder, config, tokens)
    with (folder / SINGLE).open("wb") as out:
        _write_tensors(file, plan, out, report)


def _rope_divisors(file: GgufFile) -> list[float] | None:
    tensor = file.tensors.get(ROPE_DIVISORS)
    if tensor is None:
        return None
    if len(tensor.shape) != 1 or tensor.shape[0] > _MAX_DIVISORS or tensor.type != "F32":
        raise file.refusal(ROPE_DIVISORS, f"{tensor.type} of shape {tensor.shape} is no row of divisors")
    with file.path.open("rb") as stream:
        values: list[float] = _values(file, ROPE_DIVISORS, stream, tensor, 0, 1).ravel().tolist()
    return values


def _plan(file: GgufFile, config: dict[str, Any]) -> dict[str, _Planned]:
    """Return the tensors to write by their names: those that the configuration implies. Raises BadGguf."""
    try:
        shapes = expected_shapes(parse_config(config))
    except UnsupportedModel as error:
        raise file.refusal("general.architecture", str(error)) from error
    names = {_source_of(name): name for name in shapes}
    if missing := sorted(names.keys() - file.tensors.keys()):
        raise file.refusal(missing[0], f"the tensor is missing, with {len(missing) - 1} more")
    if extra := sorted(file.tensors.keys() - names.keys() - {ROPE_DIVISORS}):
        raise file.refusal(extra[0], f"the tensor is unexpected, with {len(extra) - 1} more")
    permuted = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    plan = {}
    for source, name in names.items():
        tensor = file.tensors[source]
        if tensor.shape != shapes[name]:
            raise file.refusal(source, f"its shape is {tensor.shape}, the metadata imply {shapes[name]}")
        _require_readable(file, source, tensor.type)
        is_llama = file.metadata["general.architecture"] == "llama"
        heads = permuted.get(source.split(".")[-2], 0) if is_llama else 0
        if heads and len(tensor.shape) == 1 and tensor.type not in _KEPT:
            raise file.refusal(source, f"a bias of type {tensor.type} is not read")
        plan[name] = _Planned(source, tensor, _KEPT.get(tensor.type, "F32"), heads)
    return plan


def _source_of(name: str) -> str:
    """Return the name in a GGUF file of a tensor of a checkpoint."""
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[part]}.{kind}"


def _require_readable(file: GgufFile, source: str, type_name: str) -> None:
    import gguf.quants

    known = {found.name for found in gguf.quants._type_traits}
    if type_name not in _KEPT and type_name not in known:
        raise file.refusal(source, f"its type {type_name} cannot be dequantised")


def _write_small(folder: Path, config: dict[str, Any], tokens: GgufTokens) -> None:
    generation: dict[str, Any] = dict(tokens.ids)
    if tokens.end_ids:
        generation["eos_token_id"] = list(tokens.end_ids)
    settings = tokens.settings | {"model_max_length": config["max_position_embeddings"]}
    for name, content in (
        ("config.json", config | tokens.ids),
        ("generation_config.json", generation),
        ("tokenizer.json", tokens.tokenizer),
        ("tokenizer_config.json", settings),
    ):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    for name, text in tokens.templates.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, "utf-8")


def _write_tensors(file: GgufFile, plan: dict[str, _Planned], out: IO[bytes], report: Report) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for name, planned in plan.items():
        header[name] = {
            "dtype": planned.dtype,
            "shape": planned.tensor.shape,
            "data_offsets": [total, total + planned.size_bytes],
        }
        total += planned.size_bytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    out.write(len(encoded).to_bytes(8, "little") + encoded)
    done = 0
    with file.path.open("rb") as stream:
        for planned in plan.values():
            for data in _pieces(file, planned, stream):
                done += out.write(data)
                report(done, total)


def _pieces(file: GgufFile, planned: _Planned, stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes of a tensor in order, by rows; of reordered ones by heads."""
    tensor = planned.tensor
    if planned.heads and len(tensor.shape) == 1:  # a bias
        rows = tensor.shape[0]
        tensor = GgufTensor((rows, 1), tensor.type, tensor.offset_bytes, tensor.row_bytes // rows)
    unit = tensor.rows // planned.heads if planned.heads else 1
    step = unit * max(1, PIECE_VALUES // (unit * tensor.shape[-1]))
    for first in range(0, tensor.rows, step):
        values = _values(file, planned.source, stream, tensor, first, min(step, tensor.rows - first))
        if planned.heads:  # conversions of llama interleave the halves of each head
            values = values.reshape(-1, unit // 2, 2, tensor.shape[-1]).swapaxes(1, 2)
        yield values.tobytes()


def _values(
    file: GgufFile, name: str, stream: IO[bytes], tensor: GgufTensor, first: int, rows: int
) -> NDArray[np.generic]:
    """Return rows of a tensor, as floats or as the halves that are in the file. Raises BadGguf."""
    import gguf.quants
    import numpy as np
    from gguf.constants import GGMLQuantizationType

    stream.seek(tensor.offset_bytes + first * tensor.row_bytes)
    data = stream.read(rows * tensor.row_bytes)
    if len(data) != rows * tensor.row_bytes:
        raise file.refusal(name, "the file became shorter while it was read")
    if tensor.type in _KEPT:
        return np.frombuffer(data, dtype="<f4" if tensor.type == "F32" else "<u2").reshape(rows, -1)
    # Blocks do not depend on each other: one long row is one call, where each 16 rows would be one.
    raw = np.frombuffer(data, dtype=np.uint8).reshape(1, -1)
    found: NDArray[np.float32] = gguf.quants.dequantize(raw, GGMLQuantizationType[tensor.type])
    return found.reshape(rows, -1)
