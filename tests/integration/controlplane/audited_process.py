"""An audited control plane as a process of its own: ``python -m … ETCD FOLDER PORT``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from services.adapters.etcd.store import EtcdStore
from services.adapters.ledger_stores import AUDIT, FolderLedger
from services.core.records import Leader, dump
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.leadership import Election
from tests.support.audited_plane import KEY, audited_plane, sequencer_of

CLOCK = SystemClock()


async def main(endpoint: str, folder: Path, port: int) -> None:
    store = EtcdStore([endpoint], CLOCK)
    tiles = FolderLedger(folder / "tiles", AUDIT)
    election = Election(store, KEY, dump(Leader("p", "")), 1, CLOCK)
    async with audited_plane(store, tiles, CLOCK, folder, port=port) as plane:
        sequencer = sequencer_of(store, tiles, plane.pending, CLOCK, folder, leadership=election)
        await asyncio.gather(election.run(), sequencer.run(), plane.recorder.run())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
