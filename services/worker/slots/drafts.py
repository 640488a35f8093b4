"""Selects the draft model of a version: the one among its files, if any."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fairway.formats import drafts

Speculation = Literal["off", "prompt_lookup", "draft"]


def draft_of(folder: Path) -> Path | None:
    """Return the folder of the version's draft, or None. Blocks for I/O."""
    draft = folder / drafts.FOLDER
    return draft if (draft / drafts.CONFIG).exists() else None


def speculation_of(wished: Speculation, draft: Path | None) -> Speculation:
    """Return the engine's speculation mode: without a draft, "draft" becomes prompt lookup."""
    return "prompt_lookup" if wished == "draft" and draft is None else wished
