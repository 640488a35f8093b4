"""Device memory in the plan: what workers report, and what assignments will take. Pure.

An engine serves every deployment of a version on its worker, and every version with the same computation: one
that joins another takes no memory. Memory is counted by version digest, at the highest priority of the
engine's deployments; a worker reports it with one of the engine's versions. An idle deployment that may be at
zero ranks below every priority. A worker that reports no memory size has no bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from services.core.errors import DoesNotFit
from services.core.records import AssignedVersion, LoadedVersion, VersionState, Worker

UNBOUNDED: Final = 1 << 62
LOWEST: Final = -UNBOUNDED


def needs_of(workers: Iterable[Worker]) -> dict[str, int]:
    """Return the minimum bytes of each version, by digest, as measured by workers."""
    found: dict[str, int] = {}
    for worker in workers:
        for loaded in worker.versions:
            if loaded.needed_bytes:
                found[loaded.version_digest] = max(loaded.needed_bytes, found.get(loaded.version_digest, 0))
    return found


@dataclass(frozen=True, slots=True)
class MemoryView:
    """The memory of one worker, with ``held`` assigned to it. ``needs`` is the result of ``needs_of``.

    ``engines`` names what each version computes; versions with the same share an engine, others have their
    own. ``idle_ranks`` has the ranks of idle deployments, all below those of priorities.
    """

    worker: Worker
    held: Sequence[AssignedVersion]
    needs: Mapping[str, int]
    engines: Mapping[str, str] = field(default_factory=dict)
    idle_ranks: Mapping[str, int] = field(default_factory=dict)

    def joins(self, version: AssignedVersion) -> bool:
        """Whether another assigned version has the engine that the version would run on."""
        digest = version.version_digest
        return version.executor != "null" and any(other != digest for other in self._together(digest))

    def granted_bytes(self, digest: str) -> int:
        loaded = self._loaded(digest)
        return 0 if loaded is None else loaded.granted_bytes

    def retained_bytes(self, digest: str, rank: int) -> int:
        """Return the bytes that a version retains while one of priority ``rank`` waits.

        It releases its spare memory to an equal or higher priority.
        """
        loaded = self._loaded(digest)
        yields = loaded is not None and self._ranks().get(digest, 0) <= rank
        return self.granted_bytes(digest) - (loaded.spare_bytes if loaded is not None and yields else 0)

    def starved(self, digest: str) -> bool:
        """Whether the worker lacks memory for a version that is assigned to it."""
        loaded = self._loaded(digest)
        return (
            loaded is not None
            and loaded.state is VersionState.FAILED
            and loaded.reason == DoesNotFit.reason
            and not self.granted_bytes(digest)
        )

    def free_bytes(
        self,
        *,
        but: str = "",
        rank: int = LOWEST,
        held_from_rank: int = LOWEST,
        due_from_rank: int = LOWEST,
    ) -> int:
        """Return the worker's bytes without the granted memory and the outstanding needs of assigned
        versions.

        ``but`` is left out. For a version of priority ``rank``, others release what they can spare. Grants
        count from priority ``held_from_rank`` on, outstanding needs from ``due_from_rank`` on. A need that no
        longer fits is not outstanding.
        """
        if not self.worker.memory_bytes:
            return UNBOUNDED
        ranks = self._ranks()
        digests = sorted((digest for digest in ranks if digest != but), key=lambda d: (-ranks[d], d))
        left = self.worker.memory_bytes - sum(
            self.retained_bytes(digest, rank) for digest in digests if ranks[digest] >= held_from_rank
        )
        counted = set(self._together(but))
        for digest in digests:
            due = self.needs.get(digest, 0)
            together = self._together(digest)
            if digest in counted or any(map(self.granted_bytes, together)):
                continue
            if ranks[digest] >= due_from_rank and due <= left:
                counted.update(together)
                left -= due
        return left

    def needed_bytes(self, version: AssignedVersion) -> int:
        """Return the version's minimum here, 0 while unknown.

        A version that is being unloaded still needs its present memory; it can shrink only after that.
        """
        if version.executor == "null" or self.joins(version):
            return 0
        digest = version.version_digest
        return max(self.needs.get(digest, 0), self.granted_bytes(digest))

    def evictions_for(self, version: AssignedVersion) -> tuple[tuple[str, int], ...]:
        """Return (digest, bytes) of the versions to evict so that ``version`` can be loaded.

        Only lower ranks are evicted, the lowest first, and none when all of them would not suffice.
        """
        digest = version.version_digest
        needed_bytes = self.needed_bytes(version)
        if self.granted_bytes(digest) or not needed_bytes:
            return ()
        ranks = self._ranks()
        rank = ranks[digest]
        short = needed_bytes - self.free_bytes(but=digest, rank=rank, due_from_rank=rank)
        lower = sorted(
            (
                (ranks[other], -self.retained_bytes(other, rank), other)
                for other in ranks
                if other != digest and ranks[other] < rank and self.granted_bytes(other)
            ),
        )
        evicted: list[tuple[str, int]] = []
        for _, minus_bytes, other in lower:
            if short <= 0:
                break
            evicted.append((other, -minus_bytes))
            short += minus_bytes
        if short > 0:
            return ()
        for one in reversed(list(evicted)):  # keep the highest priorities whose eviction is not needed
            if short + one[1] <= 0:
                evicted.remove(one)
                short += one[1]
        # The engine ends with the last of its versions.
        return tuple((each, size_bytes) for other, size_bytes in evicted for each in self._together(other))

    def loss(self, version: AssignedVersion) -> int:
        """Return the highest rank that is evicted for a version that joins; below all ranks if none is."""
        view = replace(self, held=(*self.held, version))
        ranks = view._ranks()
        return max((ranks[digest] for digest, _ in view.evictions_for(version)), default=LOWEST)

    def _ranks(self) -> dict[str, int]:
        ranks: dict[str, int] = {}
        for version in self.held:
            if version.executor != "null":
                engine = self._engine(version.version_digest)
                rank = self.idle_ranks.get(version.deployment, version.priority.rank)
                ranks[engine] = max(rank, ranks.get(engine, LOWEST))
        return {
            version.version_digest: ranks[self._engine(version.version_digest)]
            for version in self.held
            if version.executor != "null"
        }

    def _engine(self, digest: str) -> str:
        return self.engines.get(digest) or digest

    def _together(self, digest: str) -> tuple[str, ...]:
        """Return the assigned versions of the version's engine."""
        engine = self._engine(digest)
        return tuple(
            dict.fromkeys(
                one.version_digest
                for one in self.held
                if one.executor != "null" and self._engine(one.version_digest) == engine
            )
        )

    def _loaded(self, digest: str) -> LoadedVersion | None:
        return next((one for one in self.worker.versions if one.version_digest == digest), None)


def no_memory(memory: MemoryView, version: AssignedVersion) -> str:
    """Return why the worker lacks room for the version even after evictions, empty if it has room."""
    rank = version.priority.rank
    needed_bytes = memory.needed_bytes(version)
    free = memory.free_bytes(but=version.version_digest, rank=rank, held_from_rank=rank, due_from_rank=rank)
    if not needed_bytes or needed_bytes <= free:
        return ""
    holders: dict[str, int] = {}
    for other in memory.held:
        size_bytes = memory.granted_bytes(other.version_digest)
        if size_bytes and other.priority.rank >= rank:
            holders[other.deployment] = size_bytes
    held = "".join(f", {name} holds {_mib(size_bytes)} MiB" for name, size_bytes in sorted(holders.items()))
    total = memory.worker.memory_bytes
    return f"no_memory: needs {_mib(needed_bytes)} MiB, {_mib(free)} of {_mib(total)} MiB are free{held}"


def _mib(size_bytes: int) -> int:
    return math.ceil(size_bytes / 2**20)
