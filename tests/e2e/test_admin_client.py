"""The operators' client against a whole installation: replicas load, nodes drain, the page's examples run."""

from __future__ import annotations

import re
import textwrap
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from fairway.cli.fleet.options import bundled_checkpoint
from fairway.client import AdminClient, Changed, NotFound, Snapshot
from fairway.v1 import controlplane_pb2 as cp
from tests.support.stack import Stack

PATIENCE_S = 90.0
PAGE: Final = Path(__file__).parents[2] / "docs" / "client.md"
FOUND: Final = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
EXAMPLES: Final = [example for example in FOUND if "AdminClient" in example]


@pytest.fixture
async def admin(stack: Stack) -> AsyncIterator[AdminClient]:
    found = stack.endpoints
    addresses = found["controlplanes"] or [found["controlplane"]]
    keys = {"admin_key": found["admin_key"], "registry": found["registry"]}
    async with AdminClient(addresses, **keys, credentials=stack.credentials) as opened:
        yield opened


async def test_scaling_is_waited_for_and_watched(stack: Stack, admin: AdminClient) -> None:
    name = stack.model
    async with aclosing(admin.deployments.watch()) as news:
        first = await anext(news)
        assert isinstance(first, Snapshot)
        assert first.items[name].replicas == 2
        await admin.deployments.scale(name, 1)
        assert (await admin.deployments.wait_ready(name, timeout_s=PATIENCE_S)).status.ready_replicas == 1
        seen: list[str] = []
        await admin.deployments.scale(name, 2)
        ready = await admin.deployments.wait_ready(
            name, timeout_s=PATIENCE_S, report=lambda found: seen.append(found.status.message)
        )
        assert (ready.status.ready_replicas, bool(seen)) == (2, True)
        told = [first.items[name]]
        while told[-1].metadata.etag != ready.metadata.etag or told[-1].status.ready_replicas < 2:
            change = await anext(news)
            assert isinstance(change, Changed)
            told.append(change.item)
        assert {found.replicas for found in told} == {1, 2}


@pytest.fixture
async def room(stack: Stack, admin: AdminClient) -> AsyncIterator[None]:
    """One of the two replicas is not there, so that the other may move; what the examples make goes."""
    await admin.deployments.scale(stack.model, 1)
    await admin.deployments.wait_ready(stack.model, timeout_s=PATIENCE_S)
    yield
    with suppress(NotFound):
        await admin.deployments.delete("stories")
    for delete, name in ((admin.keys.delete, "ci"), (admin.tenants.delete, "acme")):
        with suppress(NotFound):
            await delete(name)
    await admin.deployments.scale(stack.model, 2)
    await admin.deployments.wait_ready(stack.model, timeout_s=PATIENCE_S)


async def test_the_examples_of_the_page_run(stack: Stack, admin: AdminClient, room: None) -> None:
    said: list[str] = []
    for example in EXAMPLES:
        names: dict[str, Any] = {
            "control_planes": stack.endpoints["controlplanes"],
            "registry": stack.endpoints["registry"],
            "admin_key": stack.endpoints["admin_key"],
            "credentials": stack.credentials,
            "folder": bundled_checkpoint(),
            "print": lambda *parts: said.append(" ".join(map(str, parts))),
        }
        exec(f"async def example():\n{textwrap.indent(example, '    ')}", names)
        await names["example"]()
    assert {"done 1.0", "ETAG_MISMATCH"} <= set(said)
    assert any(line.startswith("there are ") for line in said)
    assert (await admin.tenants.get("acme")).requests_per_minute == 1200
    assert (await admin.deployments.get("stories")).status.ready_replicas == 1
    reasons = {event.reason for event in await admin.events.list(kinds=[cp.RESOURCE_KIND_NODE])}
    assert {"NODE_DRAINING", "NODE_DRAINED", "NODE_UNCORDONED"} <= reasons
    await admin.deployments.delete("stories")
    pools = {name for queue in await admin.queues.list() for name in queue.deployments}
    assert stack.model in pools
