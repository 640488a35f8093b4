"""Manifest of a model version: a list of files, each a list of chunks, all addressed by sha256.

The digest of a manifest's canonical JSON names the version, so a version cannot change. A file is cut into
chunks of exactly ``CHUNK_BYTES``, except for the shorter last one, or at ``starts``, which follow from its
tensors: the same folder always gives the same manifest. A version contains only data: file names that stand
for pickled objects or program code are rejected, and so is every name that is not in the allow-list.

Six things decide how a version behaves, and the manifest pins each by digest: weights, tokenizer, chat
template, sampling defaults, safety policy, engine limits. A file that decides one of them must be pinned. A
draft counts as weights: the tokens it proposes change when the other tokens are
produced, not which. So does a safety probe, whose scores engines compute.

An adapter names its base, another version. Its files are in addition to those of the base.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from itertools import pairwise
from typing import Final, Literal

import msgspec

from fairway.formats.limits import LIMITS_NAME, POLICY_NAME
from fairway.formats.version_files import (
    ADAPTER_CONFIG,
    adapter_problem,
    draft_problem,
    name_problem,
    repetition_problem,
    weights_digest,
)
from services.core.errors import IntegrityError, InvalidInput

SCHEMA: Final = 2
ADAPTER_SCHEMA: Final = 3  # schema of adapters; other versions keep their digests
_SCHEMAS: Final = (1, SCHEMA, ADAPTER_SCHEMA)  # versions of schema 1 keep their digests
CHUNK_BYTES: Final = 4 * 1024 * 1024
MAX_FILES: Final = 4096
MAX_CHUNKS: Final = 204_800  # a manifest with their digests and offsets fits in a message of 16 MiB
MAX_PATH_BYTES: Final = 512
MAX_PATH_PARTS: Final = 8
MAX_MANIFEST_BYTES: Final = 64 * 1024 * 1024

Kind = Literal["causal-lm", "fixed-cost", "safety-pack"]
KINDS: Final = ("causal-lm", "fixed-cost", "safety-pack")

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_MODEL: Final = re.compile(r"[a-z0-9]([a-z0-9._-]{0,126}[a-z0-9])?")
_TAG: Final = re.compile(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?")
# ASCII only: a name has one spelling on any file system. No leading or trailing dot.
_PART: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._+-]*[A-Za-z0-9_+-])?")
# Files that decide a behaviour; the first of each tuple that a version contains is pinned.
_PINNED: Final = {
    "tokenizer_digest": ("tokenizer.json", "tokenizer.model"),
    "chat_template_digest": ("chat_template.jinja",),
    "sampling_defaults_digest": ("generation_config.json",),
    "safety_policy_digest": (POLICY_NAME,),
    "engine_limits_digest": (LIMITS_NAME,),
}
_NEW_IN_2: Final = ("weights_digest", "engine_limits_digest")
_NEW_IN_3: Final = ("base_model", "base_digest")
_NEWER: Final = {1: (*_NEW_IN_2, *_NEW_IN_3), SCHEMA: _NEW_IN_3, ADAPTER_SCHEMA: ()}


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One file. Its chunks, joined, have its size and its digest."""

    path: str
    size_bytes: int
    digest: str
    chunks: tuple[str, ...] = ()
    # The offset of each chunk; UNSET: all but the last have CHUNK_BYTES.
    starts: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET

    def start(self, index: int) -> int:
        """Return the offset of the chunk at ``index``, the size of the file after the last."""
        if index == len(self.chunks):
            return self.size_bytes
        return index * CHUNK_BYTES if self.starts is msgspec.UNSET else self.starts[index]

    def chunk_bytes(self, index: int) -> int:
        """Return the size of the chunk at ``index``."""
        return self.start(index + 1) - self.start(index)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A version. Each behaviour digest is that of the file that decides it, or empty."""

    files: tuple[ManifestFile, ...]
    kind: str = "causal-lm"
    tokenizer_digest: str = ""
    chat_template_digest: str = ""
    sampling_defaults_digest: str = ""
    safety_policy_digest: str = ""
    max_context_tokens: int = 0
    schema: int = SCHEMA
    weights_digest: str = ""
    engine_limits_digest: str = ""
    base_model: str = ""  # model of an adapter's base; empty: no adapter
    base_digest: str = ""  # version that an adapter changes; empty: no adapter

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


_encoder: Final = msgspec.json.Encoder(order="sorted")
_decoder: Final = msgspec.json.Decoder(Manifest)


def sha256_of(data: bytes) -> str:
    """Return ``sha256:`` and 64 hex digits."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def is_tag(text: str) -> bool:
    """Return whether a version may have this tag; a digest is never a tag."""
    return _TAG.fullmatch(text) is not None


def canonical_json(manifest: Manifest) -> bytes:
    """Return the canonical JSON of a manifest: sorted keys, no blanks, every field of its schema present."""
    newer = _NEWER.get(manifest.schema, ())
    if not newer:
        return _encoder.encode(manifest)
    fields = {each.name: getattr(manifest, each.name) for each in dataclass_fields(manifest)}
    return _encoder.encode({name: value for name, value in fields.items() if name not in newer})


def weights_digest_of(files: Sequence[ManifestFile]) -> str:
    """Return one digest of all tensor files, empty without any."""
    return weights_digest((file.path, file.digest) for file in files)


def digest_of(manifest: Manifest) -> str:
    """Return the digest that names the version: the sha256 of the canonical JSON."""
    return sha256_of(canonical_json(manifest))


def parse(data: bytes, digest: str) -> Manifest:
    """Return the manifest in these bytes. Raises IntegrityError unless they have that digest.

    The result has passed ``check_manifest`` too: stored manifests are checked like received ones.
    """
    if sha256_of(data) != digest:
        raise IntegrityError(f"the manifest is not the one that {digest} names", digest=digest)
    try:
        manifest = _decoder.decode(data)
        check_manifest(manifest)
    except (msgspec.DecodeError, RecursionError, InvalidInput) as exc:
        raise IntegrityError(f"the manifest {digest} is malformed: {exc}", digest=digest) from exc
    if canonical_json(manifest) != data:
        raise IntegrityError(f"the manifest {digest} is not in canonical form", digest=digest)
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Return if a version may be created from the manifest. Raises InvalidInput that names what to change."""
    if manifest.schema not in _SCHEMAS:
        raise InvalidInput(f"manifest schema {manifest.schema} is not supported", field="manifest.schema")
    if manifest.kind not in KINDS:
        raise InvalidInput(f"kind must be one of {', '.join(KINDS)}", field="manifest.kind")
    if not 1 <= len(manifest.files) <= MAX_FILES:
        raise InvalidInput(f"a version has 1 to {MAX_FILES} files", field="manifest.files")
    if sum(len(file.chunks) for file in manifest.files) > MAX_CHUNKS:
        raise InvalidInput(f"a version has at most {MAX_CHUNKS} chunks", field="manifest.files")
    if manifest.max_context_tokens < 0:
        raise InvalidInput("max_context_tokens is negative", field="manifest.max_context_tokens")
    _check_paths([file.path for file in manifest.files])
    for file in manifest.files:
        _check_file(file)
    _check_behaviour(manifest)
    if manifest.base_digest or manifest.base_model or manifest.schema == ADAPTER_SCHEMA:
        _check_base(manifest)
        return
    if manifest.kind == "safety-pack" and [file.path for file in manifest.files] != [POLICY_NAME]:
        raise InvalidInput(f"a safety-pack version has one file, {POLICY_NAME}", field="manifest.files")
    if manifest.kind == "causal-lm" and all(file.path != "config.json" for file in manifest.files):
        is_adapter = any(file.path == ADAPTER_CONFIG for file in manifest.files)
        hint = ": an adapter is published with --base" if is_adapter else ""
        raise InvalidInput(f"a causal-lm version needs a config.json{hint}", field="manifest.files")


def _check_base(manifest: Manifest) -> None:
    if manifest.schema != ADAPTER_SCHEMA:
        raise InvalidInput(f"a manifest with a base has schema {ADAPTER_SCHEMA}", field="manifest.schema")
    if not is_digest(manifest.base_digest):
        raise InvalidInput("the base of an adapter is named by its digest", field="manifest.base_digest")
    if not _MODEL.fullmatch(manifest.base_model):
        raise InvalidInput("base_model is no name of a model", field="manifest.base_model")
    if manifest.kind != "causal-lm":
        raise InvalidInput("an adapter is of kind causal-lm", field="manifest.kind")
    if problem := adapter_problem([file.path for file in manifest.files]):
        raise InvalidInput(problem, field="manifest.files")


def distinct_chunks(files: Sequence[ManifestFile]) -> dict[str, list[tuple[ManifestFile, int]]]:
    """Return the places of each chunk, file and index, in the order of the first."""
    places: dict[str, list[tuple[ManifestFile, int]]] = {}
    for file in files:
        for index, chunk in enumerate(file.chunks):
            places.setdefault(chunk, []).append((file, index))
    return places


def on_base(adapter: Manifest, base: Manifest) -> Manifest:
    """Return the files that a reader of an adapter's version finds: its own, and those of its base.

    Of two limits of the context the lower holds; the weights are the base's. The result names no version.
    """
    own = {file.path for file in adapter.files}
    files = sorted(
        (*adapter.files, *(file for file in base.files if file.path not in own)), key=lambda file: file.path
    )
    limits = [size for size in (adapter.max_context_tokens, base.max_context_tokens) if size]
    return replace(
        adapter,
        files=tuple(files),
        max_context_tokens=min(limits, default=0),
        weights_digest=base.weights_digest,
    )


def chunk_bases(
    files: Iterable[ManifestFile], base: Sequence[ManifestFile]
) -> dict[str, tuple[ManifestFile, int]]:
    """Return the place in ``base`` of what each chunk that it lacks is likely a change of, by digest.

    Files pair by path. Their chunks pair by number from the front, else from the back, where the sizes agree.
    """
    known, found = {file.path: file for file in base}, {}
    kept = {chunk for file in base for chunk in file.chunks}
    for file in files:
        if (old := known.get(file.path)) is None:
            continue
        shift = len(old.chunks) - len(file.chunks)
        for index, chunk in enumerate(file.chunks):
            for at in (index, index + shift) if chunk not in kept else ():
                if 0 <= at < len(old.chunks) and old.chunk_bytes(at) == file.chunk_bytes(index):
                    found[chunk] = old, at
                    break
    return found


def check_draft(manifest: Manifest) -> None:
    """Return if a new version has a complete draft or none. Raises InvalidInput.

    Stored versions are not checked: a version stored with a folder of this name before drafts existed stays
    readable.
    """
    if problem := draft_problem(file.path for file in manifest.files):
        raise InvalidInput(problem, field="manifest.files")


def check_repetition(manifest: Manifest) -> None:
    """Return if the size of a new version is at most a few times that of its distinct chunks.

    Raises InvalidInput. Like ``check_draft``, not applied to stored versions.
    """
    sizes: dict[str, int] = {}
    for file in manifest.files:
        for index, chunk in enumerate(file.chunks):
            sizes[chunk] = min(sizes.get(chunk, CHUNK_BYTES), file.chunk_bytes(index))
    if problem := repetition_problem(manifest.size_bytes, sum(sizes.values())):
        raise InvalidInput(problem, field="manifest.files")


def check_path(path: str) -> None:
    """Return if a version may contain a file of this name. Raises InvalidInput with the reason.

    A path is relative and has at most eight parts of ASCII letters, digits and ``._+-``, joined by ``/``.
    """
    shown = path[:80]
    if not path or len(path.encode(errors="surrogatepass")) > MAX_PATH_BYTES:
        raise InvalidInput(f"a path has 1 to {MAX_PATH_BYTES} bytes", field="path")
    parts = path.split("/")
    if len(parts) > MAX_PATH_PARTS or not all(_PART.fullmatch(part) for part in parts):
        raise InvalidInput(
            f"{shown!r} is no path of a version: relative, forward slashes, letters, digits and ._+- only",
            field="path",
            path=shown,
        )
    if problem := name_problem(path):
        raise InvalidInput(problem, field="path", path=shown)


def _check_paths(paths: list[str]) -> None:
    if paths != sorted(paths):
        raise InvalidInput("files are not sorted by path", field="manifest.files")
    files: dict[str, str] = {}
    for path in paths:
        check_path(path)
        if (other := files.get(path.lower())) is not None:
            raise InvalidInput(
                f"{path} and {other} are one name on some file systems", field="path", path=path
            )
        files[path.lower()] = path
    for path in paths:
        parts = path.lower().split("/")
        for length in range(1, len(parts)):
            if (other := files.get("/".join(parts[:length]))) is not None:
                raise InvalidInput(f"{other} is a file and the folder of {path}", field="path", path=path)
    folders: dict[str, str] = {}
    for path in paths:
        folder = path.rpartition("/")[0]
        if folders.setdefault(folder.lower(), folder) != folder:
            raise InvalidInput(f"the folder of {path} is there in another case", field="path", path=path)


def _check_file(file: ManifestFile) -> None:
    if not is_digest(file.digest) or not all(is_digest(chunk) for chunk in file.chunks):
        raise InvalidInput(f"{file.path} has a malformed digest", field="digest", path=file.path)
    if file.starts is not msgspec.UNSET:
        _check_starts(file, file.starts)
        return
    expected = -(-file.size_bytes // CHUNK_BYTES)
    if file.size_bytes < 0 or len(file.chunks) != expected:
        raise InvalidInput(
            f"{file.path} has {file.size_bytes} bytes and so {expected} chunks of {CHUNK_BYTES} bytes, "
            f"not {len(file.chunks)}",
            field="chunks",
            path=file.path,
        )


def _check_starts(file: ManifestFile, starts: Sequence[int]) -> None:
    sizes = [end - start for start, end in pairwise((*starts, file.size_bytes))]
    covered = len(starts) == len(file.chunks) and starts[:1] == (0,)
    if not covered or not 1 <= min(sizes) <= max(sizes) <= CHUNK_BYTES:
        raise InvalidInput(
            f"the starts of {file.path} do not cut {file.size_bytes} bytes into {len(file.chunks)} chunks of "
            f"1 to {CHUNK_BYTES} bytes",
            field="starts",
            path=file.path,
        )


def _check_behaviour(manifest: Manifest) -> None:
    digests = {file.path: file.digest for file in manifest.files}
    known = set(digests.values())
    for name, deciding in _PINNED.items():
        digest: str = getattr(manifest, name)
        if digest and digest not in known:
            raise InvalidInput(
                f"{name} is the digest of none of the files", field=f"manifest.{name}", digest=digest
            )
        path = next((path for path in deciding if path in digests), "")
        if manifest.schema > 1 and path and digests[path] != digest:
            raise InvalidInput(f"{name} does not pin {path}", field=f"manifest.{name}", path=path)
    if manifest.schema == 1:
        if any(getattr(manifest, name) for name in _NEW_IN_2):
            raise InvalidInput(f"schema 1 has no {' and no '.join(_NEW_IN_2)}", field="manifest.schema")
    elif manifest.weights_digest != weights_digest_of(manifest.files):
        raise InvalidInput("weights_digest is not that of the tensor files", field="manifest.weights_digest")
