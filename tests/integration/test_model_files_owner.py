"""A folder of model files has one owner, and who comes second hears of it before it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.adapters.model_files.cache import ModelFiles
from services.core.errors import FailedPrecondition
from services.runtime.clock import SystemClock

NO_REGISTRY: Any = None


async def test_the_second_owner_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    first, second = (
        ModelFiles(NO_REGISTRY, tmp_path / "models", SystemClock(), max_bytes=1024**2) for _ in range(2)
    )
    try:
        await first.own()
        await first.own()
        with pytest.raises(FailedPrecondition, match="FAIRWAY_STATE_DIR"):
            await second.own()
        first.close()
        await second.own()
    finally:
        first.close()
        second.close()


async def test_a_disk_that_does_not_answer_does_not_keep_a_role_from_starting(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    files = ModelFiles(NO_REGISTRY, blocked / "models", SystemClock(), max_bytes=1024**2)
    await files.own()
    files.close()
