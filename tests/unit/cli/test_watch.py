"""A watch outlives its connection, and tells then what changed meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from fairway.cli.calls import admin_client
from fairway.cli.commands.accounts import TENANTS
from fairway.cli.commands.events import _follow as follow_events
from fairway.cli.connection import Connection
from fairway.cli.errors import CliError
from fairway.cli.flags import Format
from fairway.cli.watch import follow
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import controlplane_pb2_grpc
from tests.unit.cli.serving import serving


class ControlPlane(controlplane_pb2_grpc.ControlPlaneServiceServicer):
    """Has tenants, tells them in two messages, then what is put into ``news``."""

    def __init__(self, *names: str, remembers: bool = True) -> None:
        self.names = names
        self.remembers = remembers
        self.news: asyncio.Queue[cp.ResourceChange] = asyncio.Queue()
        self.resumed: list[int] = []

    async def WatchResources(self, request: Any, context: Any) -> None:  # type: ignore[override]
        if request.after_revision and not self.remembers:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "too old to resume from")
        for name in self.names:
            await context.write(cp.WatchResourcesResponse(revision=1, changes=[change(name)]))
        await context.write(cp.WatchResourcesResponse(revision=1, snapshot_end=True))
        while True:
            news = await self.news.get()
            await context.write(cp.WatchResourcesResponse(revision=2, changes=[news]))

    async def WatchEvents(self, request: Any, context: Any) -> None:  # type: ignore[override]
        self.resumed.append(request.after_revision)
        revision = request.after_revision + 1
        event = cp.Event(name=f"event-{revision}", reason="X")
        await context.write(cp.WatchEventsResponse(revision=revision, events=[event]))
        await asyncio.Event().wait()


def control_plane(*names: str, remembers: bool = True) -> ControlPlane:
    return ControlPlane(*names, remembers=remembers)  # type: ignore[abstract]


def change(name: str, *, deleted: bool = False, **values: Any) -> cp.ResourceChange:
    tenant = cp.Tenant(metadata=cp.Metadata(name=name), **values)
    return cp.ResourceChange(tenant=tenant, deleted=deleted)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    async with admin_client(f"127.0.0.1:{port}", admin_key="k") as admin:
        yield Connection(admin, None)


class Heard:
    """What a watch writes, line by line."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.lines: list[str] = []

    async def until(self, count: int) -> list[str]:
        async with asyncio.timeout(30):
            while len(self.lines) < count:
                self.lines += self._capsys.readouterr().out.splitlines()
                await asyncio.sleep(0.02)
        return self.lines


async def test_what_changed_while_the_server_was_away_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    heard, first = Heard(capsys), control_plane("acme", "bolt")
    assert TENANTS.watch is not None
    async with serving(first) as port, connected(port) as connection, asyncio.TaskGroup() as group:
        watching = group.create_task(follow(connection, TENANTS.watch, TENANTS.columns, Format.JSON))
        await heard.until(2)
        first.news.put_nowait(change("acme", requests_per_minute=5))
        first.news.put_nowait(change("acme", requests_per_minute=5))  # nothing new: not told
        first.news.put_nowait(change("cargo"))
        await heard.until(4)
        watching.cancel()
    told = [json.loads(line) for line in heard.lines]
    assert [each["tenant"]["metadata"]["name"] for each in told] == ["acme", "bolt", "acme", "cargo"]
    assert told[2]["tenant"]["requests_per_minute"] == 5


async def test_what_the_server_does_not_remember_is_told_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    heard = Heard(capsys)
    assert TENANTS.watch is not None
    async with serving(control_plane("acme", "bolt")) as port:
        stack = connected(port)
        connection = await stack.__aenter__()
        watching = asyncio.create_task(follow(connection, TENANTS.watch, TENANTS.columns, Format.TABLE))
        await heard.until(2)
    async with serving(control_plane("bolt", "cargo", remembers=False), port):
        lines = await heard.until(4)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await stack.__aexit__(None, None, None)
    assert sorted(line.split("\t")[0] for line in lines[2:]) == ["acme", "cargo"]
    assert "acme\tdeleted" in lines


async def test_events_go_on_where_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    heard, second = Heard(capsys), control_plane()
    async with serving(control_plane()) as port:
        stack = connected(port)
        connection = await stack.__aenter__()
        watching = asyncio.create_task(follow_events(connection, [], "", None, Format.JSON))
        await heard.until(1)
    async with serving(second, port):
        lines = await heard.until(2)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await stack.__aexit__(None, None, None)
    assert [json.loads(line)["name"] for line in lines] == ["event-1", "event-2"]
    assert second.resumed == [1]


async def test_server_that_was_never_there_is_an_error() -> None:
    assert TENANTS.watch is not None
    async with connected(9) as connection:
        with pytest.raises(CliError, match="cannot watch the tenants"):
            await follow(connection, TENANTS.watch, TENANTS.columns, Format.TABLE)
        with pytest.raises(CliError, match="cannot watch the events"):
            await follow_events(connection, [], "", None, Format.TABLE)
