"""Which model proposes tokens for a version: the draft that its files bring along, where they do."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fairway.formats import drafts

Speculation = Literal["off", "prompt_lookup", "draft"]


def draft_of(folder: Path) -> Path | None:
    """Return the folder of the version's draft, None without one. Blocks for I/O."""
    draft = folder / drafts.FOLDER
    return draft if (draft / drafts.CONFIG).exists() else None


def speculation_of(wished: Speculation, draft: Path | None) -> Speculation:
    """Return how an engine speculates: a version without a draft looks its proposals up in the text."""
    return "prompt_lookup" if wished == "draft" and draft is None else wished
