"""What a file contains is compared with what its name says; nothing that is refused here is ever loaded."""

from __future__ import annotations

import gzip
import io
import json
import pickle  # noqa: TID251  (it writes what must be refused)
import random
import tarfile
import zipfile
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from fairway.formats import contents, safetensors
from fairway.formats.contents import ContentRefused, checker_for
from fairway.formats.limits import EngineLimits, check_limits
from tests.support.model_folder import safetensors as safetensors_file


class Runs:
    """What a hostile pickle does when somebody loads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("owned",))


def check(path: str, data: bytes, *, size_bytes: int | None = None, piece: int = 1 << 20) -> None:
    checker = checker_for(path, len(data) if size_bytes is None else size_bytes)
    for start in range(0, len(data), piece):
        checker.feed(data[start : start + piece])
    checker.finish()


def tensor_file(header: object, data: bytes = b"", *, raw: bytes | None = None) -> bytes:
    body = json.dumps(header).encode() if raw is None else raw
    return len(body).to_bytes(8, "little") + body + data


def tensor(begin: int, end: int, **fields: object) -> dict[str, object]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]} | fields


def zipped(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, data)
    return buffer.getvalue()


def tarred(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


HOSTILE = {
    **{f"pickle protocol {number}": pickle.dumps(Runs(), protocol=number) for number in range(6)},
    "zip": zipped("data.pkl", pickle.dumps(Runs())),
    "zip behind text": b"hello\n" * 100 + zipped("data.pkl", pickle.dumps(Runs())),
    "tar": tarred("data.pkl", pickle.dumps(Runs())),
    "gzip": gzip.compress(pickle.dumps(Runs())),
    "pickle after a million opcodes": b"N0" * 600_000 + pickle.dumps(Runs(), protocol=0),
    "pickle behind a large value": b"(S'%s'\n0" % (b"x" * 100_000) + pickle.dumps(Runs(), protocol=0),
    "pickle of many lines": b"(I1\n" * 40_000 + pickle.dumps(Runs(), protocol=0),
}


@pytest.mark.parametrize(
    "name", ["notes.txt", "README.md", "a.jinja", "config.json", "x.safetensors", "LICENSE"]
)
@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_pickles_and_archives_are_refused_under_every_name(name: str, what: str, piece: int) -> None:
    with pytest.raises(ContentRefused) as caught:
        check(name, HOSTILE[what], piece=piece)
    assert str(caught.value).startswith(name)


@pytest.mark.parametrize("what", sorted(set(HOSTILE) - {"tar"}))  # nothing opens this file as a tar
def test_the_file_without_a_format_is_no_hiding_place(what: str) -> None:
    with pytest.raises(ContentRefused):
        check("tokenizer.model", HOSTILE[what])


def test_a_tokenizer_model_passes() -> None:
    check("tokenizer.model", b"\x0a\x0e\x0a\x05<unk>" + random.Random(1).randbytes(200_000))
    for piece in (7, 1 << 20):
        check("tokenizer.model", b"IQ== 0\nIg== 1\n" * 1000, piece=piece)
        check("tokenizer.model", b"IQ== 0\r\nICAgICA= 17", piece=piece)


@pytest.mark.parametrize(
    "data", [b"IQ== 0\ncos\nsystem\n", b"IQ== 0\nIg== x", b"A" * 10_000, b"U1 1\n\x93", b"I Q== 0\n"]
)
@pytest.mark.parametrize("piece", [3, 1 << 20])
def test_ranks_are_ranks_to_the_last_line(data: bytes, piece: int) -> None:
    with pytest.raises(ContentRefused, match="neither a SentencePiece model"):
        check("tokenizer.model", data, piece=piece)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("config.json", b'{"a": [1, 2.5e3, "\xc3\xbc", null]}'),
        ("README.md", "# Modell für alle\r\n\tEinrücken\n".encode()),
        ("notes.txt", b""),
        ("notes.txt", b"S'looks like a pickle'\n."),
        ("LICENSE", b"Apache License\n" * 700 + b"\x0c"),
        ("chat_template.jinja", b"{% for m in messages %}{{ m }}{% endfor %}"),
    ],
)
@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_what_is_what_its_name_says_passes(name: str, data: bytes, piece: int) -> None:
    check(name, data, piece=piece)


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("config.json", b"{", "not JSON"),
        ("config.json", b"", "not JSON"),
        ("config.json", b"[" * 200_000, "not JSON"),
        ("config.json", b'{"a": NaN}', "not JSON"),
        ("notes.txt", b"a\0b", "control characters"),
        ("notes.txt", b"\xff\xfe", "UTF-8"),
        ("README.md", b"half a character \xc3", "UTF-8"),
        ("engine_limits.json", b'{"max_context_tokens": -1}', "engine limits"),
        ("engine_limits.json", b'{"max_tokens": 1}', "engine limits"),
        ("engine_limits.json", b"[]", "engine limits"),
        ("safety_policy.json", b"[]", "JSON object"),
    ],
)
def test_what_is_not_is_refused_with_the_reason(name: str, data: bytes, problem: str) -> None:
    with pytest.raises(ContentRefused, match=problem):
        check(name, data)


def test_a_text_has_a_bound_before_it_is_held() -> None:
    with pytest.raises(ContentRefused, match="at most"):
        checker_for("notes.txt", contents.MAX_TEXT_BYTES + 1)
    lying = checker_for("notes.txt", 1)
    with pytest.raises(ContentRefused, match="at most"):
        for _ in range(2 + contents.MAX_TEXT_BYTES // (1 << 20)):
            lying.feed(b"x" * (1 << 20))


def test_what_is_parsed_whole_is_small() -> None:
    for name in ("config.json", "draft/config.json", "generation_config.json", "engine_limits.json"):
        with pytest.raises(ContentRefused, match=f"{name} has at most 1048576 bytes"):
            checker_for(name, contents.MAX_SMALL_BYTES + 1)
    checker_for("tokenizer.json", contents.MAX_TEXT_BYTES)


def test_engine_limits_are_read() -> None:
    assert check_limits(b'{"max_context_tokens": 8, "token_budget": 64}') == EngineLimits(8, 0, 64)


GOOD = tensor_file({"__metadata__": {"format": "pt"}, "a": tensor(0, 3), "b": tensor(3, 5)}, b"12345")
FIVE = b"12345"
LYING: dict[str, bytes] = {
    "truncated": GOOD[:-1],
    "cut within its header": GOOD[:20],
    "cut within its length": GOOD[:5],
    "empty": b"",
    "longer than its tensors": GOOD + b"x",
    "a length beyond the file": (10**6).to_bytes(8, "little") + b"{}",
    "a length beyond every bound": (2**63).to_bytes(8, "little") + b"{}",
    "no header": (0).to_bytes(8, "little"),
    "no JSON": tensor_file(None, raw=b"{nope"),
    "no object": tensor_file([]),
    "a list after blanks": tensor_file(None, raw=b"  [1]"),
    "deep": tensor_file(None, raw=b'{"a":' * 100_000),
    "an endless number": tensor_file(None, raw=b'{"a":' + b"9" * 5000 + b"}"),
    "a name twice": tensor_file(
        None, FIVE, raw=b'{"a":%s,"a":%s}' % ((json.dumps(tensor(0, 5)).encode(),) * 2)
    ),
    "a field twice": tensor_file(
        None, FIVE, raw=b'{"a":{"dtype":"U8","dtype":"I8","shape":[5],"data_offsets":[0,5]}}'
    ),
    "a field twice, spelled otherwise": tensor_file(
        None, FIVE, raw=rb'{"a":{"dtype":"U8","\u0064type":"I8","shape":[5],"data_offsets":[0,5]}}'
    ),
    "metadata twice": tensor_file(
        None, FIVE, raw=b'{"__metadata__":{},"__metadata__":{},"a":%s}' % json.dumps(tensor(0, 5)).encode()
    ),
    "a text of metadata twice": tensor_file(
        None, FIVE, raw=rb'{"__metadata__":{"\\":"","\\":"\""},"a":%s}' % json.dumps(tensor(0, 5)).encode()
    ),
    "no text in UTF-8": tensor_file(None, FIVE, raw=b'{"\xff":%s}' % json.dumps(tensor(0, 5)).encode()),
    "endless metadata": tensor_file({"__metadata__": {str(n): "" for n in range(10_001)}}),
    "overlap": tensor_file({"a": tensor(0, 3), "b": tensor(2, 5)}, FIVE),
    "gap": tensor_file({"a": tensor(0, 2), "b": tensor(3, 5)}, FIVE),
    "gap at the start": tensor_file({"a": tensor(1, 5)}, FIVE),
    "beyond the end": tensor_file({"a": tensor(0, 6)}, FIVE),
    "backwards": tensor_file({"a": tensor(5, 0, shape=[5])}, FIVE),
    "shape too small": tensor_file({"a": tensor(0, 5, shape=[4])}, FIVE),
    "shape too large": tensor_file({"a": tensor(0, 5, shape=[2**40])}, FIVE),
    "shape overflows": tensor_file({"a": tensor(0, 5, shape=[2**62, 2**62, 4])}, FIVE),
    "negative extent": tensor_file({"a": tensor(0, 5, shape=[-1, -5])}, FIVE),
    "extent is true": tensor_file({"a": tensor(0, 1, shape=[True])}, b"1"),
    "extent is a float": tensor_file({"a": tensor(0, 5, shape=[5.0])}, FIVE),
    "endless rank": tensor_file({"a": tensor(0, 1, shape=[1] * 100)}, b"1"),
    "dtype of another size": tensor_file({"a": tensor(0, 5, dtype="F32")}, FIVE),
    "unknown dtype": tensor_file({"a": tensor(0, 5, dtype="PICKLE")}, FIVE),
    "dtype is a list": tensor_file({"a": tensor(0, 5, dtype=["U8"])}, FIVE),
    "three offsets": tensor_file({"a": tensor(0, 5, data_offsets=[0, 5, 5])}, FIVE),
    "another field": tensor_file({"a": tensor(0, 5, code="import os")}, FIVE),
    "a tensor is a text": tensor_file({"a": "x"}),
    "metadata is a list": tensor_file({"__metadata__": [1], "a": tensor(0, 5)}, FIVE),
    "metadata holds an object": tensor_file({"__metadata__": {"a": {}}, "a": tensor(0, 5)}, FIVE),
}


@pytest.mark.parametrize("what", LYING)
@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
def test_a_tensor_file_that_lies_is_refused(what: str, piece: int) -> None:
    with pytest.raises(ContentRefused, match=r"m\.safetensors: "):
        check("m.safetensors", LYING[what], piece=piece)


@pytest.mark.parametrize("piece", [1, 5, 8, 9, 1 << 20])
def test_a_true_tensor_file_passes_in_any_pieces(piece: int) -> None:
    check("m.safetensors", GOOD, piece=piece)
    check("m.safetensors", tensor_file({}))
    check(
        "m.safetensors",
        tensor_file({"scalar": tensor(0, 1, shape=[]), "none": tensor(1, 1, shape=[0])}, b"1"),
    )
    check("m.safetensors", safetensors_file(5000), piece=max(piece, 100))
    texts = {
        "config": json.dumps({"a": 'b":c', "d": "\\"}),
        "\\": '"',
        '\\"': ":",
        "dtype": '\\\\"',
        "": "x\\",
    }
    named = {'"a":': tensor(0, 1), "dtype": tensor(1, 2), "\\": tensor(2, 3), '{"': tensor(3, 5)}
    check("m.safetensors", tensor_file({"__metadata__": texts, **named}, FIVE), piece=max(piece, 3))


def test_a_header_beyond_the_bound_is_refused_before_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 100)
    checker = checker_for("m.safetensors", 10**9)
    with pytest.raises(ContentRefused, match="at most 100"):
        checker.feed((101).to_bytes(8, "little"))


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=20),
        st.tuples(st.sampled_from(["<f4", "<f2", "u1", "<i8"]), st.lists(st.integers(0, 5), max_size=4)),
        max_size=5,
    )
)
def test_it_agrees_with_the_library_on_files_that_the_library_writes(
    tensors: dict[str, tuple[str, Sequence[int]]],
) -> None:
    import numpy as np

    tensors.pop("__metadata__", None)
    data = save({name: np.zeros(shape, dtype) for name, (dtype, shape) in tensors.items()})
    check("m.safetensors", data)
    load(data)
    if len(data) > 8 + int.from_bytes(data[:8], "little"):
        with pytest.raises(ContentRefused):
            check("m.safetensors", data[:-1])
