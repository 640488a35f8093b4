"""Streaming check that the bytes of a file match its name.

A name proves nothing: pickled objects occur as ``notes.txt``, inside a zip, or behind a tensor file's header.
Text must be text, JSON must be JSON, and every byte of a tensor file must belong to its header or a tensor.
"""

from __future__ import annotations

import pickletools
import re
from typing import Final, Protocol

import msgspec

from fairway.formats import safetensors, version_files
from fairway.formats.fixed_cost import pooling
from fairway.formats.limits import LIMITS_NAME, POLICY_NAME, check_limits
from fairway.formats.safety import check_policy

MAX_TEXT_BYTES: Final = 64 * 1024 * 1024
# Files that roles parse as a whole. Published ones have some kilobytes.
_SMALL_NAMES: Final = frozenset(
    ("config.json", "generation_config.json", LIMITS_NAME, POLICY_NAME, *pooling.FILES)
)
MAX_SMALL_BYTES: Final = 1024 * 1024
_TAIL_BYTES: Final = 66 * 1024  # a zip's directory ends at most that far from the end of the file
_MAX_OPCODES: Final = 1_000_000
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f]")
_ARCHIVES: Final = {
    b"PK\x03\x04": "a zip archive",
    b"PK\x05\x06": "a zip archive",
    b"\x1f\x8b": "a gzip file",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "a NumPy file",
    b"\x7fELF": "a program",
}
_ZIP_END: Final = b"PK\x05\x06"
_SENTENCEPIECE: Final = b"\x0a"  # the tag of its first field, the pieces
_RANK: Final = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]{1,9}\r?|")
_MAX_RANK_BYTES: Final = 4096
_CALLS: Final = frozenset(
    [
        "GLOBAL",
        "STACK_GLOBAL",
        "REDUCE",
        "INST",
        "OBJ",
        "NEWOBJ",
        "NEWOBJ_EX",
        "BUILD",
        "EXT1",
        "EXT2",
        "EXT4",
    ]
)


class ContentRefused(ValueError):
    """The file does not match its name. The text begins with the file's path."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class Checker(Protocol):
    def feed(self, data: bytes) -> None:
        """Check the next bytes of the file. Raises ContentRefused as soon as they are invalid."""

    def finish(self) -> None:
        """Complete the check at the end of the file. Raises ContentRefused."""


def checker_for(path: str, size_bytes: int) -> Checker:
    """Return a checker for a file of this name and size, with bounded memory. Raises ContentRefused."""
    if problem := version_files.name_problem(path):
        raise ContentRefused(path, problem.removeprefix(path).strip())
    if version_files.suffix_of(path) == version_files.TENSOR_SUFFIX:
        return _Tensors(path, size_bytes)
    if version_files.is_text(path):
        small = path.rpartition("/")[2] in _SMALL_NAMES
        most = MAX_SMALL_BYTES if small else MAX_TEXT_BYTES
        if size_bytes > most:
            what = path if small else "a text file"
            raise ContentRefused(path, f"{what} has at most {most} bytes, not {size_bytes}")
        return _Text(path)
    return _Tokenizer(path)


class _Tensors:
    """Buffers only the header, not the tensors."""

    def __init__(self, path: str, size_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._head = bytearray()
        self._wanted = safetensors.LENGTH_BYTES
        self._done = False

    def feed(self, data: bytes) -> None:
        if self._done:
            return
        rest = memoryview(data)
        try:
            if (short := safetensors.LENGTH_BYTES - len(self._head)) > 0:
                self._head += rest[:short]
                rest = rest[short:]
                if len(self._head) < safetensors.LENGTH_BYTES:
                    return
                self._wanted += safetensors.header_bytes(bytes(self._head), self._size_bytes)
            self._head += rest[: self._wanted - len(self._head)]
            if len(self._head) == self._wanted:
                self._check()
        except safetensors.BadHeader as exc:
            raise ContentRefused(self._path, str(exc)) from exc

    def finish(self) -> None:
        if not self._done:
            raise ContentRefused(
                self._path, f"it has {self._size_bytes} bytes, too few for its safetensors header"
            )

    def _check(self) -> None:
        safetensors.check_header(bytes(self._head[safetensors.LENGTH_BYTES :]), self._size_bytes)
        self._head.clear()
        self._done = True


class _Text:
    def __init__(self, path: str) -> None:
        self._path = path
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        if not self._data:
            _refuse_archive(self._path, data)
        if _CONTROL.search(data):
            raise ContentRefused(self._path, "it is not text: it contains control characters")
        self._data += data
        if len(self._data) > MAX_TEXT_BYTES:
            raise ContentRefused(self._path, f"a text file has at most {MAX_TEXT_BYTES} bytes")

    def finish(self) -> None:
        data = bytes(self._data)
        self._data.clear()
        try:
            data.decode()
        except UnicodeDecodeError as exc:
            raise ContentRefused(self._path, "it is not text: it is not UTF-8") from exc
        if version_files.suffix_of(self._path) == ".json":
            self._check_json(data)
        elif is_pickle(data):
            raise ContentRefused(self._path, "it contains pickled objects")

    def _check_json(self, data: bytes) -> None:
        try:
            msgspec.json.decode(data, type=msgspec.Raw)
        except (msgspec.DecodeError, RecursionError) as exc:
            raise ContentRefused(self._path, "it is not JSON") from exc
        try:
            if self._path == LIMITS_NAME:
                check_limits(data)
            elif self._path == POLICY_NAME:
                check_policy(data)
        except ValueError as exc:
            raise ContentRefused(self._path, str(exc)) from exc


class _Tokenizer:
    """Accepts a SentencePiece model by its first byte, or tiktoken's ranks by every line. Bounded buffers.

    A pickle is neither: no opcode is a line feed, and an opcode that names a callable needs its own line.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._is_ranks: bool | None = None
        self._line = b""
        self._tail = b""

    def feed(self, data: bytes) -> None:
        if self._is_ranks is None and data:
            self._is_ranks = data[:1] != _SENTENCEPIECE
        if self._is_ranks:
            *lines, self._line = (self._line + data).split(b"\n")
            if not all(map(_RANK.fullmatch, lines)) or len(self._line) > _MAX_RANK_BYTES:
                raise self._refusal()
        self._tail = (self._tail + data)[-_TAIL_BYTES:]

    def finish(self) -> None:
        if self._line and not _RANK.fullmatch(self._line):
            raise self._refusal()
        if _ZIP_END in self._tail:
            raise ContentRefused(self._path, "a zip archive ends in it")

    def _refusal(self) -> ContentRefused:
        return ContentRefused(
            self._path, "it is neither a SentencePiece model nor a list of tiktoken's ranks"
        )


def _refuse_archive(path: str, head: bytes) -> None:
    for magic, what in _ARCHIVES.items():
        if head.startswith(magic):
            raise ContentRefused(path, f"it is {what}: it may contain pickled objects or code")
    if head[:1] == b"\x80" and head[1:2] and 2 <= head[1] <= 5:
        raise ContentRefused(path, "it contains pickled objects")


def is_pickle(data: bytes) -> bool:
    """Return whether the bytes are a pickle that calls something, or too long to decide.

    Nothing is unpickled.
    """
    calls = False
    try:
        for position, (opcode, _, _) in enumerate(pickletools.genops(data)):
            calls = calls or opcode.name in _CALLS
            if opcode.name == "STOP":
                return calls
            if position > _MAX_OPCODES:
                return True  # a text does not form so many opcodes by chance
    except Exception:  # pickletools raises many kinds of errors for bytes that are no pickle
        return False
    return False
