"""Small GGUF files as conversions of llama.cpp write them, and the values that they hold."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from gguf import quants

from fairway.importing.gguf_convert import _source_of

TEMPLATE: Final = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
CORPUS: Final = (
    "the quick brown fox jumps over the lazy dog and then another fox, who didn't, couldn't and won't; 1234 "
    "and 42 zwölf Boxkämpfer jagen  Viktor\n\n\tquer über den großen Sylter Deich; the naïve café"
)
# The place of the two halves that scale a block of k-quants, and its bytes.
_K_SCALES: Final[Mapping[str, tuple[tuple[int, ...], int]]] = {
    "Q2_K": ((80, 82), 84),
    "Q3_K": ((108,), 110),
    "Q4_K": ((0, 2), 144),
    "Q5_K": ((0, 2), 176),
    "Q6_K": ((208,), 210),
}

Metadata = Mapping[str, Any]


def byte_alphabet() -> list[str]:
    """Return the characters of GPT-2's byte-level alphabet, by byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + other.index(byte)) for byte in range(256)]


def byte_level(pre: str, *, seed: int = 0, extra: int = 160) -> dict[str, Any]:
    """Return the metadata of a byte-level vocabulary whose merges are drawn from a corpus."""
    rng, alphabet = random.Random(seed), byte_alphabet()
    tokens, merges = list(alphabet), list[str]()
    # Where digits are apart, no merge has one.
    read = [word for word in CORPUS.split() if pre != "smollm" or not any(map(str.isdigit, word))]
    words = ["".join(alphabet[byte] for byte in f" {word}".encode()) for word in read]
    cut = [list(word) for word in words]
    while len(merges) < extra:
        pairs = {pair for word in cut for pair in pairwise(word)}
        if not pairs:
            break
        left, right = rng.choice(sorted(pairs))
        merges.append(f"{left} {right}")
        if left + right not in tokens:
            tokens.append(left + right)
        for word in cut:
            for place in range(len(word) - 2, -1, -1):
                if word[place : place + 2] == [left, right]:
                    word[place : place + 2] = [left + right]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*special, *tokens, "<think>"],
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * len(tokens) + [USER],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def sentencepiece(*, seed: int = 0) -> dict[str, Any]:
    """Return the metadata of a SentencePiece vocabulary: bytes, characters and pieces with drawn scores."""
    rng = random.Random(seed)
    text = "▁" + CORPUS.replace(" ", "▁").replace("\n", "").replace("\t", "")
    pieces = dict.fromkeys(
        text[place : place + length]
        for length in (2, 3, 4, 5)
        for place in sorted(rng.sample(range(len(text) - length), 60))
    )
    # As trained ones, each piece is a merge of two shorter ones.
    for piece in [*pieces]:
        pieces.update(dict.fromkeys(piece[:length] for length in range(2, len(piece))))
    characters = sorted(set(text))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *characters]
    scores = [0.0] * 259 + [-float(rng.randrange(40)) for _ in pieces] + [-1e4] * len(characters)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL]
        + [BYTE] * 256
        + [NORMAL] * (len(pieces) + len(characters)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def shape_of(config: Any, architecture: str) -> dict[str, Any]:
    """Return the metadata of a shape, from a config of transformers."""
    fields = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(np.float32(config.rms_norm_eps)),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fields |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if architecture == "llama":
        fields["rope.dimension_count"] = head_dim
    if getattr(config, "sliding_window", None) and architecture == "llama":
        fields["attention.sliding_window"] = config.sliding_window
    return {f"{architecture}.{name}": value for name, value in fields.items()}


def stored(values: np.ndarray[Any, Any], type_name: str, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return a tensor's bytes in a type; in one that nothing here quantises to, drawn blocks of that size."""
    kind = gguf.GGMLQuantizationType[type_name]
    if type_name not in _K_SCALES:
        found: np.ndarray[Any, Any] = quants.quantize(values, kind)
        return found
    places, block_bytes = _K_SCALES[type_name]
    blocks = rng.integers(0, 256, (values.size // 256, block_bytes), dtype=np.uint8)
    for place in places:
        scale = rng.uniform(-0.002, 0.002, len(blocks)).astype("<f2")
        blocks[:, place : place + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(values.shape[0], -1)


def interleaved(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return the rows of q or k as conversions of llama order them."""
    shape = (heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return values.reshape(shape).swapaxes(1, 2).reshape(values.shape)


def write_model(
    path: Path, model: Any, architecture: str, tokenizer: Metadata, *, type_name: str = "F32", seed: int = 0
) -> dict[str, np.ndarray[Any, Any]]:
    """Write a model of transformers as a GGUF file; return the float32 values that it holds."""
    rng, config = np.random.default_rng(seed), model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors: dict[str, tuple[np.ndarray[Any, Any], str]] = {}
    values: dict[str, np.ndarray[Any, Any]] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own = tensor.float().numpy()
        kind = type_name if own.ndim == 2 else "F32"
        data = stored(own, kind, rng)
        values[name] = quants.dequantize(data, gguf.GGMLQuantizationType[kind]).reshape(own.shape)
        count = heads.get(name.split(".")[-2], 0) if architecture == "llama" else 0
        tensors[_source_of(name)] = (interleaved(data, count) if count else data, kind)
    write_file(
        path, {"general.architecture": architecture, **shape_of(config, architecture), **tokenizer}, tensors
    )
    return values


def write_file(
    path: Path, metadata: Metadata, tensors: Mapping[str, tuple[np.ndarray[Any, Any], str]]
) -> None:
    """Write a GGUF file of these values; a float32 for a float, a uint32 for a number."""
    writer = gguf.GGUFWriter(path, str(metadata["general.architecture"]))
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        kind = {bool: "bool", str: "string", float: "float32", int: "uint32", list: "array"}[type(value)]
        getattr(writer, f"add_{kind}")(key, value)
    for name, (data, type_name) in tensors.items():
        raw = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
