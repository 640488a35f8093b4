from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from services.worker.slots.engine_settings import EngineSettings
from tests.integration.worker.harness import Harness, Starter, start_harness, write_model


@pytest.fixture(scope="session")
def pristine_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model_dir(pristine_model: Path, tmp_path: Path) -> Path:
    """A copy that the test may spoil."""
    return Path(shutil.copytree(pristine_model, tmp_path / "model"))


@pytest_asyncio.fixture
async def start_worker(model_dir: Path) -> AsyncIterator[Starter]:
    """Start workers; everything is stopped at the end."""
    started: list[Harness] = []

    async def start(settings: EngineSettings | None = None, *, assign: bool = True) -> Harness:
        harness = await start_harness(model_dir, settings, assign=assign)
        started.append(harness)
        return harness

    yield start
    for harness in started:
        await harness.close()


@pytest.fixture
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))
