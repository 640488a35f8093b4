from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.unit.worker.bench import Bench, byte_level_tokenizer, new_bench


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture
def bench_factory(byte_level: Tokenizer) -> Callable[[], Bench]:
    return lambda: new_bench(byte_level)


@pytest.fixture
def bench(byte_level: Tokenizer) -> Bench:
    return new_bench(byte_level)


@pytest.fixture
def save(tmp_path: Path) -> Callable[[Tokenizer], Path]:
    """Write a tokenizer into a model folder of its own."""

    def write(tokenizer: Tokenizer) -> Path:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    return write
