"""Every test that a document names exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from scripts.house import ROOT, documents

TEST_NAMED: Final = re.compile(r"`([\w./-]*test_\w+\.py)(?:::\w+)?`")


def missing_tests(text: str, root: Path = ROOT) -> list[str]:
    """Return the tests that the text names and that do not exist; paths begin at the root or in ``tests``."""
    return [
        path
        for path in TEST_NAMED.findall(text)
        if not (root / path).is_file() and not (root / "tests" / path).is_file()
    ]


def test_every_test_that_a_document_names_exists() -> None:
    assert {page: lost for page in documents() if (lost := missing_tests((ROOT / page).read_text()))} == {}


def test_a_test_that_does_not_exist_is_found() -> None:
    named = "`unit/docs/test_paths.py`, `tests/unit/docs/test_status.py`, `unit/docs/test_lost.py`"
    assert missing_tests(named) == ["unit/docs/test_lost.py"]
