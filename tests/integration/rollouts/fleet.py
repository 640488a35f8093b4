"""A fleet of workers that are records in the store: they load and unload what is assigned to them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from services.core.records import (
    ASSIGNMENTS,
    DEPLOYMENTS,
    MODELS,
    WORKERS,
    Assignment,
    Deployment,
    LoadedVersion,
    Meta,
    VersionRecord,
    VersionState,
    Worker,
    dump,
    load,
    version_key,
)
from services.ports.store import Put, Store

OLD, NEW = "sha256:" + "ab" * 32, "sha256:" + "cd" * 32
NAME = "chat"


@dataclass
class RecordedFleet:
    """Workers that take ``load_s`` to load a version and retire one after ``retire_s``."""

    store: Store
    workers: tuple[str, ...] = ("w0", "w1")
    load_s: float = 0.05
    retire_s: float = 0.05
    since_s: dict[tuple[str, str], float] = field(default_factory=dict)

    async def begin(self) -> None:
        """Store two versions, the deployment of the first, and the workers."""
        puts = [
            Put(version_key("tiny", digest), dump(VersionRecord("tiny", digest, 1 << 20, 0.0)))
            for digest in (OLD, NEW)
        ]
        deployment = Deployment(Meta(NAME), "tiny", OLD, OLD, len(self.workers))
        await self.store.commit([*puts, Put(DEPLOYMENTS + NAME, dump(deployment))])
        assert MODELS
        await self.step()

    async def run(self) -> None:
        while True:
            await self.step()
            await asyncio.sleep(0.02)

    async def step(self) -> None:
        """Write the record of each worker whose versions changed."""
        listing = await self.store.list(ASSIGNMENTS)
        assigned = {one.worker_id: one for one in (load(e.value, Assignment) for e in listing.entries)}
        present = {e.key: e.value for e in (await self.store.list(WORKERS)).entries}
        now_s = asyncio.get_running_loop().time()
        for worker_id in self.workers:
            versions = self._versions(worker_id, assigned.get(worker_id, Assignment(worker_id)), now_s)
            data = dump(Worker(worker_id, f"{worker_id}:1", versions=versions))
            if present.get(WORKERS + worker_id) != data:
                await self.store.commit([Put(WORKERS + worker_id, data)])

    def _versions(self, worker_id: str, assignment: Assignment, now_s: float) -> tuple[LoadedVersion, ...]:
        found = []
        for one in assignment.versions:
            key = worker_id, f"{one.version_digest}{'-' if one.retiring else ''}"
            if one.retiring and (worker_id, one.version_digest) not in self.since_s:
                continue
            passed_s = now_s - self.since_s.setdefault(key, now_s)
            if one.retiring and passed_s > self.retire_s:
                self.since_s.pop((worker_id, one.version_digest), None)
                continue
            state = VersionState.READY if passed_s > self.load_s else VersionState.LOADING
            state = VersionState.RETIRING if one.retiring else state
            loaded = LoadedVersion(one.deployment, one.model, one.version_digest, state)
            found.append(replace(loaded, least_route_revision=one.least_route_revision))
        held = {one.version_digest for one in assignment.versions}
        for key in [key for key in self.since_s if key[0] == worker_id and key[1].rstrip("-") not in held]:
            del self.since_s[key]
        return tuple(found)
