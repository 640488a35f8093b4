"""Every node provider keeps its orders apart by their ids; the operator's command is bounded and named."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.adapters.node_command import CommandNodes
from services.adapters.node_workloads import KubernetesNodes
from services.core.errors import Unavailable
from services.ports.nodes import NodeProvider
from tests.support.kubernetes import SPACE, Cluster, serving
from tests.support.nodes import MemoryNodes, write_script

TWICE = """print('{"nodes": [{"order": "a", "node": "n"}, {"order": "b", "node": "n"}]}')"""


def command(folder: Path, text: str | None = None, *, timeout_s: float = 20.0) -> CommandNodes:
    script = write_script(folder) if text is None else write_script(folder, text)
    return CommandNodes([sys.executable, str(script)], timeout_s=timeout_s)


async def at_once(seconds: float) -> None:
    assert seconds > 0.0


@pytest.fixture(params=["memory", "command", "deployments", "statefulsets"])
async def provider(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[NodeProvider]:
    if request.param == "memory":
        yield MemoryNodes()
    elif request.param == "command":
        yield command(tmp_path)
    else:
        cluster = Cluster()
        cluster.add(request.param, "gpu", node_type="gpu", zone="zone-1")
        async with serving(cluster) as api:
            yield KubernetesNodes(api, SPACE, at_once)


async def test_an_order_starts_one_node_however_often_it_is_placed(provider: NodeProvider) -> None:
    assert await provider.list() == ()
    await provider.order("a", "", "")
    (first,) = await provider.list()
    await provider.order("a", "", "")
    await provider.order("b", "gpu", "zone-1")
    found = {one.order_id: one.node for one in await provider.list()}
    assert found["a"] == first.node
    assert len(set(found.values())) == 2


async def test_a_node_is_released_once_and_again(provider: NodeProvider) -> None:
    await provider.order("a", "", "")
    (node,) = await provider.list()
    assert await provider.release(node.node)
    assert await provider.release(node.node)
    assert await provider.list() == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import sys; sys.exit('quota\\nno more A100 in zone-1')", "no more A100 in zone-1"),
        ("import sys; sys.exit(3)", "ended with code 3"),
        ("print('nodes: none')", "no list of nodes"),
        ('print(\'{"nodes": [{"order": "a"}]}\')', "no list of nodes"),
        ('print(\'{"nodes": [{"order": "", "node": "n"}]}\')', "1 to 128 characters"),
        ('print(\'{"nodes": [{"order": "a", "node": "n"}, {"order": "b", "node": "n"}]}\')', "two nodes"),
        ("print('x' * 1_000_000)", "more than 262144 bytes"),
    ],
)
async def test_a_command_that_fails_or_lies_is_refused_with_its_reason(
    tmp_path: Path, text: str, why: str
) -> None:
    with pytest.raises(Unavailable, match=why):
        await command(tmp_path, text).list()


async def test_a_command_that_does_not_end_is_ended(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(Unavailable, match=r"did not end within 0\.5 s"):
        await command(tmp_path, "import time; time.sleep(60)", timeout_s=0.5).list()
    assert time.monotonic() - began_s < 20.0
    with pytest.raises(Unavailable, match="cannot be started: No such file"):
        await CommandNodes(["/nonexistent/nodes"], timeout_s=1.0).list()
