"""Garbage collection of blobs that no version needs and that exceed a minimum age.

A publisher uploads chunks before it creates the version; the minimum age covers the time between. A version
created during a collection is either included here or finds its chunks missing: see ``SweepFence``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import structlog

from services.core.errors import (
    Conflict,
    FailedPrecondition,
    FairwayError,
    IntegrityError,
    InvalidInput,
    NotFound,
    Unavailable,
)
from services.core.manifest import Manifest
from services.core.records import MODELS, ROOT
from services.ports.blob_store import BlobStore, StoredBlob
from services.ports.clock import Clock
from services.ports.store import Committed, Condition, ModRevisionIs, Put, Store

SWEEPING: Final = ROOT + "guards/registry-sweeping"
SWEEPS: Final = ROOT + "guards/registry-sweeps"
# A batch takes seconds. The lease is longer than a batch by more than one deletion takes (two requests of at
# most 10 s in a bucket), and it frees the fence after a crash.
LEASE_S: Final = 60
BATCH_S: Final = 30.0
_WAIT_S: Final = 20.0
_LOOK_S: Final = 0.2


class SweepFence:
    """Fence between version creation and collection: no version is created from chunks being deleted.

    The key ``SWEEPING`` exists, under a lease, while a collector deletes. ``SWEEPS`` is written before every
    batch of deletions. To create a version, the registry waits until no collector deletes, checks that the
    chunks exist, and commits only if no batch has begun since. A collector writes both keys, lists the
    versions, then deletes. The one that commits second observes the other.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def conditions(self) -> Sequence[Condition]:
        """Return the condition of a commit: no collector has deleted anything since. Waits while a collector
        deletes.

        Raises Unavailable when the wait takes too long.
        """
        deadline_s = self._clock.monotonic_s() + _WAIT_S
        while True:
            # Order matters: a sweep that starts after the first read changes the key that was read; one that
            # started before has ended by the second read or is observed by it.
            sweeps = await self._store.get(SWEEPS)
            if await self._store.get(SWEEPING) is None:
                return (ModRevisionIs(SWEEPS, sweeps.mod_revision if sweeps is not None else 0),)
            if self._clock.monotonic_s() > deadline_s:
                raise Unavailable("garbage is being collected: try again", retry_after_s=5.0)
            await self._clock.sleep(_LOOK_S)

    @asynccontextmanager
    async def sweeping(self) -> AsyncIterator[Deadline]:
        """Block version creation until the yielded deadline. Raises Conflict while another collector
        sweeps."""
        lease_id = await self._store.grant_lease(LEASE_S)
        try:
            deadline = Deadline(self._clock)
            done = await self._store.commit(
                [Put(SWEEPING, b"", lease_id), Put(SWEEPS, b"")], [ModRevisionIs(SWEEPING, 0)]
            )
            if not isinstance(done, Committed):
                raise Conflict("garbage is being collected by another registry")
            yield deadline
        finally:
            await self._release(lease_id)

    async def _release(self, lease_id: int) -> None:
        try:
            await self._store.revoke_lease(lease_id)
        except FairwayError as error:  # the lease expires by itself
            log.info("sweep_fence.release_failed", error=error.message)


class Deadline:
    """Time limit of a batch. It is counted from before the fence was created, so it never ends late."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s = clock.monotonic_s() + BATCH_S

    @property
    def has_passed(self) -> bool:
        return self._clock.monotonic_s() > self._until_s


log = structlog.get_logger()

DEFAULT_AGE_S: Final = 24 * 3600.0
LEAST_AGE_S: Final = 3600.0
_BATCH: Final = 128


@dataclass(frozen=True, slots=True)
class Collected:
    """Result of a collection, or of a dry run. ``young``: needed by no version, but below the minimum age."""

    deleted_blobs: int = 0
    deleted_bytes: int = 0
    kept_blobs: int = 0
    kept_bytes: int = 0
    young_blobs: int = 0
    deleted_leftovers: int = 0


@dataclass(frozen=True, slots=True)
class _Found:
    doomed: tuple[StoredBlob, ...]
    kept: tuple[int, int]
    young: int


class Collector:
    """One per registry; ``manifest`` reads the manifest of a version digest."""

    def __init__(
        self,
        store: Store,
        blobs: BlobStore,
        clock: Clock,
        *,
        fence: SweepFence,
        manifest: Callable[[str], Awaitable[Manifest]],
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._clock = clock
        self._fence = fence
        self._manifest = manifest
        self._running = asyncio.Lock()

    async def collect(self, *, min_age_s: float = 0.0, dry_run: bool = False) -> Collected:
        """Delete unneeded blobs that were written ``min_age_s`` ago or earlier; 0: the default age.

        Raises InvalidInput for an age below the safe minimum, Conflict while another collection runs, and
        FailedPrecondition when a manifest cannot be read: its chunks are unknown, so nothing is deleted.
        """
        age_s = min_age_s or DEFAULT_AGE_S
        if age_s < LEAST_AGE_S and not dry_run:
            raise InvalidInput(f"min_age is at least {LEAST_AGE_S:g} s", field="min_age")
        if self._running.locked():
            raise Conflict("garbage is being collected already")
        async with self._running:
            before_unix_s = self._clock.unix_s() - age_s
            needs = _Needs(self._store, self._manifest)
            await needs.update()
            found = await self._find(needs.digests, before_unix_s)
            deleted = found.doomed if dry_run else await self._delete(needs, found.doomed)
            collected = Collected(
                deleted_blobs=len(deleted),
                deleted_bytes=sum(blob.size_bytes for blob in deleted),
                kept_blobs=found.kept[0],
                kept_bytes=found.kept[1],
                young_blobs=found.young,
                deleted_leftovers=await self._blobs.sweep(before_unix_s, dry_run=dry_run),
            )
        log.info("garbage.collected", dry_run=dry_run, blobs=len(deleted), size_bytes=collected.deleted_bytes)
        return collected

    async def _find(self, needed: Iterable[str], before_unix_s: float) -> _Found:
        doomed: list[StoredBlob] = []
        kept_blobs = kept_bytes = young = 0
        async with aclosing(self._blobs.stored()) as pages:
            async for page in pages:
                for blob in page:
                    if blob.digest in needed:
                        kept_blobs += 1
                        kept_bytes += blob.size_bytes
                    elif blob.written_unix_s > before_unix_s:
                        young += 1
                    else:
                        doomed.append(blob)
        return _Found(tuple(doomed), (kept_blobs, kept_bytes), young)

    async def _delete(self, needs: _Needs, doomed: Sequence[StoredBlob]) -> Sequence[StoredBlob]:
        deleted: list[StoredBlob] = []
        for start in range(0, len(doomed), _BATCH):
            async with self._fence.sweeping() as deadline:
                await needs.update()
                batch = [blob for blob in doomed[start : start + _BATCH] if blob.digest not in needs.digests]
                deleted += await self._delete_batch(batch, deadline)
        return deleted

    async def _delete_batch(self, batch: Sequence[StoredBlob], deadline: Deadline) -> list[StoredBlob]:
        """Delete blobs until the deadline; the next collection deletes the rest.

        Blobs are deleted one at a time: the fence may then outlast the deadline by at most one deletion in a
        slow store.
        """
        deleted: list[StoredBlob] = []
        for position, blob in enumerate(batch):
            if deadline.has_passed:
                log.warning("garbage.batch_cut_short", left=len(batch) - position)
                break
            if await self._blobs.delete([blob]):
                deleted.append(blob)
        return deleted


class _Needs:
    """The digests that versions need. ``update`` adds those of versions created since the last call."""

    def __init__(self, store: Store, manifest: Callable[[str], Awaitable[Manifest]]) -> None:
        self.digests: set[str] = set()
        self._store = store
        self._manifest = manifest
        self._versions: set[str] = set()

    async def update(self) -> None:
        for entry in (await self._store.list(MODELS)).entries:
            model, kind, digest = entry.key.removeprefix(MODELS).split("/", 2)
            if kind == "versions" and digest not in self._versions:
                await self._add(model, digest)

    async def _add(self, model: str, digest: str) -> None:
        try:
            manifest = await self._manifest(digest)
        except (NotFound, IntegrityError) as error:
            raise FailedPrecondition(
                f"the manifest of {model} {digest} cannot be read: publish the version again or delete it",
                model=model,
                digest=digest,
            ) from error
        self.digests.add(digest)
        self.digests.update(chunk for file in manifest.files for chunk in file.chunks)
        self._versions.add(digest)
