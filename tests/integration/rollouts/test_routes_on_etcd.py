"""Gateways apply a route within 200 ms of its write, each request whole, on a real etcd."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from services.adapters.etcd.store import EtcdStore
from services.core.records import dump, load
from services.core.rollouts.routes import ROUTES, WHOLE_BP, ModelRoute, RouteArm, SplitCaller, split
from services.gateway.splits import Splits
from services.ports.store import Entry, Put
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.informer import Informer

CLOCK = SystemClock()
OLD, NEW = "sha256:" + "ab" * 32, "sha256:" + "cd" * 32
NAME = "chat-on-etcd"
GATEWAYS, WRITES, WITHIN_S = 4, 50, 0.2


def decode(entry: Entry) -> ModelRoute:
    return load(entry.value, ModelRoute)


async def test_every_gateway_applies_a_route_within_200_ms(etcd_endpoint: str) -> None:
    route = ModelRoute(NAME, "s", (RouteArm("stable", OLD, WHOLE_BP), RouteArm("canary", NEW)))
    store = EtcdStore([etcd_endpoint], CLOCK)
    informers = [Informer(store, ROUTES, decode, CLOCK) for _ in range(GATEWAYS)]
    tasks = [asyncio.create_task(informer.run()) for informer in informers]
    took_s = []
    try:
        for informer in informers:
            await informer.wait_synced(5.0)
        for number in range(WRITES):
            weight_bp = WHOLE_BP if number % 2 else 0
            wanted = replace(route, arms=split(route, {"canary": weight_bp}))
            began_s = time.monotonic()
            await store.commit([Put(ROUTES + NAME, dump(wanted))])
            for informer in informers:
                arm = await arm_of(Splits(informer), wanted)
                assert arm.version_digest == (NEW if weight_bp else OLD)
            took_s.append(time.monotonic() - began_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await store.close()
    took_s.sort()
    assert took_s[int(0.95 * WRITES)] < WITHIN_S, took_s


async def arm_of(splits: Splits, wanted: ModelRoute) -> RouteArm:
    """Return the arm of a request once the gateway's view is the wanted route."""
    while (held := splits.of(NAME)) is None or held.record != wanted:
        await asyncio.sleep(0.001)
    return splits.choose(held.record, SplitCaller("acme", "session"), serves=lambda _digest: True)
