"""The installations that tests share, one of each kind, and which tests use one.

What starts an installation uses the fixture ``installations``, which marks its tests ``stack``:
``make test-stack`` runs these and ``make test-quick`` the others, which cannot start any.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

GATE: Final = "installations"
# The expression of `make test-stack` begins with it: only files that can have such tests are imported.
STACK_STAGE: Final = "stack and "


@dataclass(frozen=True, slots=True)
class Kind:
    """What ``fairway up`` starts. Nothing is shed, however slow the machine that it shares is."""

    workers: int
    replicas: int
    gateways: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()


# By the fixture that yields it. A test that changes one leaves it as it was.
KINDS: Final[Mapping[str, Kind]] = {
    "usual": Kind(workers=2, replicas=2),
    # Another gateway takes a request over once the lease of the one that died is over.
    "two_gateways": Kind(
        workers=1,
        replicas=1,
        gateways=2,
        settings={"FAIRWAY_IDEMPOTENCY_LEASE_S": "1", "FAIRWAY_COST_PER_HOUR": "3.6"},
        options=("--controlplanes", "2"),
    ),
}
# A fixture that a folder or a file makes of these is called ``stack``; that of tests/e2e is ``usual``.
_NAMED: Final = re.compile(rf"\b({GATE}|({'|'.join(('stack', *KINDS))}): Stack)\b")
_OWN: Final = re.compile(r"^(async )?def stack\(", re.MULTILINE)
_quick: str | None = None


def may_use_one(file: Path) -> bool:
    """Whether the file names a fixture that leads to an installation."""
    return _NAMED.search(file.read_text("utf-8")) is not None


@functools.cache
def shared_by(file: Path) -> str | None:
    """Return the kind of the installation that the file's tests share with others."""
    text = file.read_text("utf-8")
    named = (kind for kind in KINDS if f"{kind}: Stack" in text)
    return next(named, "usual" if "stack: Stack" in text and not _OWN.search(text) else None)


def mark(item: pytest.Item) -> None:
    """Mark a test that uses an installation. Its file must show it: the stages go by files."""
    fixtures: Sequence[str] = getattr(item, "fixturenames", ())
    if GATE in fixtures:
        assert may_use_one(item.path), f"{item.path} names no fixture of an installation"
        assert KINDS.keys() & set(fixtures) <= {shared_by(item.path)}, f"{item.path} shares two installations"
        item.add_marker(pytest.mark.stack)


@contextlib.contextmanager
def running(item: pytest.Item) -> Iterator[None]:
    """Of a test from its setup to its teardown."""
    global _quick
    _quick = None if item.get_closest_marker("stack") else item.nodeid
    try:
        yield
    finally:
        _quick = None


def check_start() -> None:
    """Raise AssertionError where a test starts an installation that `make test-quick` would run."""
    assert _quick is None, f"{_quick} starts an installation: let it use the fixture {GATE}"
