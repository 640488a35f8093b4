"""The files of the project and what the house rules look at in them."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("services", "fairway", "console", "scripts", "bench", "simulator", "models", "tests")
SKIPPED: Final = {".venv", ".git", ".fairway", "__pycache__", "node_modules"}


def project_files() -> list[Path]:
    """Return the tracked files and the new ones that git does not ignore; without git, every file."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 0:
        names = [name for name in done.stdout.decode().split("\0") if name]
        return sorted(path for path in (ROOT / name for name in names) if path.is_file())
    return sorted(
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") or part in SKIPPED for part in path.relative_to(ROOT).parts)
    )


def is_generated(path: Path) -> bool:
    return path.stem.endswith(("_pb2", "_pb2_grpc"))


def python_files(*packages: str) -> list[Path]:
    """Return the written (not generated) Python files of some packages, or of all."""
    return sorted(
        path
        for package in packages or PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if not is_generated(path) and not SKIPPED.intersection(path.relative_to(ROOT).parts)
    )


def long_functions(source: str, limit: int) -> Iterator[str]:
    """Yield "line name lines" for each function that is longer than ``limit`` lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > limit:
                yield f"{node.lineno} {node.name} is {lines} lines"


def used_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every name and attribute chain that is read, by what was imported.

    ``import time as t; t.time()`` and ``from time import time; time()`` both yield "time.time".
    """
    tree = ast.parse(source)
    origin: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                origin[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                origin[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            head, _, rest = ast.unparse(node).partition(".")
            if head in origin or head == "print":
                yield node.lineno, ".".join(filter(None, (origin.get(head, head), rest)))
