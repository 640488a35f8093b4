"""An update under streams: none fails, and both versions answer in turn."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tests.support.stack import Stack
from tests.support.updating import TIMEOUT_S, Traffic, admin_of, move_to, publish_twin
from tests.support.waiting import until


async def test_no_stream_fails_while_a_deployment_is_updated(stack: Stack, tmp_path: Path) -> None:
    await asyncio.to_thread(publish_twin, stack, tmp_path / "twin", "update-twin")
    traffic = Traffic()
    async with admin_of(stack) as admin:
        before = (await admin.deployments.get(stack.model)).version_digest
        async with traffic.running(stack, 4):
            await asyncio.sleep(1.0)
            after = (await move_to(admin, stack.model, "update-twin")).version_digest
            await until(lambda: after in traffic.versions(), timeout_s=TIMEOUT_S)
            # Back at once, while the version before retires and is still loaded.
            await move_to(admin, stack.model, before)
            await asyncio.sleep(1.0)
            moved_s = time.monotonic()
            await until(lambda: traffic.served[-1].began_s > moved_s, timeout_s=TIMEOUT_S)
    assert traffic.failures == []
    assert traffic.versions() == [before, after]
    assert {one.version_digest for one in traffic.served if one.began_s > moved_s} == {before}
