"""Files that anyone may have made: each is refused with its name, the key or tensor, and the cause."""

from __future__ import annotations

import random
import re
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fairway.importing.gguf_convert import convert_gguf
from fairway.importing.gguf_file import BadGguf
from tests.support.gguf_files import byte_level, sentencepiece
from tests.tidy.sources import ROOT

HIDDEN, INNER, HEADS, ROWS = 32, 64, 2, 420
F32, F16, Q4_0, Q4_K, I8, Q8_K = 0, 1, 2, 12, 24, 15
TYPES = {bool: 7, str: 8, int: 4, float: 6}
FORMS = {bool: "<?", int: "<I", float: "<f"}


@dataclass(frozen=True)
class Raw:
    """A value of any type number, as bytes."""

    kind: int
    data: bytes


@dataclass
class Described:
    """A tensor's description; its data follow those of the tensors before it."""

    extents: tuple[int, ...]  # the fastest first
    kind: int = F32
    offset: int | None = None
    rank: int | None = None


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def encoded(value: Any) -> bytes:
    if isinstance(value, Raw):
        return struct.pack("<I", value.kind) + value.data
    if isinstance(value, list):
        kind = type(value[0])
        items = b"".join(
            map(text, value) if kind is str else (struct.pack(FORMS[kind], item) for item in value)
        )
        return struct.pack("<IIQ", 9, TYPES[kind], len(value)) + items
    data = text(value) if isinstance(value, str) else struct.pack(FORMS[type(value)], value)
    return struct.pack("<I", TYPES[type(value)]) + data


def metadata(tokenizer: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.block_count": 1,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        **(tokenizer or byte_level("llama-bpe")),
    }


def tensors() -> dict[str, Described]:
    square, inner = (HIDDEN, HIDDEN), (HIDDEN, INNER)
    layer = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "ffn_gate": inner, "ffn_up": inner}
    layer |= {"ffn_down": (INNER, HIDDEN), **{f"attn_{part}": square for part in ("q", "k", "v", "output")}}
    shapes = {"token_embd": (HIDDEN, ROWS), "output_norm": (HIDDEN,)}
    shapes |= {f"blk.0.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": Described(shape) for name, shape in shapes.items()}


@dataclass
class Content:
    """A file that converts, until a case changes it."""

    magic: bytes = b"GGUF"
    version: int = 3
    counts: tuple[int | None, int | None] = (None, None)
    pairs: list[tuple[bytes, Any]] = field(
        default_factory=lambda: [(k.encode(), v) for k, v in metadata().items()]
    )
    tensors: list[tuple[bytes, Described]] = field(
        default_factory=lambda: [(name.encode(), found) for name, found in tensors().items()]
    )
    data_bytes: int | None = None
    cut: int | None = None

    def put(self, key: str, value: Any) -> Content:
        self.pairs = [pair for pair in self.pairs if pair[0] != key.encode()]
        self.pairs += [] if value is None else [(key.encode(), value)]
        return self

    def without(self, prefix: str) -> Content:
        self.pairs = [pair for pair in self.pairs if not pair[0].decode().startswith(prefix)]
        return self

    def tensor(self, name: str, **changes: Any) -> Content:
        found = dict(self.tensors)[name.encode()]
        for key, value in changes.items():
            setattr(found, key, value)
        return self

    def write(self, path: Path) -> Path:
        counts = [len(self.tensors), len(self.pairs)]
        counts = [own if given is None else given for own, given in zip(counts, self.counts, strict=True)]
        head = self.magic + struct.pack("<IQQ", self.version, *counts)
        head += b"".join(text(key) + encoded(value) for key, value in self.pairs)
        at = 0
        for name, found in self.tensors:
            offset = at if found.offset is None else found.offset
            rank = len(found.extents) if found.rank is None else found.rank
            head += text(name) + struct.pack(f"<I{len(found.extents)}Q", rank, *found.extents)
            head += struct.pack("<IQ", found.kind, offset)
            size = 4
            for extent in found.extents[:4]:
                size = min(size * extent, 1 << 20)
            at += -(-size // 32) * 32
        body = head + b"\0" * (-len(head) % 32) + b"\0" * (at if self.data_bytes is None else self.data_bytes)
        path.write_bytes(body[: self.cut])
        return path


Change = Callable[[Content], Any]
TOKENS = "tokenizer.ggml.tokens"
MERGES = "tokenizer.ggml.merges"


def array(kind: int, count: int, data: bytes = b"") -> Raw:
    return Raw(9, struct.pack("<IQ", kind, count) + data)


def spm(content: Content, **changes: Any) -> Content:
    content.without("tokenizer.")
    content.pairs += [(key.encode(), value) for key, value in (sentencepiece() | changes).items()]
    content.tensor("token_embd.weight", extents=(HIDDEN, 700))
    return content


def scores(value: float) -> list[float]:
    found: list[float] = sentencepiece()["tokenizer.ggml.scores"]
    return [value, *found[1:]]


def with_tensor(content: Content, name: str, found: Described) -> None:
    content.tensors.append((name.encode(), found))


CASES: dict[str, tuple[Change, str]] = {
    # --- the header ---
    "empty": (
        lambda c: setattr(c, "cut", 0),
        "header: the file is truncated: 24 bytes are needed, 0 are left",
    ),
    "magic": (lambda c: setattr(c, "magic", b"GGML"), "header: it does not begin with GGUF"),
    "a pickle": (lambda c: setattr(c, "magic", b"\x80\x04\x95c"), "header: it does not begin with GGUF"),
    "version 1": (lambda c: setattr(c, "version", 1), "version: 1 is not one of 2 and 3"),
    "big-endian": (lambda c: setattr(c, "version", 3 << 24), "version: its numbers are big-endian"),
    "many pairs": (lambda c: setattr(c, "counts", (None, 1 << 63)), "kv_count: 9223372036854775808 pairs"),
    "many tensors": (lambda c: setattr(c, "counts", (1 << 40, None)), "tensor_count: 1099511627776 tensors"),
    "a pair more": (
        lambda c: setattr(c, "counts", (None, 50)),
        "metadata key 18: a text of 118219490218475520 bytes; at most 256",
    ),
    "a tensor more": (lambda c: setattr(c, "counts", (12, None)), r"\(no name\): it has 0 dimensions"),
    "cut in a key": (lambda c: setattr(c, "cut", 40), "metadata key 0: the file is truncated"),
    "cut in a value": (lambda c: setattr(c, "cut", 60), "general.architecture: the file is truncated"),
    "cut in data": (lambda c: setattr(c, "data_bytes", 64), "token_embd.weight: its data ends at byte"),
    "no data": (lambda c: setattr(c, "data_bytes", 0), "token_embd.weight: its data ends at byte"),
    "cut in the counts": (
        lambda c: setattr(c, "cut", 23),
        "header: the file is truncated: 24 bytes are needed, 23",
    ),
    # --- metadata ---
    "a key twice": (
        lambda c: c.pairs.append((b"llama.block_count", 1)),
        "llama.block_count: it occurs twice",
    ),
    "a long key": (
        lambda c: c.pairs.append((b"k" * 300, 1)),
        "metadata key 17: a text of 300 bytes; at most 256",
    ),
    "a key of no UTF-8": (lambda c: c.pairs.append((b"\xff", 1)), "metadata key 17: a text is not UTF-8"),
    "a huge text": (
        lambda c: c.put("general.name", Raw(8, struct.pack("<Q", 1 << 62))),
        "general.name: a text of 4611686018427387904 bytes; at most 4194304 are read",
    ),
    "a text beyond the end": (
        lambda c: c.put("general.name", Raw(8, struct.pack("<Q", 1 << 22))),
        "general.name: the file is truncated: 4194304 bytes are needed",
    ),
    "a text of no UTF-8": (
        lambda c: c.put("general.name", Raw(8, text(b"\xc3"))),
        "general.name: a text is not UTF-8",
    ),
    "an unknown type": (
        lambda c: c.put("general.name", Raw(77, b"")),
        "general.name: its type 77 is unknown",
    ),
    "a bool of 2": (
        lambda c: c.put("general.name", Raw(7, b"\x02")),
        "general.name: a bool is neither 0 nor 1",
    ),
    "a huge array": (
        lambda c: c.put(TOKENS, array(8, 1 << 61)),
        f"{TOKENS}: an array of 2305843009213693952; all arrays have at most 4000000 values",
    ),
    "an array beyond the end": (
        lambda c: c.put("x", array(12, 1 << 21)),
        "x: the file is truncated: 16777216 bytes",
    ),
    "many arrays": (
        lambda c: [c.put(f"x{n}", array(0, 1_000_000, b"\0" * 1_000_000)) for n in range(5)],
        "x3: an array of 1000000; all arrays have at most 4000000 values",
    ),
    "an array of arrays": (lambda c: c.put("x", array(9, 1)), "x: arrays of arrays are not read"),
    "an array of an unknown type": (
        lambda c: c.put("x", array(99, 1)),
        "x: an array of the unknown type 99 is not read",
    ),
    "alignment 0": (lambda c: c.put("general.alignment", 0), "general.alignment: 0 is no power of two"),
    "alignment 48": (lambda c: c.put("general.alignment", 48), "general.alignment: 48 is no power of two"),
    "alignment 2^31": (
        lambda c: c.put("general.alignment", 1 << 31),
        "general.alignment: 2147483648 is no power",
    ),
    # --- tensors ---
    "no dimensions": (
        lambda c: c.tensor("output_norm.weight", extents=()),
        "output_norm.weight: it has 0 dimensions",
    ),
    "many dimensions": (
        lambda c: c.tensor("output_norm.weight", rank=1 << 31),
        "output_norm.weight: it has 2147483648 dimensions, not 1 to 4",
    ),
    "an extent of 0": (
        lambda c: c.tensor("output_norm.weight", extents=(0,)),
        r"output_norm.weight: its shape \(0,\) is outside what is read",
    ),
    "a huge extent": (
        lambda c: c.tensor("output_norm.weight", extents=(1 << 40,)),
        r"output_norm.weight: its shape \(1099511627776,\) is outside",
    ),
    "a product beyond 64 bits": (
        lambda c: c.tensor("output_norm.weight", extents=(1 << 31, 1 << 31, 4)),
        r"output_norm.weight: its shape \(4, 2147483648, 2147483648\) is outside",
    ),
    "a ggml type": (
        lambda c: c.tensor("output_norm.weight", kind=4),
        "output_norm.weight: its ggml type 4 is unknown",
    ),
    "a ggml type that is removed": (
        lambda c: c.tensor("output_norm.weight", kind=0xFFFFFFFF),
        "output_norm.weight: its ggml type 4294967295 is unknown",
    ),
    "rows of part of a block": (
        lambda c: c.tensor("blk.0.attn_q.weight", kind=Q4_K),
        "blk.0.attn_q.weight: rows of 32 are no multiple of Q4_K's 256",
    ),
    "an offset that is not aligned": (
        lambda c: c.tensor("output_norm.weight", offset=33),
        "output_norm.weight: its offset 33 is no multiple of 32",
    ),
    "an offset beyond the file": (
        lambda c: c.tensor("output_norm.weight", offset=1 << 62),
        "output_norm.weight: its data ends at byte 46116860184273",
    ),
    "overlapping data": (
        lambda c: c.tensor("output_norm.weight", offset=32),
        "output_norm.weight: its data overlaps that of token_embd.weight",
    ),
    "one place for two": (
        lambda c: c.tensor("blk.0.ffn_up.weight", offset=0),
        "token_embd.weight: its data overlaps that of blk.0.ffn_up.weight",
    ),
    "a tensor twice": (
        lambda c: with_tensor(c, "output_norm.weight", Described((HIDDEN,))),
        "output_norm.weight: two tensors have this name",
    ),
    "a type that is not dequantised": (
        lambda c: c.tensor("blk.0.attn_v.weight", kind=I8),
        "blk.0.attn_v.weight: its type I8 cannot be dequantised",
    ),
    "a missing tensor": (
        lambda c: c.tensors.pop(),
        "blk.0.attn_output.weight: the tensor is missing, with 0 more",
    ),
    "a tensor of another model": (
        lambda c: with_tensor(c, "blk.0.ffn_gate_inp.weight", Described((HIDDEN,))),
        "blk.0.ffn_gate_inp.weight: the tensor is unexpected, with 0 more",
    ),
    "a shape of another model": (
        lambda c: c.tensor("blk.0.ffn_down.weight", extents=(HIDDEN, INNER)),
        r"blk.0.ffn_down.weight: its shape is \(64, 32\), the metadata imply \(32, 64\)",
    ),
    "no embedding": (lambda c: c.tensors.pop(0), "token_embd.weight: the embedding is missing"),
    "divisors of another length": (
        lambda c: with_tensor(c, "rope_freqs.weight", Described((5,))),
        "rope_freqs.weight: 5 divisors, not the 8 of a head",
    ),
    "divisors of zero": (
        lambda c: with_tensor(c, "rope_freqs.weight", Described((8,))),
        "rope_freqs.weight: the divisors are not those of Llama 3",
    ),
    # --- the model ---
    "no architecture": (
        lambda c: c.put("general.architecture", None),
        "general.architecture: it is missing is not",
    ),
    "another architecture": (
        lambda c: c.put("general.architecture", "gemma2"),
        "general.architecture: 'gemma2' is not supported; supported: llama, qwen2, qwen3",
    ),
    "an architecture of a number": (
        lambda c: c.put("general.architecture", 7),
        "general.architecture: 7 is not",
    ),
    "experts": (lambda c: c.put("llama.expert_count", 8), "llama.expert_count: 8 is not supported"),
    "a part of a model": (lambda c: c.put("split.count", 3), "split.count: one of 3 parts; join them"),
    "an adapter": (lambda c: c.put("general.type", "adapter"), "general.type: 'adapter' is not a model"),
    "no heads": (
        lambda c: c.put("llama.attention.head_count", 0),
        "llama.attention.head_count: 0 is no size",
    ),
    "heads by layer": (
        lambda c: c.put("llama.attention.head_count", [2, 2]),
        r"head_count: \[2, 2\] is no size",
    ),
    "heads that do not divide": (
        lambda c: c.put("llama.attention.head_count", 3),
        "head_count: 3 heads do not divide",
    ),
    "kv heads that do not divide": (
        lambda c: c.put("llama.attention.head_count_kv", 5),
        "general.architecture: num_key_value_heads: 5 is not supported",
    ),
    "half a rotation": (
        lambda c: c.put("llama.rope.dimension_count", 8),
        "dimension_count: 8 differs from a head's 16",
    ),
    "an epsilon of nan": (
        lambda c: c.put("llama.attention.layer_norm_rms_epsilon", float("nan")),
        "layer_norm_rms_epsilon: nan is no positive number",
    ),
    "many layers": (
        lambda c: c.put("llama.block_count", 1 << 30),
        "num_hidden_layers: 1073741824 is not supported",
    ),
    "a scaling": (
        lambda c: c.put("llama.rope.scaling.type", "longrope"),
        "rope.scaling.type: 'longrope' is not supported",
    ),
    "a text for a size": (
        lambda c: c.put("llama.context_length", "64"),
        "llama.context_length: '64' is no size",
    ),
    # --- the tokenizer ---
    "no tokens": (lambda c: c.put(TOKENS, None), f"{TOKENS}: it is missing"),
    "tokens of numbers": (lambda c: c.put(TOKENS, [1, 2]), f"{TOKENS}: it is no array of str"),
    "more tokens than rows": (
        lambda c: c.tensor("token_embd.weight", extents=(HIDDEN, 64)),
        f"{TOKENS}: [0-9]+ tokens, the embedding has 64 rows",
    ),
    "a token twice": (lambda c: c.put(TOKENS, ["a", "b", "a"]), f"{TOKENS}: token 0 has the text of token 2"),
    "another tokenizer": (
        lambda c: c.put("tokenizer.ggml.model", "bert"),
        "tokenizer.ggml.model: 'bert' is not supported; supported: gpt2",
    ),
    "another split": (
        lambda c: c.put("tokenizer.ggml.pre", "viking"),
        "tokenizer.ggml.pre: the split 'viking' is not supported; supported: default, gpt-2",
    ),
    "types of other tokens": (
        lambda c: c.put("tokenizer.ggml.token_type", [1]),
        "token_type: 1 values, there are",
    ),
    "no merges": (lambda c: c.put(MERGES, None), f"{MERGES}: it is missing"),
    "a merge of nothing": (lambda c: c.put(MERGES, ["ab"]), f"{MERGES}: merge 0, 'ab', does not join"),
    "a merge of no tokens": (
        lambda c: c.put(MERGES, ["a 漢"]),
        f"{MERGES}: merge 0, 'a 漢', does not join",
    ),
    "an end that is no token": (
        lambda c: c.put("tokenizer.ggml.eos_token_id", 1 << 31),
        "eos_token_id: 2147483648 is no id of the",
    ),
    "a flag of a number": (lambda c: c.put("tokenizer.ggml.add_bos_token", 1), "add_bos_token: 1 is no bool"),
    "a template of a number": (
        lambda c: c.put("tokenizer.chat_template", 1),
        "tokenizer.chat_template: it is no text",
    ),
    "a score of nan": (
        lambda c: spm(c, **{"tokenizer.ggml.scores": scores(float("nan"))}),
        "scores: a score is not",
    ),
    "no scores": (
        lambda c: spm(c).put("tokenizer.ggml.scores", None),
        "tokenizer.ggml.scores: it is missing",
    ),
    "a long piece": (
        lambda c: spm(c, **{TOKENS: ["a" * 257, *sentencepiece()[TOKENS][1:]]}),
        f"{TOKENS}: a token of 257 characters; at most 256 are read",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_is_refused_by_its_key_and_cause(name: str, tmp_path: Path) -> None:
    change, expected = CASES[name]
    content = Content()
    change(content)
    (tmp_path / "out").mkdir()
    with pytest.raises(BadGguf, match=rf"^hostile\.gguf: .*{expected}"):
        convert_gguf(content.write(tmp_path / "hostile.gguf"), tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.safetensors"))


def test_there_are_many_and_without_a_change_the_file_converts(tmp_path: Path) -> None:
    assert len(CASES) >= 60
    for name, content in (("a", Content()), ("b", spm(Content()))):
        (tmp_path / name).mkdir()
        convert_gguf(content.write(tmp_path / f"{name}.gguf"), tmp_path / name)


@pytest.mark.parametrize("seed", range(20))
def test_drawn_damage_is_refused_or_harmless(seed: int, tmp_path: Path) -> None:
    """Bytes of the header replaced by drawn ones: a refusal with the file's name, or a checkpoint."""
    rng = random.Random(seed)
    whole = Content().write(tmp_path / "m.gguf").read_bytes()
    for number in range(15):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.choice((rng.randrange(1000), rng.randrange(len(whole) // 8)))
            damaged[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        path = tmp_path / f"d{number}.gguf"
        path.write_bytes(damaged)
        (tmp_path / str(number)).mkdir()
        problem = ""
        try:
            convert_gguf(path, tmp_path / str(number))
        except BadGguf as error:
            problem = str(error)
        assert not problem or re.match(rf"d{number}\.gguf: ", problem)


def test_memory_is_bounded_whatever_the_counts(tmp_path: Path) -> None:
    """A file of 32 MB of short texts is read within a bound, in a process whose memory is limited."""
    tokens = array(8, 3_500_000, (struct.pack("<Q", 1) + b"a") * 3_500_000)
    path = Content().put(TOKENS, tokens).write(tmp_path / "m.gguf")
    code = "import sys, pathlib as p, fairway.importing.gguf_file as f; f.read_gguf(p.Path(sys.argv[1]))"

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    subprocess.run([sys.executable, "-c", code, str(path)], check=True, preexec_fn=limited, cwd=ROOT)
