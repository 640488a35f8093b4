from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairway.v1 import registry_pb2 as pb
from services.core.errors import IntegrityError, InvalidInput
from services.core.manifest import (
    CHUNK_BYTES,
    MAX_CHUNKS,
    Manifest,
    ManifestFile,
    canonical_json,
    check_manifest,
    check_path,
    chunk_bases,
    digest_of,
    parse,
    sha256_of,
    weights_digest_of,
)
from services.rpc.channel import MAX_MESSAGE_BYTES

D = sha256_of(b"x")
CONFIG = ManifestFile("config.json", 1, D, (D,))


def make(*paths: str) -> Manifest:
    files = tuple(ManifestFile(path, 1, D, (D,)) for path in sorted({"config.json", *paths}))
    return Manifest(files, weights_digest=weights_digest_of(files))


def test_canonical_json_is_sorted_without_blanks_and_has_every_field() -> None:
    manifest = make("model.safetensors")
    body = canonical_json(manifest)
    parsed = json.loads(body)
    assert body == json.dumps(parsed, sort_keys=True, separators=(",", ":")).encode()
    assert set(parsed) == {
        "schema",
        "files",
        "kind",
        "tokenizer_digest",
        "chat_template_digest",
        "sampling_defaults_digest",
        "safety_policy_digest",
        "max_context_tokens",
        "weights_digest",
        "engine_limits_digest",
    }
    assert digest_of(manifest) == sha256_of(body)


_FILES = (
    b'"files":[{"chunks":["'
    + D.encode()
    + b'"],"digest":"'
    + D.encode()
    + b'","path":"config.json","size_bytes":1}]'
)


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (
            1,
            b'{"chat_template_digest":"",' + _FILES + b',"kind":"causal-lm","max_context_tokens":0,'
            b'"safety_policy_digest":"","sampling_defaults_digest":"","schema":1,"tokenizer_digest":""}',
        ),
        (
            2,
            b'{"chat_template_digest":"","engine_limits_digest":"",' + _FILES + b',"kind":"causal-lm",'
            b'"max_context_tokens":0,"safety_policy_digest":"","sampling_defaults_digest":"","schema":2,'
            b'"tokenizer_digest":"","weights_digest":""}',
        ),
    ],
)
def test_digest_of_a_known_manifest_never_changes(schema: int, body: bytes) -> None:
    """A change here renames every published version."""
    manifest = Manifest((CONFIG,), schema=schema)
    assert digest_of(manifest) == sha256_of(body)
    assert parse(body, sha256_of(body)) == manifest


PINS = {
    "tokenizer.json": "tokenizer_digest",
    "tokenizer.model": "tokenizer_digest",
    "chat_template.jinja": "chat_template_digest",
    "generation_config.json": "sampling_defaults_digest",
    "safety_policy.json": "safety_policy_digest",
    "engine_limits.json": "engine_limits_digest",
    "model.safetensors": "weights_digest",
}


@pytest.mark.parametrize(("path", "pin"), PINS.items())
def test_what_decides_behaviour_cannot_be_there_unpinned(path: str, pin: str) -> None:
    own = sha256_of(path.encode())
    files = tuple(sorted((CONFIG, ManifestFile(path, 1, own, (D,))), key=lambda file: file.path))
    right = weights_digest_of(files) or own
    check_manifest(Manifest(files, **{pin: right}))  # type: ignore[arg-type]
    for wrong in ("", D):
        with pytest.raises(InvalidInput, match=pin):
            check_manifest(Manifest(files, **{pin: wrong}))  # type: ignore[arg-type]


def test_weights_digest_follows_every_tensor_file() -> None:
    shards = [ManifestFile(f"m-{n}.safetensors", 1, sha256_of(b"%d" % n), (D,)) for n in range(3)]
    whole = weights_digest_of(shards)
    assert whole == weights_digest_of([*reversed(shards), CONFIG])
    assert len({whole, weights_digest_of(shards[:2]), weights_digest_of([]), ""}) == 3
    swapped = [replace(shards[0], digest=shards[1].digest), replace(shards[1], digest=shards[0].digest)]
    assert weights_digest_of([*swapped, shards[2]]) != whole


def test_schema_1_has_none_of_the_newer_fields() -> None:
    with pytest.raises(InvalidInput, match="schema 1"):
        check_manifest(Manifest((CONFIG,), schema=1, engine_limits_digest=D))


@pytest.mark.parametrize(
    "change",
    [{"max_context_tokens": 1}, {"tokenizer_digest": D}, {"kind": "fixed-cost"}, {"files": ()}],
)
def test_every_field_changes_the_digest(change: dict[str, object]) -> None:
    assert digest_of(replace(make(), **change)) != digest_of(make())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/config.json",
        "../config.json",
        "a/../config.json",
        "a/..",
        "..",
        ".",
        "./a.json",
        "a//b.json",
        "a/",
        "a\\b.json",
        "..\\a.json",
        "C:\\a.json",
        "C:/a.json",
        "a\0.json",
        "a\n.json",
        "a/./b.json",
        ".hidden.json",
        "a/.git/b.json",
        "ümlaut.json",
        "a b.json",
        "con\u202ejson.json",
        "trailing.json.",
        "x" * 600 + ".json",
        "/".join(["d"] * 9) + "/a.json",
        "~/a.json",
        "a.json/",
        "%2e%2e/a.json",
        "\ud800.json",
    ],
)
def test_paths_that_climb_or_hide_are_refused(path: str) -> None:
    with pytest.raises(InvalidInput):
        check_path(path)


@pytest.mark.parametrize(
    "path",
    [
        "pytorch_model.bin",
        "PYTORCH_MODEL.BIN",
        "a/model.pt",
        "m.pth",
        "m.pkl",
        "m.ckpt",
        "m.pickle",
        "m.joblib",
        "m.npy",
        "m.npz",
        "flax_model.msgpack",
        "model.pkl.json",
        "pytorch_model.bin.index.json",
        "README.pt",
        "tf_model.h5",
        "m.zip",
        "modeling_x.py",
        "x.so",
        "setup.sh",
        "x.pyc",
        "unknown",
        "data.csv",
        "a.onnx",
    ],
)
def test_pickles_code_and_the_unknown_are_refused(path: str) -> None:
    with pytest.raises(InvalidInput):
        check_path(path)


@pytest.mark.parametrize(
    "path",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "model.safetensors",
        "LICENSE",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "chat_template.jinja",
        "README.md",
        "LICENSE.txt",
        "sub/config.json",
        "Qwen2.5-0.5B/config.json",
    ],
)
def test_what_a_model_folder_holds_is_taken(path: str) -> None:
    check_path(path)


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        (("a.json", "A.json"), "one name"),
        (("Ab.json", "aB.json"), "one name"),
        (("a.json", "a.json/b.json"), "folder"),
        (("d/a.json", "D/b.json"), "another case"),
    ],
)
def test_paths_that_collide_are_refused(paths: tuple[str, ...], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        check_manifest(make(*paths))


def test_duplicates_and_disorder_are_refused() -> None:
    with pytest.raises(InvalidInput):
        check_manifest(Manifest((CONFIG, CONFIG)))
    with pytest.raises(InvalidInput, match="sorted"):
        check_manifest(Manifest((CONFIG, replace(CONFIG, path="a.json"))))


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest(()),
        replace(make(), schema=0),
        replace(make(), schema=3),
        replace(make(), kind="pickle"),
        replace(make(), tokenizer_digest=sha256_of(b"absent")),
        replace(make(), max_context_tokens=-1),
        Manifest((replace(CONFIG, digest="sha256:XYZ"),)),
        Manifest((replace(CONFIG, chunks=("md5:1",)),)),
        Manifest((replace(CONFIG, chunks=()),)),
        Manifest((replace(CONFIG, chunks=(D, D)),)),
        Manifest((replace(CONFIG, size_bytes=0),)),
        Manifest((replace(CONFIG, size_bytes=-1),)),
        Manifest((replace(CONFIG, size_bytes=CHUNK_BYTES + 1),)),
        Manifest((replace(CONFIG, path="tokenizer.json"),)),
    ],
)
def test_malformed_manifests_are_refused(manifest: Manifest) -> None:
    with pytest.raises(InvalidInput):
        check_manifest(manifest)


def test_the_largest_manifest_fits_in_a_message() -> None:
    digest, starts = sha256_of(b"x"), range(0, MAX_CHUNKS * CHUNK_BYTES, CHUNK_BYTES)
    file = pb.ManifestFile(path="a", digest=digest, chunks=[digest] * MAX_CHUNKS, chunk_starts=starts)
    assert file.ByteSize() < 0.97 * MAX_MESSAGE_BYTES
    many = ManifestFile("a", 1, digest, (digest,) * (MAX_CHUNKS + 1))
    with pytest.raises(InvalidInput, match="at most 204800 chunks"):
        check_manifest(replace(make(), files=(many,)))


def test_chunk_sizes_follow_from_the_file_size() -> None:
    file = ManifestFile("a.safetensors", 2 * CHUNK_BYTES + 7, D, (D, D, D))
    assert [file.chunk_bytes(index) for index in range(3)] == [CHUNK_BYTES, CHUNK_BYTES, 7]


def test_parse_takes_only_the_canonical_bytes_of_the_digest() -> None:
    manifest = make("model.safetensors")
    body = canonical_json(manifest)
    assert parse(body, digest_of(manifest)) == manifest
    with pytest.raises(IntegrityError):
        parse(body.replace(b'"size_bytes":1', b'"size_bytes":2'), digest_of(manifest))
    climbing = body.replace(b"model.safetensors", b"../../x.safetensors")
    for other in (body + b" ", b"[" * 100_000, b"{" * 100_000, b"", b"null", climbing):
        with pytest.raises(IntegrityError):
            parse(other, digest_of(manifest))
        with pytest.raises(IntegrityError):
            parse(other, sha256_of(other))


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40))
def test_a_path_that_passes_stays_below_its_folder(path: str) -> None:
    try:
        check_path(path)
    except InvalidInput:
        return
    import posixpath

    assert posixpath.normpath(path) == path
    assert not posixpath.isabs(path)
    assert ".." not in path.split("/")
    assert path.isascii()


def _cut(name: str, sizes: Sequence[int], chunks: Sequence[str]) -> ManifestFile:
    starts = tuple(sum(sizes[:at]) for at in range(len(sizes)))
    digests = tuple(sha256_of(chunk.encode()) for chunk in chunks)
    return ManifestFile(name, sum(sizes), D, digests, starts)


def test_chunks_may_begin_where_the_file_says() -> None:
    file = _cut("a.safetensors", [5, CHUNK_BYTES, 7], "abc")
    assert [file.start(at) for at in range(4)] == [0, 5, CHUNK_BYTES + 5, CHUNK_BYTES + 12]
    assert [file.chunk_bytes(at) for at in range(3)] == [5, CHUNK_BYTES, 7]
    manifest = Manifest((file, CONFIG), weights_digest=weights_digest_of((file,)))
    assert parse(canonical_json(manifest), digest_of(manifest)) == manifest
    assert b"starts" not in canonical_json(Manifest((CONFIG,)))


@pytest.mark.parametrize(
    "starts", [(), (0,), (1, 5, 9), (0, 5, 5), (0, 9, 5), (0, 5, CHUNK_BYTES + 12), (0, 5, CHUNK_BYTES + 6)]
)
def test_starts_that_do_not_cut_the_file_are_refused(starts: tuple[int, ...]) -> None:
    file = replace(_cut("a.safetensors", [5, CHUNK_BYTES, 7], "abc"), starts=starts)
    with pytest.raises(InvalidInput, match="do not cut"):
        check_manifest(Manifest((file, CONFIG), weights_digest=weights_digest_of((file,))))


def test_chunks_pair_with_those_of_an_older_version_by_place_and_size() -> None:
    old = (_cut("a.safetensors", [5, 100, 200, 7], "abcd"), _cut("b.safetensors", [9], "e"))
    new = (_cut("a.safetensors", [6, 100, 300, 200, 7], "ABXCd"), _cut("c.safetensors", [9], "E"))
    found = chunk_bases(new, old)
    assert {name: found.get(sha256_of(name.encode())) for name in "ABXCdE"} == {
        "A": None,  # of another size
        "B": (old[0], 1),
        "X": None,
        "C": (old[0], 2),
        "d": None,  # it is there
        "E": None,  # a file of another name
    }
