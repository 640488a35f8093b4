from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.client.scripted import Fleet, ScriptedGateway


@pytest.fixture
async def gateways() -> AsyncIterator[tuple[ScriptedGateway, ScriptedGateway]]:
    """Two gateways of one fleet."""
    fleet = Fleet()
    first, second = ScriptedGateway(fleet), ScriptedGateway(fleet)
    await first.start()
    await second.start()
    yield first, second
    await first.stop()
    await second.stop()
