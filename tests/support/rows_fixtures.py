"""The fixtures of a gateway of fixed-cost models, for the folders whose tests use one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.row_versions import (
    classifier_version,
    embedding_version,
    mlp_version,
    picture_version,
    reranker_version,
)
from tests.support.rows_gateway import RowsGateway, rows_gateway


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("versions")
    return {
        "embed": embedding_version(root / "embed"),
        "cut": embedding_version(root / "cut", is_matryoshka=True, matryoshka_dimensions=[8, 16]),
        "rerank": reranker_version(root / "rerank"),
        "emotion": classifier_version(root / "emotion"),
        "topics": classifier_version(root / "topics", problem_type="multi_label_classification"),
        "animals": picture_version(root / "animals"),
        "mlp": mlp_version(root / "mlp"),
    }


@pytest.fixture
async def gateway(folders: dict[str, Path]) -> AsyncIterator[RowsGateway]:
    async with rows_gateway(folders) as found:
        yield found
