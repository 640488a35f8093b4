from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.adapters.blobs.folder import FolderBlobs
from services.adapters.memory.store import MemoryStore
from services.core.manifest import CHUNK_BYTES
from services.runtime.clock import SystemClock
from tests.integration.registry.harness import Faltering, Registry
from tests.support.model_folder import safetensors
from tests.support.registry import served


@pytest_asyncio.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    clock = SystemClock()
    store, blobs = MemoryStore(clock), FolderBlobs(tmp_path / "blobs")
    async with served(store, blobs, clock, make_servicer=Faltering) as running:
        assert isinstance(running.servicer, Faltering)
        yield Registry(store, blobs, tmp_path / "blobs", running.servicer, running)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    (root / "extra").mkdir(parents=True)
    (root / ".cache").mkdir()
    (root / ".cache" / "junk.bin").write_bytes(b"never published")
    (root / "config.json").write_text('{"model_type": "llama"}')
    (root / "tokenizer.json").write_text('{"version": "1.0"}')
    (root / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}"}')
    (root / "generation_config.json").write_text("{}")
    (root / "extra" / "empty.txt").write_bytes(b"")
    (root / "model.safetensors").write_bytes(safetensors(2 * CHUNK_BYTES + 12345))
    return root
