"""A store that verifies its identity: no role reads from or writes to another store by mistake.

The control plane writes a generation record with a random id once. A process remembers the first id that it
reads, in memory and in a file. A store without the record, or with another id, is neither read nor written:
every call raises StoreReplaced until the original store is back. etcd's own cluster id is not sufficient: a
wiped member computes the same one again, and a restored one may have another.

A store restored from a backup has the same id and a lower revision. Revisions are epochs, incarnations and
points to resume from, so they must not decrease. The process that observes a restore raises ``base_revision``
in the record above every revision that it has seen. Every process adds the base to each revision that it
reads. Then old revisions refer to nothing in the restored store: watches list again, and leases and leaders
start again with newer epochs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from services.core.errors import IntegrityError, StoreReplaced, StoreUnavailable
from services.core.records import STORE_GENERATION, StoreGeneration, dump, load
from services.ports.clock import Clock
from services.ports.store import (
    Committed,
    Compacted,
    Condition,
    ConditionFailed,
    Entry,
    KeyChanged,
    KeyRemoved,
    Listing,
    ModRevisionIs,
    Operation,
    Put,
    Store,
    ValueIs,
    WatchBatch,
)

log = structlog.get_logger()

FILE_NAME: Final = "store-generation"
# A store cannot be replaced under a connection: watches break and verify it anew. Looks serve processes
# without a watch, and stores that were cut off meanwhile.
LOOK_S: Final = 10.0
_SLACK: Final = 2**20  # revisions that another process may have seen but this one has not
_TRIES: Final = 4
_MAX_FILE_BYTES: Final = 256
_NEXT: Final = (
    "changes are refused and the last state read is kept: restore etcd from its backup, or accept this store "
    "as docs/operations/backup.md describes"
)


class GuardedStore:
    """``Store`` decorator. Until it reads a generation record, it passes every call on.

    ``run`` checks the record every ``LOOK_S``, so that ``problem`` is current without calls. With an existing
    ``folder``, the generation is remembered there across restarts.
    """

    def __init__(self, inner: Store, clock: Clock, *, folder: Path | None = None) -> None:
        self._inner = inner
        self._clock = clock
        self._file = folder / FILE_NAME if folder is not None and folder.is_dir() else None
        self._generation = _read(self._file)
        self._record = b""  # the fence of every write, as stored
        self._base = 0
        self._seen = 0  # highest revision returned
        self._problem = ""
        self._silent_s: float | None = None  # time at which etcd first failed to answer
        self.restores = 0

    @property
    def generation(self) -> str:
        """The random id of the store; empty until it was read."""
        return self._generation

    def problem(self) -> str:
        """Return why the store is rejected; empty while it is the original one or unavailable."""
        return self._problem

    def silence(self) -> str:
        """Return since when etcd does not answer; empty while it does."""
        if self._silent_s is None:
            return ""
        for_s = self._clock.monotonic_s() - self._silent_s
        return f"etcd does not answer: changes fail, the last state is served ({for_s:.0f} s so far)"

    async def run(self) -> None:
        """Check the record periodically, until cancelled."""
        while True:
            try:
                await self.verify()
                self._silent_s = None
            except StoreReplaced:
                self._silent_s = None  # another one answers
            except StoreUnavailable as error:
                log.debug("store.look_failed", error=error.message)
                self._silent_s = self._clock.monotonic_s() if self._silent_s is None else self._silent_s
            await self._clock.sleep(LOOK_S)

    async def found(self, generation: str) -> None:
        """Create the generation record, unless the store already has one.

        Raises StoreReplaced when this process belongs to another store, or StoreUnavailable.
        """
        await self.verify()
        if not self._record:
            put = Put(STORE_GENERATION, dump(StoreGeneration(generation)))
            await self._inner.commit([put], [ModRevisionIs(STORE_GENERATION, 0)])
            await self.verify()

    async def verify(self) -> None:
        """Check that this is the original store and read its base. Raises StoreReplaced, StoreUnavailable."""
        for _ in range(_TRIES):
            # Both are read first, because other tasks may see more during the listing.
            base, seen = self._base, self._seen
            listing = await self._inner.list(STORE_GENERATION)
            value = listing.entries[0].value if listing.entries else b""
            if base != self._base:
                continue
            record = self._rightful(value)
            if record is None:
                self._note(listing.revision)
                return
            if listing.revision + record.base_revision < seen:
                await self._raise_base(value, record, seen)
                continue
            if record.base_revision != self._base:
                log.warning("store.base_changed", base=record.base_revision, before=self._base)
            self._record, self._base = value, record.base_revision
            self._note(listing.revision + self._base)
            if self._problem:
                log.warning("store.returned", generation=self._generation)
                self._problem = ""
            if not self._generation:
                await self._remember(record.generation)
            return
        raise StoreUnavailable("the generation record is being changed by others", retry_after_s=1.0)

    # --- Store ----------------------------------------------------------------------------------

    async def get(self, key: str) -> Entry | None:
        base = await self._ready()
        entry = await self._inner.get(key)
        await self._unmoved(base)
        return None if entry is None else _shifted(entry, base)

    async def list(self, prefix: str) -> Listing:
        base = await self._ready()
        listing = await self._inner.list(prefix)
        await self._unmoved(base)
        revision = self._note(listing.revision + base)
        return Listing(revision, tuple(_shifted(entry, base) for entry in listing.entries))

    async def commit(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> Committed | ConditionFailed:
        base = await self._ready()
        checked = [_raw(condition, base) for condition in conditions]
        if self._record:
            checked.append(ValueIs(STORE_GENERATION, self._record))
        outcome = await self._inner.commit(operations, checked)
        if isinstance(outcome, ConditionFailed) and self._record:
            await self._unmoved(base)  # otherwise one of the caller's conditions failed
        return type(outcome)(self._note(outcome.revision + base))

    async def grant_lease(self, ttl_s: int) -> int:
        await self.verify()
        return await self._inner.grant_lease(ttl_s)

    async def keep_alive(self, lease_id: int) -> None:
        await self._ready()
        await self._inner.keep_alive(lease_id)

    async def revoke_lease(self, lease_id: int) -> None:
        await self._ready()
        await self._inner.revoke_lease(lease_id)

    async def watch(self, prefix: str, after_revision: int) -> AsyncGenerator[WatchBatch, None]:
        await self.verify()
        base = self._base
        if after_revision > self._seen or after_revision < base:
            raise Compacted(f"revision {after_revision} is not of this store's history")
        verified = False
        async with aclosing(self._inner.watch(prefix, after_revision - base)) as batches:
            async for batch in batches:
                # A stream is one connection to one member, so once verified it stays valid unless all keys
                # are deleted.
                if not verified or any(isinstance(event, KeyRemoved) for event in batch.events):
                    await self.verify()
                    verified = True
                if self._problem:
                    raise StoreReplaced(self._problem)
                if base != self._base:
                    raise Compacted("the store was restored")
                yield WatchBatch(
                    self._note(batch.revision + base),
                    tuple(_shifted_event(event, base) for event in batch.events) if base else batch.events,
                )

    # --- inside ---------------------------------------------------------------------------------

    async def _ready(self) -> int:
        """Return the current base of revisions."""
        if self._problem or not self._record:
            await self.verify()
        return self._base

    async def _unmoved(self, base: int) -> None:
        """Check that the last read was of the original store and base. Raises StoreReplaced,
        StoreUnavailable."""
        await self.verify()
        if base != self._base:
            raise StoreUnavailable("the store was restored: retry the request", retry_after_s=1.0)

    def _rightful(self, value: bytes) -> StoreGeneration | None:
        """Return the record; None if neither this process nor the store has a generation.

        Raises StoreReplaced.
        """
        if not value:
            if not self._generation:
                return None
            raise self._refusal("has no generation record: it is empty or another one")
        try:
            record = load(value, StoreGeneration)
        except IntegrityError as error:
            raise self._refusal("has a generation record that cannot be read") from error
        if self._generation and record.generation != self._generation:
            raise self._refusal(f"is {record.generation[:64]}")
        return record

    def _refusal(self, what: str) -> StoreReplaced:
        problem = f"the store {what}, and this process belongs to {self._generation}; {_NEXT}"
        if not self._problem:
            log.error("store.replaced", problem=problem)
        self._problem = problem
        return StoreReplaced(problem, generation=self._generation)

    async def _raise_base(self, value: bytes, record: StoreGeneration, seen: int) -> None:
        """Raise the base above every revision seen, unless another process changed the record first."""
        raised = replace(record, base_revision=seen + _SLACK)
        fence = ValueIs(STORE_GENERATION, value)
        if isinstance(await self._inner.commit([Put(STORE_GENERATION, dump(raised))], [fence]), Committed):
            self.restores += 1
            log.warning("store.restored", generation=record.generation, base=raised.base_revision)

    def _note(self, revision: int) -> int:
        self._seen = max(self._seen, revision)
        return revision

    async def _remember(self, generation: str) -> None:
        self._generation = generation
        log.info("store.identified", generation=generation)
        if self._file is not None:
            try:
                await asyncio.to_thread(_write, self._file, generation)
            except OSError as error:
                log.warning("store.not_remembered", path=str(self._file), error=repr(error))


def _raw(condition: Condition, base: int) -> Condition:
    """Return the condition in the store's own revisions. A revision from before a restore never matches."""
    if isinstance(condition, ValueIs) or not condition.revision or not base:
        return condition
    return replace(condition, revision=condition.revision - base if condition.revision > base else -1)


def _shifted(entry: Entry, base: int) -> Entry:
    if not base:
        return entry
    return replace(
        entry, create_revision=entry.create_revision + base, mod_revision=entry.mod_revision + base
    )


def _shifted_event(event: KeyChanged | KeyRemoved, base: int) -> KeyChanged | KeyRemoved:
    if isinstance(event, KeyChanged):
        return KeyChanged(_shifted(event.entry, base))
    return KeyRemoved(event.key, event.mod_revision + base)


def _read(path: Path | None) -> str:
    """Return the generation that an earlier process remembered; empty if there is none."""
    if path is None:
        return ""
    try:
        with path.open("rb") as stream:
            return stream.read(_MAX_FILE_BYTES).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        log.warning("store.not_remembered", path=str(path), error=repr(error))
        return ""


def _write(path: Path, generation: str) -> None:
    staged = path.with_suffix(".part")
    with staged.open("w", encoding="ascii") as stream:
        stream.write(generation + "\n")
        stream.flush()
        os.fsync(stream.fileno())  # A power failure without fsync could leave an empty file.
    staged.replace(path)
