"""The quarantine of one gateway, on a store."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from services.adapters.quarantine import QuarantineLimits, StoreQuarantine
from services.core.records import QUARANTINE, load
from services.ports.poison.quarantine import Quarantined
from services.ports.store import Entry, Store
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.informer import Informer


def decode(entry: Entry) -> Quarantined:
    return load(entry.value, Quarantined)


async def store_quarantine(
    store: Store, stack: AsyncExitStack, limits: QuarantineLimits | None = None
) -> StoreQuarantine:
    """Return it once its view is synchronised; ``stack`` ends the view."""
    informer = Informer(store, QUARANTINE, decode, SystemClock())
    task = asyncio.create_task(informer.run())
    stack.callback(task.cancel)
    await informer.wait_synced(10.0)
    return StoreQuarantine(store, informer, SystemClock(), limits)
