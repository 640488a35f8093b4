"""The training text: standard library sources and the topic texts that `pydoc` ships, split by file.

A document is held out when a hash of its relative path says so, so the split needs no list and does not move
when files are added. Nothing here depends on the machine: build-specific modules are excluded by name.
"""

import ast
import hashlib
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

Kind = Literal["library", "test", "topic", "chat"]

HELD_OUT_ONE_IN = 25
TEST_SHARE_MAX = 0.35
FILE_BYTES_MIN = 200
FILE_BYTES_MAX = 260_000
LETTER_SHARE_MIN = 0.55
SKIPPED_PARTS = frozenset({"__pycache__", "data"})
SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "pydoc_data/topics.py", "html/entities.py")


@dataclass(frozen=True, slots=True)
class Document:
    """One text with the path or topic it came from; `name` decides its side of the split."""

    name: str
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents on each side of the split, and how many files each rule excluded."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    excluded: dict[str, int]


def load_corpus() -> Corpus:
    """Every document of this interpreter, in path order, tests at most TEST_SHARE_MAX of each side."""
    excluded: Counter[str] = Counter()
    documents = [*_topic_documents()]
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith("site-packages/"):
            continue
        if _is_skipped(name):
            excluded["skipped by name"] += 1
            continue
        found = _read_source(path, name)
        if isinstance(found, Document):
            documents.append(found)
        else:
            excluded[found] += 1
    train = _cap_tests([d for d in documents if not is_held_out(d.name)], excluded)
    held_out = _cap_tests([d for d in documents if is_held_out(d.name)], excluded)
    return Corpus(train, held_out, dict(excluded))


def is_held_out(name: str) -> bool:
    """True for about one name in HELD_OUT_ONE_IN, by the first four bytes of its SHA-256."""
    return _hash(name) % HELD_OUT_ONE_IN == 0


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def _is_skipped(name: str) -> bool:
    return name.startswith(SKIPPED_PREFIXES) or not SKIPPED_PARTS.isdisjoint(name.split("/"))


def _read_source(path: Path, name: str) -> Document | str:
    """The document at `path`, or the rule that excludes it."""
    raw = path.read_bytes()
    if not FILE_BYTES_MIN <= len(raw) <= FILE_BYTES_MAX:
        return "too small or too large"
    try:
        text = raw.decode()
        ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return "does not parse as UTF-8 Python"
    if b"generated from" in raw[:500] or _letter_share(text) < LETTER_SHARE_MIN:
        return "generated or mostly a table"
    kind: Kind = "test" if {"test", "tests", "idle_test"} & set(name.split("/")) else "library"
    return Document(name, kind, _tidy(text))


def _letter_share(text: str) -> float:
    return len(re.findall(r"[A-Za-z]", text)) / max(1, len(re.findall(r"\S", text)))


def _tidy(text: str) -> str:
    """`text` with Unix line ends, no form feeds, and no blanks at line ends."""
    return "\n".join(line.rstrip() for line in text.replace("\f", "").splitlines()).strip("\n") + "\n"


def _topic_documents() -> list[Document]:
    return [
        Document(f"pydoc_data/topics.py#{key}", "topic", _tidy(text)) for key, text in sorted(topics.items())
    ]


def _cap_tests(documents: list[Document], excluded: Counter[str]) -> tuple[Document, ...]:
    """`documents` less the tests, in hash order, that would take their bytes above TEST_SHARE_MAX."""
    other_bytes = sum(len(d.text.encode()) for d in documents if d.kind != "test")
    room_bytes = other_bytes * TEST_SHARE_MAX / (1 - TEST_SHARE_MAX)
    kept: set[str] = set()
    for document in sorted(
        (d for d in documents if d.kind == "test"), key=lambda d: _hash("order:" + d.name)
    ):
        room_bytes -= len(document.text.encode())
        if room_bytes < 0:
            break
        kept.add(document.name)
    excluded["tests above the cap"] += sum(d.kind == "test" and d.name not in kept for d in documents)
    return tuple(d for d in documents if d.kind != "test" or d.name in kept)
