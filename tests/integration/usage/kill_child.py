"""A process with a source and the ledger, killed before one of its changes of files.

Arguments: folder, number of the change to die before (0: none), "fill" to add events. It prints the events
that are safe on the disk of the source, and at the end how many changes it made and what is booked.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fairway.v1 import usage_pb2 as pb
from services.adapters.ledger_stores import FolderLedger
from services.adapters.usage.outbox import DiskOutbox
from services.controlplane.usage.ledger import UsageLedger
from services.controlplane.usage.policy.book import UsageReport
from services.rpc.convert.usage import event_from_proto
from tests.support.clocks import QuickClock
from tests.support.election import StaticElection
from tests.support.usage_ledgers import (
    UNIX_S,
    booked,
    ledger_of,
    request_usage,
    sequence_use,
    until_leading,
)

CHANGES: Final = ("os.link", "os.remove", "os.rename", "open")
_WRITES: Final = os.O_WRONLY | os.O_RDWR


class KillPoints:
    """Counts the changes of files below a folder; ends the process before one of them."""

    def __init__(self, root: Path, kill_before: int) -> None:
        self.changes = 0
        self._root = str(root)
        self._kill_before = kill_before
        sys.addaudithook(self._audited)

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or not str(arguments[0]).startswith(self._root):
            return
        if event == "open" and not int(arguments[2]) & _WRITES:
            return
        self.changes += 1
        if self.changes == self._kill_before:
            os.kill(os.getpid(), signal.SIGKILL)


class ToLedger:
    """``UsageReports`` without a network."""

    def __init__(self, ledger: UsageLedger) -> None:
        self._ledger = ledger

    async def report(
        self, source: str, first: int, events: Sequence[pb.UsageEvent], lost_until: int, apart: int
    ) -> int:
        return await self._ledger.report(
            UsageReport(source, first, tuple(map(event_from_proto, events)), lost_until, apart)
        )


async def add(outbox: DiskOutbox, names: Sequence[str]) -> None:
    for name in names:
        outbox.add(request_usage(name))
        outbox.add(sequence_use(name))
    await outbox.sync()
    print(json.dumps(list(names)), flush=True)


async def main(root: Path, kill_before: int, fill: bool) -> None:
    points = KillPoints(root, kill_before)
    clock = QuickClock(UNIX_S)
    ledger = ledger_of(FolderLedger(root / "ledger"), clock, StaticElection(1), writer=f"pid{os.getpid()}")
    running = asyncio.ensure_future(ledger.run())
    outbox = DiskOutbox(root / "outbox", f"life-{os.getpid()}", ToLedger(ledger), clock)
    await outbox.recover()
    await until_leading(ledger)
    for part in range(2 if fill else 1):
        if fill:
            await add(outbox, [f"{part}-{number}" for number in range(3)])
        while not await outbox.send():
            pass
        await ledger.checkpoint()
        clock.now_s += 700
    print(json.dumps({"changes": points.changes, "booked": await booked(ledger)}), flush=True)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await outbox.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "fill"))
