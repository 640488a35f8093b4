"""Gives the entries of the audit log their order, and writes the log's tiles and checkpoints.

Three steps, each of which may be repeated by whoever leads:

1. One transaction moves waiting entries into the head's batch, in the order of their revisions.
2. The tiles that follow from head and batch are created. A tile that exists has the same bytes, since every
   leader writes them from the same head.
3. One transaction advances the head over the batch, with the signed checkpoint. Only then is the checkpoint
   published: it never states what another leader could write differently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from fairway.formats.tlog import (
    CHECKPOINT,
    Frontier,
    LogDamaged,
    TreeHead,
    checkpoint_of,
    open_tiles,
    signed,
    stated,
    verifier_of,
)
from services.adapters.synced_files import append_bytes, on_disk
from services.adapters.threads import in_thread
from services.controlplane.leading import repeat_while_leading
from services.core.audit import HEAD, PLATFORM, Actor, AuditEntry, AuditHead
from services.core.errors import Conflict, FairwayError, NotFound
from services.core.records import dump
from services.ports.clock import Clock
from services.ports.store import (
    Committed,
    Condition,
    Delete,
    ModRevisionIs,
    Operation,
    Put,
    Store,
)
from services.ports.usage import TileStore
from services.runtime.config import ConfigError, read_secrets
from services.runtime.fleet_state.informer import RecordView, Versioned
from services.runtime.fleet_state.leadership import Leadership

log = structlog.get_logger()

EACH_S: Final = 1.0
BATCH: Final = 100  # a commit has at most 128 operations
_KEY: Final = re.compile(r"[0-9a-f]{64}")
_ADDED: Final = "AuditLog/AddKey"


def read_signing_keys(path: Path) -> tuple[bytes, ...]:
    """Return the Ed25519 keys of a file, 64 hex digits on each line. Raises ConfigError."""
    lines = read_secrets(path)
    if not all(map(_KEY.fullmatch, lines)):
        raise ConfigError(f"a signing key in {path} is not 64 hex digits: `openssl rand -hex 32` makes one")
    return tuple(map(bytes.fromhex, lines))


class AuditSequencer:
    """Runs in every control plane; acts only while it leads. ``run`` is the only writer of its state."""

    def __init__(
        self,
        store: Store,
        tiles: TileStore,
        pending: RecordView[AuditEntry],
        leadership: Leadership,
        clock: Clock,
        *,
        key_file: Path,
        checkpoint_file: Path | None,
        new_id: Callable[[], str],
    ) -> None:
        """``pending``: the entries under ``PENDING``. Checkpoints are appended to ``checkpoint_file``."""
        self._store = store
        self._tiles = tiles
        self._pending = pending
        self._leadership = leadership
        self._clock = clock
        self._key_file = key_file
        self._checkpoint_file = checkpoint_file
        self._new_id = new_id
        self._epoch = 0  # the term in which the head was read
        self._head = AuditHead("")
        self._revision = 0  # mod revision of the head
        self._frontier = Frontier()
        self._published = ""
        self._taken: set[str] = set()  # keys of the last batch
        self._replaced: list[str] = []  # partial tiles of level 0 and bundles that the full ones replace
        self._problem = ""

    def problem(self) -> str:
        """Return why this control plane, which leads, does not write the log; empty while it does."""
        return self._problem if self._leadership.epoch is not None else ""

    async def run(self) -> None:
        """Write the log while leading, until cancelled; survives an outage of the stores."""
        await repeat_while_leading(
            self._leadership, self._clock, self.step, each_s=EACH_S, failed="audit.store_lost"
        )

    async def step(self, epoch: int) -> None:
        """Bring what waits into the log. A failure is the ``problem``; the next step repeats the rest."""
        try:
            await self._step(epoch)
            self._problem = ""
        except (ConfigError, LogDamaged, FairwayError) as error:
            self._epoch = 0  # what is in memory may be ahead of the stores
            problem = f"entries of the audit log wait, because it cannot be written: {error}"
            if problem != self._problem:
                log.error("audit.not_written", error=str(error))
            self._problem = problem

    async def _step(self, epoch: int) -> None:
        if self._epoch != epoch:
            await self._load(epoch)
        while (waiting := self._waiting()) or self._head.batch:
            seeds = await in_thread(self._seeds)
            if not self._head.batch:
                await self._fix(epoch, waiting[:BATCH], seeds)
            await self._write_batch(epoch, seeds)
            await self._publish(epoch)
        await self._publish(epoch)

    def _seeds(self) -> tuple[bytes, ...]:
        return read_signing_keys(self._key_file)

    def _waiting(self) -> list[tuple[str, Versioned[AuditEntry]]]:
        """Return the entries without a place, in the order in which they get one."""
        view = self._pending.view
        self._taken &= view.keys()  # the view may still have the entries of the last batch
        if len(view) == len(self._taken):
            return []
        found = [each for each in view.items() if each[0] not in self._taken]
        return sorted(found, key=lambda each: (each[1].mod_revision, each[0]))

    async def _load(self, epoch: int) -> None:
        """Read the head, and the tiles at the edge of the log. Raises LogDamaged, ConfigError, NotFound."""
        seeds = await in_thread(self._seeds)
        entry = await self._store.get(HEAD)
        head = AuditHead(f"fairway.audit/{self._new_id()}") if entry is None else entry.load(AuditHead)
        self._revision = 0 if entry is None else entry.mod_revision
        head = await self._adopted(head, seeds)
        tiles = {level: await self._tiles.read(name) for level, name in open_tiles(head.size).items()}
        frontier = Frontier(head.size, tiles)
        if head.size and frontier.root().hex() != head.root:
            raise LogDamaged(f"the tiles at its end do not have the hash of its {head.size} entries")
        self._head, self._frontier, self._published = head, frontier, ""
        self._taken, self._replaced = set(), []
        self._epoch = epoch

    async def _adopted(self, head: AuditHead, seeds: Sequence[bytes]) -> AuditHead:
        """Return the head, or the published checkpoint if it is ahead, as after a restore of etcd."""
        try:
            note = (await self._tiles.read(CHECKPOINT)).decode("utf-8", "replace")
        except NotFound:
            return head
        found = stated(note)
        if found.size <= head.size:
            return head
        own = (verifier_of(seed, found.origin) for seed in seeds)
        checkpoint_of(note, verifiers := (*head.verifiers, *own))
        log.warning("audit.head_adopted", size=found.size, stored=head.size)
        return AuditHead(found.origin, found.size, found.root.hex(), note, verifiers)

    async def _fix(
        self, epoch: int, taken: Sequence[tuple[str, Versioned[AuditEntry]]], seeds: Sequence[bytes]
    ) -> None:
        """Move these entries into the head's batch."""
        verifiers = tuple(verifier_of(seed, self._head.origin) for seed in seeds)
        entries = [replace(one.record, revision=one.create_revision) for _, one in taken]
        entries[:0] = [self._rotation(each) for each in verifiers if each not in self._head.verifiers]
        batch = tuple(dump(entry).decode() for entry in entries)
        await self._commit(
            epoch,
            replace(self._head, batch=batch, verifiers=verifiers),
            [Delete(key) for key, _ in taken],
            [ModRevisionIs(key, one.mod_revision) for key, one in taken],
        )
        self._taken |= {key for key, _ in taken}

    def _rotation(self, verifier: str) -> AuditEntry:
        return AuditEntry(_ADDED, Actor(role=PLATFORM), verifier, self._clock.unix_s()).bounded()

    async def _write_batch(self, epoch: int, seeds: Sequence[bytes]) -> None:
        """Create the tiles of the batch, then advance the head over it."""
        before = open_tiles(self._head.size)
        full = self._frontier.extend([text.encode() for text in self._head.batch])
        partial = self._frontier.partial()
        known = set(before.values())
        for name, data in {**full, **partial}.items():
            created = name in known or await self._tiles.create(name, data)
            if not created and await self._tiles.read(name) != data:
                raise LogDamaged(f"{name} exists with other bytes")
        checkpoint = TreeHead(self._head.origin, self._frontier.size, self._frontier.root())
        await self._commit(
            epoch,
            replace(
                self._head,
                size=checkpoint.size,
                root=checkpoint.root.hex(),
                checkpoint=signed(checkpoint, seeds),
                batch=(),
            ),
        )
        self._replaced += [before[level] for level in (0, None) if level in before]
        if full:
            replaced, self._replaced = self._replaced, []
            await self._tiles.delete(replaced)

    async def _commit(
        self,
        epoch: int,
        head: AuditHead,
        operations: Sequence[Operation] = (),
        unchanged: Sequence[Condition] = (),
    ) -> None:
        """Store the head of this term. Raises Conflict when another leader changed it."""
        conditions = [
            self._leadership.fence(epoch),
            ModRevisionIs(HEAD, self._revision),
            *unchanged,
        ]
        done = await self._store.commit([Put(HEAD, dump(head)), *operations], conditions)
        if not isinstance(done, Committed):
            raise Conflict("the leader, the head of the log or an entry changed: the next step reads them")
        self._head, self._revision = head, done.revision

    async def _publish(self, epoch: int) -> None:
        """Write the head's checkpoint where readers find it, and outside."""
        note = self._head.checkpoint
        if note == self._published or self._leadership.epoch != epoch:
            return
        await self._tiles.replace(CHECKPOINT, note.encode())
        if self._checkpoint_file is not None:
            path = self._checkpoint_file
            await on_disk(lambda: append_bytes(path, note.encode()), store="file of checkpoints")
        self._published = note
