"""Every node provider keeps its orders apart by their ids; the operator's command is bounded and named."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from fairway.cli.fleet.nodes import LocalNodes
from fairway.cli.fleet.progress import SharedProgress
from services.adapters.node_command import CommandNodes
from services.adapters.node_workloads import KubernetesNodes
from services.core.errors import Unavailable
from services.ports.nodes import NodeProvider
from tests.support.kubernetes import SPACE, Cluster, serving
from tests.support.nodes import MemoryNodes, write_script
from tests.support.waiting import until

TWICE = """print('{"nodes": [{"order": "a", "node": "n"}, {"order": "b", "node": "n"}]}')"""


def command(folder: Path, text: str | None = None, *, timeout_s: float = 20.0) -> CommandNodes:
    script = write_script(folder) if text is None else write_script(folder, text)
    return CommandNodes([sys.executable, str(script)], timeout_s=timeout_s)


class Installation:
    """The workers that a local installation runs for its control planes."""

    def __init__(self) -> None:
        self.running: tuple[str, ...] = ()

    async def change(self, names: Sequence[str]) -> None:
        self.running = tuple(names)


@asynccontextmanager
async def local(folder: Path, installation: Installation, most: int = 2) -> AsyncIterator[CommandNodes]:
    """Yield the command of a local installation, whose supervisor answers in this process."""
    nodes = LocalNodes(folder / "ordered.json", most, installation.change, SharedProgress([]))
    serving, door = asyncio.create_task(nodes.run(folder / "door")), folder / "door"
    await until(door.exists)
    try:
        yield CommandNodes([sys.executable, "-m", "fairway.cli.fleet.nodes", str(door)], timeout_s=20.0)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def at_once(seconds: float) -> None:
    assert seconds > 0.0


@pytest_asyncio.fixture(params=["memory", "command", "local", "deployments", "statefulsets"])
async def provider(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[NodeProvider]:
    if request.param == "local":
        async with local(tmp_path, Installation()) as found:
            yield found
    elif request.param in ("deployments", "statefulsets"):
        cluster = Cluster()
        cluster.add(request.param, "gpu", node_type="gpu", zone="zone-1")
        async with serving(cluster) as api:
            yield KubernetesNodes(api, SPACE, at_once)
    else:
        yield MemoryNodes() if request.param == "memory" else command(tmp_path)


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


async def test_a_local_installation_runs_what_is_ordered_up_to_its_most_also_after_a_restart(
    tmp_path: Path,
) -> None:
    installation = Installation()
    async with local(tmp_path, installation) as nodes:
        await nodes.order("a", "", "")
        await nodes.order("b", "", "")
        await until(lambda: len(installation.running) == 2)
        with pytest.raises(Unavailable, match="the most of --workers"):
            await nodes.order("c", "", "")
        await nodes.release("worker-ordered-0")
        await until(lambda: installation.running == ("worker-ordered-1",))
    again = Installation()
    async with local(tmp_path, again) as nodes:
        await until(lambda: again.running == ("worker-ordered-1",))
        await nodes.order("b", "", "")
        assert [one.node for one in await nodes.list()] == ["worker-ordered-1"]
    with pytest.raises(Unavailable, match="the supervisor does not answer"):
        await nodes.list()


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
