"""`make drill-update`: a deployment is updated and updated back under streams. Exits 0 when none failed.

Three installations, one after the other, eight clients for a minute on each:

- one worker and two workers with memory for both versions;
- two workers that have memory for one version each, where one changes after the other.

``ttft_p95_ratio`` is the largest of the three: the quantile of the streams that began while an update went
on, over that of the streams before it. The last line is ``RESULT {json}``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.overhead import quantile
from fairway.client import AdminClient
from tests.support.stack import Stack
from tests.support.updating import Traffic, admin_of, move_to, publish_twin

CLIENTS: Final = 8
DRILL_S: Final = 60.0
CALM_S: Final = 15.0
SMALL_MEMORY_BYTES: Final = 72 * 1024**2  # the bundled model and 24 MiB of KV fit once
SETTINGS: Final = {
    "FAIRWAY_ENGINE_THREADS": "1",
    "FAIRWAY_KV_MEMORY_BYTES": str(24 * 1024**2),
    "FAIRWAY_QUEUE_TTL_S": "5",  # so that a version that retires leaves within the drill
}


@dataclass(frozen=True, slots=True)
class Drill:
    name: str
    workers: int
    memory_bytes: int


DRILLS: Final = (
    Drill("one worker", 1, 2 * 1024**3),
    Drill("two workers", 2, 2 * 1024**3),
    Drill("two workers, memory for one version each", 2, SMALL_MEMORY_BYTES),
)


async def update_under_load(stack: Stack, drill: Drill, traffic: Traffic) -> dict[str, object]:
    """Update to the twin and back under load, and return the figures."""
    began_s = time.monotonic()
    updates: list[tuple[float, float]] = []
    first = ""
    async with traffic.running(stack, CLIENTS), admin_of(stack) as admin:
        first = (await admin.deployments.get(stack.model)).version_digest
        await asyncio.sleep(CALM_S)
        for version in ("twin", first):
            updates.append(await timed_update(admin, stack.model, version))
            await asyncio.sleep(5.0)
        await asyncio.sleep(max(0.0, began_s + DRILL_S - time.monotonic()))
    calm = quantile(traffic.ttft_s(began_s + 5.0, began_s + CALM_S), 0.95)
    during = [one for began, ended in updates for one in traffic.ttft_s(began, ended)]
    return {
        "streams": len(traffic.served),
        "failed": len(traffic.failures),
        "versions": len(traffic.versions()),
        "update_s": [round(ended - began, 1) for began, ended in updates],
        "ttft_p95_ratio": round(quantile(during, 0.95) / calm, 2),
        "worst_ttft_s": round(max(during), 3),
    }


async def timed_update(admin: AdminClient, name: str, version: str) -> tuple[float, float]:
    """Return when the update began, and when the version before had left."""
    began_s = time.monotonic()
    updated = await move_to(admin, name, version)
    while any(one.version_digest != updated.version_digest for one in updated.status.replicas):
        await asyncio.sleep(0.25)
        updated = await admin.deployments.get(name)
    return began_s, time.monotonic()


def run(drill: Drill, folder: Path) -> dict[str, object]:
    settings = {**SETTINGS, "FAIRWAY_MEMORY_BYTES": str(drill.memory_bytes)}
    with Stack.started(
        folder / "state", workers=drill.workers, replicas=drill.workers, settings=settings
    ) as stack:
        publish_twin(stack, folder / "twin", "twin")
        traffic = Traffic()
        figures = asyncio.run(update_under_load(stack, drill, traffic))
    print(f"{drill.name}: {figures}", flush=True)
    for failure in sorted(set(traffic.failures)):
        print(f"  {traffic.failures.count(failure)}: {failure}", flush=True)
    return figures


def main() -> int:
    rows = []
    for drill in DRILLS:
        with tempfile.TemporaryDirectory(prefix="fairway-update-") as folder:
            rows.append(run(drill, Path(folder)))
    result = {
        "failed": sum(int(str(row["failed"])) for row in rows),
        "ttft_p95_ratio": max(float(str(row["ttft_p95_ratio"])) for row in rows),
        "versions": min(int(str(row["versions"])) for row in rows),
    }
    print("RESULT", json.dumps(result))
    return 0 if result["failed"] == 0 and result["versions"] == 2 else 1


if __name__ == "__main__":
    sys.exit(main())
