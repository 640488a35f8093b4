"""Measure how readable the tree is: its size, its words, its names, its shapes of a request, its documents.

python scripts/house.py            one figure per line, the worst places of each, and RESULT {json}

The code counted is hand-written Python of ``services``, ``fairway`` and ``simulator`` (no generated stubs).
"""

from __future__ import annotations

import ast
import io
import json
import re
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("services", "fairway", "simulator")
# A program does not do these: it observes, receives, reports, requests, returns, yields.
DIALECT: Final = re.compile(
    r"\b(tells?|told|telling|hears?|heard|hearing|says?|said|saying|knows|knew|speaks?|spoke|speaking"
    r"|talks?|asks|asked|asking|whom|whoever|nobody|somebody|g(?:ives?|ave|iving) way|lets? go|news)\b",
    re.IGNORECASE,
)
# A shape of a request names a request, a sequence or a model, and says how it is sampled or how long it is.
NAMED: Final = frozenset({"request_id", "handle", "model"})
CARRIED: Final = frozenset({"sampling", "limits", "max_output_tokens", "max_tokens"})
# A class with more fields documents each at its own line.
MAX_FIELDS_IN_TEXT: Final = 6
_MESSAGE: Final = re.compile(r"^message (\w+) \{(.*?)^\}", re.MULTILINE | re.DOTALL)


def code_files(root: Path = ROOT) -> list[Path]:
    """Return the hand-written modules."""
    return sorted(
        path
        for package in PACKAGES
        for path in (root / package).rglob("*.py")
        if not path.stem.endswith(("_pb2", "_pb2_grpc"))
    )


def prose_of(source: str) -> str:
    """Return the comments and docstrings of a module."""
    found = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(ast.get_docstring(node) or "")
    return "\n".join(found)


def dialect_of(sources: Mapping[str, str]) -> tuple[float, Counter[str]]:
    """Return the words of ``DIALECT`` per 1,000 words of prose, and how many each module has."""
    words, found = 0, Counter[str]()
    for name, source in sources.items():
        prose = prose_of(source)
        words += len(prose.split())
        if count := len(DIALECT.findall(prose)):
            found[name] = count
    return 1000.0 * found.total() / max(1, words), found


def ambiguous_names(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the public classes of ``services`` that are defined in more than one module."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for name, source in sources.items():
        if name.startswith("services/"):
            for node in ast.parse(source).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(name)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def request_shapes(sources: Mapping[str, str], protos: Iterable[str]) -> list[str]:
    """Return the classes of ``services`` and the messages that carry a request."""
    found = [
        f"{name}:{node.name}"
        for name, source in sources.items()
        if name.startswith("services/")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and _is_request(_fields(node))
    ]
    for text in protos:
        for name, body in _MESSAGE.findall(text):
            if _is_request(re.findall(r"^\s+[\w. ]+ (\w+) = \d+", body, re.MULTILINE)):
                found.append(f"protos:{name}")
    return found


def _is_request(fields: Iterable[str]) -> bool:
    found = set(fields)
    return bool(found & NAMED) and bool(found & CARRIED)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for child in node.body:
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            yield child.target.id


def crowded_docstrings(sources: Mapping[str, str]) -> list[str]:
    """Return the classes with many fields whose docstring describes several of them."""
    found = []
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                fields = set(_fields(node))
                described = fields & set(re.findall(r"``(\w+)``", ast.get_docstring(node) or ""))
                if len(fields) > MAX_FIELDS_IN_TEXT and len(described) > 2:
                    found.append(f"{name}: {node.name}")
    return found


def modules_by_folder(files: Iterable[Path]) -> Counter[str]:
    """Return how many modules stand in each folder, ``__init__`` apart."""
    return Counter(path.parent.relative_to(ROOT).as_posix() for path in files if path.name != "__init__.py")


def documents(root: Path = ROOT) -> dict[str, int]:
    """Return the words of the README and of each page under docs that is read.

    The reference is left out: it is generated and looked up. A table's bar counts as a word.
    """
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    reference = root / "docs" / "reference"
    return {
        page.relative_to(root).as_posix(): len(page.read_text("utf-8").split())
        for page in pages
        if page.parent != reference
    }


def main() -> int:
    files = code_files()
    sources = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in files}
    lines = {name: source.count("\n") for name, source in sources.items()}
    folders, pages = modules_by_folder(files), documents()
    dialect, worst = dialect_of(sources)
    ambiguous = ambiguous_names(sources)
    shapes = request_shapes(
        sources, [path.read_text("utf-8") for path in sorted(ROOT.glob("protos/**/*.proto"))]
    )
    for title, found in (("dialect", worst), ("modules in a folder", folders), ("words", Counter(pages))):
        print(f"{title}:", ", ".join(f"{name} {count}" for name, count in found.most_common(8)))
    for name, places in ambiguous.items():
        print(f"ambiguous: {name}:", ", ".join(places))
    print("request shapes:", ", ".join(shapes))
    result = {
        "lines": sum(lines.values()),
        "modules": sum(folders.values()),
        "median_module_lines": statistics.median(lines[name] for name in lines if "__init__" not in name),
        "max_modules_in_a_folder": max(folders.values()),
        "dialect_per_1000": round(dialect, 2),
        "ambiguous_names": len(ambiguous),
        "request_shapes": len(shapes),
        "docs_words": sum(pages.values()),
    }
    print(f"RESULT {json.dumps(result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
