from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.integration.openai.face import Face, serving


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    with capture_logs() as found:
        yield found


@pytest.fixture
async def face() -> AsyncIterator[Face]:
    async with serving() as found:
        yield found
