"""A model folder prepared for the registry: its files, their digests, and the location of each chunk.

All checks of the registry are applied here first, before a byte is sent.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from fairway.formats.contents import MAX_TEXT_BYTES, ContentRefused, checker_for
from fairway.formats.drafts import draft_problem
from fairway.formats.limits import LIMITS_NAME, POLICY_NAME
from fairway.formats.safetensors import LENGTH_BYTES, read_header
from fairway.formats.servable import Kind, checkpoint_warnings, kind_of
from fairway.formats.servable import checkpoint_problem as problem_of_checkpoint
from fairway.formats.version_files import (
    TENSOR_SUFFIX,
    name_problem,
    repetition_problem,
    suffix_of,
    weights_digest,
)
from fairway.v1 import registry_pb2 as pb

CHUNK_BYTES: Final = 4 * 1024 * 1024
SCHEMA: Final = 2
_READ_BYTES: Final = 1024 * 1024


class PublishRefused(ValueError):
    """The folder cannot be a version. ``next_step`` is what the user can do about it."""

    def __init__(self, message: str, *, next_step: str) -> None:
        super().__init__(message)
        self.next_step = next_step


@dataclass(frozen=True, slots=True)
class Chunk:
    """The location of the bytes of one chunk."""

    path: Path
    offset_bytes: int
    size_bytes: int


@dataclass(slots=True)
class Hashed:
    """A folder after hashing: its files, and one location of each distinct chunk."""

    files: list[pb.ManifestFile] = field(default_factory=list)
    chunks: dict[str, Chunk] = field(default_factory=dict)


def find_files(folder: Path) -> dict[str, Path]:
    """Return the files to publish by their name in the version, sorted. Raises PublishRefused, OSError.

    Names that begin with a dot are left out. A link is followed only to a file inside the folder, and from a
    snapshot of a Hugging Face cache to its blobs.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    root = folder.resolve()
    roots = (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)
    found: dict[str, Path] = {}
    for here, folders, names in os.walk(folder, onerror=_fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in [*folders, *sorted(names)]:
            path = Path(here) / name
            if not name.startswith(".") and (name not in folders or path.is_symlink()):
                found[path.relative_to(folder).as_posix()] = _inside(path, roots)
    if not found:
        raise FileNotFoundError(f"{folder} contains no files to publish")
    return dict(sorted(found.items()))


def _inside(path: Path, roots: tuple[Path, ...]) -> Path:
    """Return the regular file at this path or link target; it must be inside one of the folders."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as exc:  # a loop is a RuntimeError before Python 3.13
        if isinstance(exc, OSError) and exc.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        raise PublishRefused(f"{path} is a broken link", next_step="remove it") from exc
    if not any(map(real.is_relative_to, roots)):
        raise PublishRefused(
            f"{path} is a link to a place outside the folder",
            next_step="copy the folder with its links resolved (cp -RL), and publish the copy",
        )
    if not stat.S_ISREG(real.stat().st_mode):
        raise PublishRefused(f"{path} is neither a file nor a plain folder", next_step="remove it")
    return real


def declared_kind(files: dict[str, Path]) -> Kind:
    """Return the kind that the folder's ``config.json`` declares. Raises OSError."""
    return kind_of(files, _reader(files))


def require_servable(files: dict[str, Path], kind: Kind) -> tuple[str, ...]:
    """Return warnings if workers can serve the folder, by its small files and the headers of its tensors.

    Raises PublishRefused, OSError.
    """
    if problem := problem_of_checkpoint(files, _reader(files), kind):
        raise PublishRefused(
            problem, next_step="repair the folder; or, where another engine serves it: --for-another-engine"
        )
    return checkpoint_warnings(files, _reader(files), kind)


def _reader(files: dict[str, Path]) -> Callable[[str], bytes]:
    def read(name: str) -> bytes:
        with _open(files[name]) as stream:
            if suffix_of(name) == TENSOR_SUFFIX:
                return read_header(stream, os.fstat(stream.fileno()).st_size)
            return stream.read(MAX_TEXT_BYTES)

    return read


def hash_files(files: dict[str, Path], report: Callable[[int], object]) -> Hashed:
    """Return digests and chunks; ``report`` receives the bytes read. Raises PublishRefused, OSError."""
    for name in files:
        if problem := name_problem(name):
            raise PublishRefused(problem, next_step="remove the file from the folder, or convert it")
    if problem := draft_problem(files):
        raise PublishRefused(problem, next_step="make the folder `draft` a checkpoint, or remove it")
    for name, path in files.items():
        if suffix_of(name) == TENSOR_SUFFIX:
            _check_tensors(name, path)
    hashed, done_bytes = Hashed(), 0
    for name, path in files.items():
        for size_bytes in _hash_file(hashed, name, path):
            done_bytes += size_bytes
            report(done_bytes)
    distinct_bytes = sum(chunk.size_bytes for chunk in hashed.chunks.values())
    if problem := repetition_problem(done_bytes, distinct_bytes):
        raise PublishRefused(problem, next_step="remove the files that repeat others")
    return hashed


def _check_tensors(name: str, path: Path) -> None:
    """Check a tensor file by its header, before gigabytes are hashed."""
    with _open(path) as stream, _content_errors():
        size_bytes = os.fstat(stream.fileno()).st_size
        checker = checker_for(name, size_bytes)
        head = stream.read(LENGTH_BYTES)
        checker.feed(head)  # raises for a length beyond the end of the file
        if len(head) == LENGTH_BYTES:
            checker.feed(stream.read(int.from_bytes(head, "little")))
        checker.finish()


def _hash_file(hashed: Hashed, name: str, path: Path) -> Iterator[int]:
    whole, digests, offset = hashlib.sha256(), [], 0
    with _open(path) as stream, _content_errors():
        checker = checker_for(name, os.fstat(stream.fileno()).st_size)
        while data := stream.read(CHUNK_BYTES):
            checker.feed(data)
            whole.update(data)
            digest = "sha256:" + hashlib.sha256(data).hexdigest()
            digests.append(digest)
            hashed.chunks.setdefault(digest, Chunk(path, offset, len(data)))
            offset += len(data)
            yield len(data)
        checker.finish()
    hashed.files.append(
        pb.ManifestFile(path=name, size_bytes=offset, digest="sha256:" + whole.hexdigest(), chunks=digests)
    )


def read_chunk(digest: str, chunk: Chunk) -> bytes:
    """Return the bytes of a chunk. Raises PublishRefused when they differ from the hashed ones."""
    with _open(chunk.path) as stream:
        stream.seek(chunk.offset_bytes)
        data = stream.read(chunk.size_bytes)
    if "sha256:" + hashlib.sha256(data).hexdigest() != digest:
        raise PublishRefused(
            f"{chunk.path} changed while it was being published",
            next_step="publish again once nothing writes to the folder",
        )
    return data


def manifest_of(
    files: dict[str, Path], hashed: Sequence[pb.ManifestFile], kind: Kind, max_context_tokens: int
) -> pb.Manifest:
    """Return the manifest: every file, and the digests of those that determine behaviour."""
    digests = {file.path: file.digest for file in hashed}
    template = digests.get("chat_template.jinja", "")
    if not template and _has_template(files.get("tokenizer_config.json")):
        template = digests["tokenizer_config.json"]
    return pb.Manifest(
        schema=SCHEMA,
        files=hashed,
        kind=kind,
        weights_digest=weights_digest((file.path, file.digest) for file in hashed),
        tokenizer_digest=digests.get("tokenizer.json", "") or digests.get("tokenizer.model", ""),
        chat_template_digest=template,
        sampling_defaults_digest=digests.get("generation_config.json", ""),
        safety_policy_digest=digests.get(POLICY_NAME, ""),
        engine_limits_digest=digests.get(LIMITS_NAME, ""),
        max_context_tokens=max_context_tokens,
    )


def _has_template(path: Path | None) -> bool:
    if path is None:
        return False
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _open(path: Path) -> BinaryIO:
    # The path is resolved already; a link that replaces the file meanwhile is not followed.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", _READ_BYTES)


@contextmanager
def _content_errors() -> Iterator[None]:
    try:
        yield
    except ContentRefused as exc:
        raise PublishRefused(str(exc), next_step="repair or remove the file, then publish again") from exc


def _fail(error: OSError) -> None:
    raise error
