"""Which speculation a version gets from what its worker was told."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.slots.engine_settings import Speculation, speculation_of
from services.worker.slots.version_files import draft_of


def test_a_draft_is_a_folder_with_a_config(tmp_path: Path) -> None:
    assert draft_of(tmp_path) is None
    (tmp_path / "draft").mkdir()
    assert draft_of(tmp_path) is None
    (tmp_path / "draft" / "config.json").write_text("{}")
    assert draft_of(tmp_path) == tmp_path / "draft"


@pytest.mark.parametrize(
    ("wished", "with_draft", "without"),
    [
        ("off", "off", "off"),
        ("prompt_lookup", "prompt_lookup", "prompt_lookup"),
        ("draft", "draft", "prompt_lookup"),
    ],
)
def test_a_version_without_a_draft_looks_up_its_text(
    wished: Speculation, with_draft: Speculation, without: Speculation
) -> None:
    assert speculation_of(wished, Path("draft")) == with_draft
    assert speculation_of(wished, None) == without
