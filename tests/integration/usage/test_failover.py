"""Two control planes on a real etcd and a real store: the ledger passes from one to the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from services.adapters.etcd.store import EtcdStore
from services.adapters.ledger_stores import FolderLedger, S3Ledger
from services.controlplane.usage.ledger import UsageLedger
from services.core.errors import FairwayError, NoLeader
from services.ports.usage import LedgerStore
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.leadership import Election
from tests.support.object_store import ObjectStore
from tests.support.usage_ledgers import DAY_S, Sender, booked, request_usage, sequence_use, until_leading

CLOCK: Final = SystemClock()
REQUESTS: Final = 30
NAMES: Final = [f"r{number}" for number in range(REQUESTS)]
ONCE: Final = (1, 20, 2_000_000)


@dataclass
class Plane:
    ledger: UsageLedger
    election: Election
    tasks: list[asyncio.Task[None]]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture(params=["folder", "s3"])
def store_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], LedgerStore]:
    if request.param == "folder":
        return lambda: FolderLedger(tmp_path / "ledger")
    server: ObjectStore = request.getfixturevalue("object_store")
    return lambda: S3Ledger(server.bucket(prefix=f"failover-{tmp_path.name}"))


@pytest_asyncio.fixture
async def planes(
    store_of: Callable[[], LedgerStore], etcd_endpoint: str, tmp_path: Path
) -> AsyncIterator[list[Plane]]:
    etcd = EtcdStore((etcd_endpoint,), CLOCK)
    found = []
    for name in "ab":
        election = Election(etcd, f"/test/{tmp_path.name}/leader", name.encode(), 2, CLOCK)
        ledger = UsageLedger(store_of(), CLOCK, election, writer=name, retention_s=4000 * DAY_S)
        tasks = [asyncio.ensure_future(election.run()), asyncio.ensure_future(ledger.run())]
        found.append(Plane(ledger, election, tasks))
        await asyncio.sleep(0.2)
    yield found
    for plane in found:
        await plane.stop()
    await etcd.close()


async def delivered(sender: Sender, planes: list[Plane]) -> None:
    """Send to whichever leads, as the outbox does."""
    while not sender.done:
        for plane in planes:
            with suppress(FairwayError):
                await sender.send(plane.ledger)
                break
        else:
            await asyncio.sleep(0.05)


async def test_a_failover_amid_reports_books_every_event_once(planes: list[Plane]) -> None:
    first, second = planes
    await until_leading(first.ledger)
    with pytest.raises(NoLeader):
        await second.ledger.report(Sender("x", [request_usage("x")]).report(1))
    senders = [
        Sender("gateway", [request_usage(name) for name in NAMES]),
        Sender("worker", [sequence_use(name) for name in NAMES]),
    ]
    sending = [asyncio.ensure_future(delivered(sender, planes)) for sender in senders]
    while senders[0].acknowledged < REQUESTS // 3:
        await asyncio.sleep(0.02)
    await first.ledger.checkpoint()
    await first.stop()
    async with asyncio.timeout(60):
        await asyncio.gather(*sending)
    assert await booked(second.ledger, int(CLOCK.unix_s() // 3600)) == dict.fromkeys(NAMES, ONCE)
    await second.ledger.checkpoint()
    assert await booked(second.ledger, int(CLOCK.unix_s() // 3600)) == dict.fromkeys(NAMES, ONCE)
