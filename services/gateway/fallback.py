"""A gateway's own placements while no leader is observed, on the last fleet snapshot from a leader.

It takes the one with more room of two workers drawn at random (Mitzenmacher, The Power of Two Choices in
Randomized Load Balancing, 2001): every gateway has the same old snapshot, and would otherwise choose the same
best worker. Room is the snapshot's figure, less what was placed since. Other sequences end meanwhile without
a report: where no worker has room by that count, one is *guessed* among those that may have room by now.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from services.core.fleet import PoolMember
from services.core.generation import FallbackGrant, NotAdmittedReason, PlaceSpec


@dataclass(frozen=True, slots=True)
class Need:
    """``reserved_tokens``: prompt and predicted output; ``worst_case_tokens``: prompt and maximum output."""

    reserved_tokens: int
    worst_case_tokens: int
    excluded_workers: Collection[str] = ()
    node_group: str = ""


@dataclass(frozen=True, slots=True)
class Placed:
    """This gateway's placements on a worker since the snapshot, and the unfinished part of them."""

    kv_blocks: int = 0
    sequences: int = 0


NOTHING: Final = Placed()


def blocks_of(need: Need, member: PoolMember) -> int:
    """Return how many of the member's blocks the sequence reserves."""
    return -(-need.reserved_tokens // max(1, member.block_size))


def room_tokens(member: PoolMember, placed: Placed) -> int:
    """Return the member's estimated room in tokens; below zero after a guess."""
    return member.kv_tokens_room - placed.kv_blocks * member.block_size


def may_take(need: Need, member: PoolMember, placed: Placed) -> bool:
    """Whether the worker has room if everything has ended there except placements since the snapshot."""
    if member.worker_id in need.excluded_workers or member.node_group != need.node_group:
        return False
    if member.max_model_len and need.worst_case_tokens > member.max_model_len:
        return False
    free_tokens = member.kv_tokens_total - placed.kv_blocks * member.block_size
    return blocks_of(need, member) * member.block_size <= free_tokens


def takes(need: Need, member: PoolMember, placed: Placed) -> bool:
    """Whether the worker has room by the snapshot, less the placements since."""
    if member.slots - placed.sequences <= 0 or not may_take(need, member, placed):
        return False
    return blocks_of(need, member) * member.block_size <= room_tokens(member, placed)


def choose_by_snapshot(
    need: Need,
    members: Iterable[PoolMember],
    placed: Mapping[str, Placed],
    rng: Random,
    *,
    closed: Callable[[str], bool] = lambda _: False,
    check: Callable[[Need, PoolMember, Placed], bool] = takes,
) -> PoolMember | None:
    """Return the worker, None when none has room. ``closed`` returns whether a worker is excluded for now;
    ``check=may_take`` makes the choice a guess.

    The same arguments and the same state of ``rng`` give the same answer.
    """
    found = [
        member
        for member in members
        if not closed(member.worker_id) and check(need, member, placed.get(member.worker_id, NOTHING))
    ]
    if not found:
        return None
    drawn = rng.sample(found, min(2, len(found)))
    return max(drawn, key=lambda member: room_tokens(member, placed.get(member.worker_id, NOTHING)))


CLOSED_S: Final = 0.5  # how long a worker is excluded after a refusal
GUESS_S: Final = 0.1  # interval of guesses of room on one worker
# After so many consecutive refusals for lack of permission, the next try waits for a pause that doubles.
# Causes: the workers observe a leader that this gateway does not, or observed one since its snapshot, or
# their credit is spent.
MAX_DENIED: Final = 4
_DENIALS: Final = frozenset({NotAdmittedReason.NO_FALLBACK, NotAdmittedReason.STALE_EPOCH})
_FIRST_PAUSE_S: Final = 1.0
_FIRST_GUESS_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 8.0


@dataclass(frozen=True, slots=True)
class FallbackSettings:
    """``after_s`` is the time without a leader; the workers have the same setting. A snapshot older than
    ``max_age_s`` is not used. ``predicted_output_tokens`` is what the scheduler reserves.
    """

    after_s: float = 1.5
    max_age_s: float = 120.0
    predicted_output_tokens: int = 256


@dataclass(slots=True)
class _Guesses:
    """The guesses of one version: consecutive refusals, and until when guessing pauses."""

    refused: int = 0
    paused_until_s: float = -math.inf

    def refuse(self, now_s: float) -> None:
        """Count a refusal for lack of room. Simultaneous refusals count as one."""
        if now_s < self.paused_until_s:
            return
        self.paused_until_s = now_s + min(_MAX_PAUSE_S, _FIRST_GUESS_PAUSE_S * 2.0 ** min(self.refused, 16))
        self.refused += 1


class GatewayFallback:
    """Implements ``ports.placement.FallbackPlacer``. Bounded by the snapshot and the running requests.

    The worker decides: it may reject a placement from here, which then waits for another try.
    """

    def __init__(self, rng: Random, settings: FallbackSettings | None = None) -> None:
        self._rng = rng
        self._settings = settings if settings is not None else FallbackSettings()
        self._leader_answered_s = -math.inf
        self._snapshot_s = -math.inf
        self._epoch = 0
        # Members with their latest room, by version and worker.
        self._members: dict[str, dict[str, PoolMember]] = {}
        self._guesses: dict[str, _Guesses] = {}  # guesses of each version
        self._guessed_s: dict[tuple[str, str], float] = {}  # time of the last guess by version and worker
        self._grants: Counter[FallbackGrant] = Counter()  # unfinished grants since the snapshot
        self._placed: dict[str, dict[str, Placed]] = {}  # placements by version and worker
        self._closed_until_s: dict[str, float] = {}
        self._denied = 0  # consecutive denials; simultaneous ones count as one
        self._denied_s = -math.inf
        self._paused_until_s = -math.inf

    def leader_answered(self, now_s: float) -> None:
        """See ``ports.placement.FallbackPlacer.leader_answered``."""
        self._leader_answered_s = now_s

    def replace_snapshot(self, epoch: int, members: Sequence[PoolMember], now_s: float) -> None:
        """See ``FallbackPlacer.replace_snapshot``. The snapshot includes earlier placements."""
        self._epoch, self._snapshot_s = epoch, now_s
        self._members = {}
        for member in members:
            self._members.setdefault(member.digest, {})[member.worker_id] = member
        self._guesses.clear()
        self._guessed_s.clear()
        self._grants.clear()
        self._placed.clear()
        self._closed_until_s.clear()
        self._allow()

    def wait_s(self, now_s: float) -> float:
        """See ``ports.placement.FallbackPlacer.wait_s``; infinite without a recent enough snapshot."""
        due_s = max(now_s, self._leader_answered_s + self._settings.after_s, self._paused_until_s)
        if not self._members or due_s - self._snapshot_s > self._settings.max_age_s:
            return math.inf
        return due_s - now_s

    def place(self, spec: PlaceSpec, now_s: float) -> FallbackGrant | None:
        """See ``ports.placement.FallbackPlacer.place``."""
        if self.wait_s(now_s) > 0:
            return None
        digest = spec.version_digest
        predicted = min(spec.max_output_tokens, max(1, self._settings.predicted_output_tokens))
        need = Need(
            reserved_tokens=spec.prompt_tokens + predicted,
            worst_case_tokens=spec.prompt_tokens + spec.max_output_tokens,
            excluded_workers=spec.excluded_workers,
            node_group=spec.node_group,
        )
        if digest not in self._members:
            return None
        chosen = self._choose(need, digest, now_s) or self._guess(need, digest, now_s)
        return None if chosen is None else self._grant(chosen, blocks_of(need, chosen))

    def ended(self, grant: FallbackGrant, refusal: NotAdmittedReason | None, now_s: float) -> None:
        """See ``ports.placement.FallbackPlacer.ended``."""
        if refusal is None:
            self._allow()  # it ran, and released its blocks
        else:
            self._closed_until_s[grant.worker_id] = now_s + CLOSED_S
            if refusal in _DENIALS:
                self._deny(now_s)
        if self._grants[grant] > 0:
            self._grants[grant] -= 1
            self._count(grant, -1)
            self._update_room(grant, refusal, now_s)
        if not self._grants[grant]:
            del self._grants[grant]

    def _update_room(self, grant: FallbackGrant, refusal: NotAdmittedReason | None, now_s: float) -> None:
        """An ended sequence released its blocks; a worker that refuses has less room than requested."""
        digest, worker_id = grant.version_digest, grant.worker_id
        member = self._members[digest][worker_id]
        placed = self._placed[digest].get(worker_id, NOTHING)
        free_tokens = room_tokens(member, placed)
        if refusal is None:
            self._guesses.pop(digest, None)
            free_tokens = max(free_tokens, grant.kv_blocks * member.block_size)
        elif refusal is NotAdmittedReason.NO_ROOM:
            self._guesses.setdefault(digest, _Guesses()).refuse(now_s)
            free_tokens = min(free_tokens, (grant.kv_blocks - 1) * member.block_size)
        self._members[digest][worker_id] = replace(
            member,
            kv_tokens_room=free_tokens + placed.kv_blocks * member.block_size,
            slots=max(member.slots, placed.sequences + (refusal is None)),
        )

    def _choose(self, need: Need, digest: str, now_s: float) -> PoolMember | None:
        return choose_by_snapshot(
            need,
            self._members[digest].values(),
            self._placed.get(digest, {}),
            self._rng,
            closed=lambda worker_id: self._closed_until_s.get(worker_id, -math.inf) > now_s,
        )

    def _guess(self, need: Need, digest: str, now_s: float) -> PoolMember | None:
        """Return a worker that may have room, by the snapshot or by its reports since its last refusal."""
        if now_s < self._guesses.setdefault(digest, _Guesses()).paused_until_s:
            return None
        chosen = choose_by_snapshot(
            need,
            self._members[digest].values(),
            self._placed.get(digest, {}),
            self._rng,
            closed=lambda worker_id: self._guess_from_s(digest, worker_id) > now_s,
            check=may_take,
        )
        if chosen is not None:
            self._guessed_s[digest, chosen.worker_id] = now_s
        return chosen

    def _guess_from_s(self, digest: str, worker_id: str) -> float:
        guessed_s = self._guessed_s.get((digest, worker_id), -math.inf)
        return max(self._closed_until_s.get(worker_id, -math.inf), guessed_s + GUESS_S)

    def _allow(self) -> None:
        self._denied, self._denied_s, self._paused_until_s = 0, -math.inf, -math.inf

    def _deny(self, now_s: float) -> None:
        if now_s < self._denied_s + CLOSED_S:
            return
        self._denied, self._denied_s = self._denied + 1, now_s
        if self._denied >= MAX_DENIED:
            pause_s = _FIRST_PAUSE_S * 2.0 ** min(self._denied - MAX_DENIED, 16)
            self._paused_until_s = now_s + min(_MAX_PAUSE_S, pause_s)

    def _grant(self, chosen: PoolMember, kv_blocks: int) -> FallbackGrant:
        grant = FallbackGrant(
            worker_id=chosen.worker_id,
            address=chosen.address,
            incarnation=chosen.incarnation,
            last_epoch=self._epoch,
            kv_blocks=kv_blocks,
            version_digest=chosen.digest,
        )
        self._grants[grant] += 1
        self._count(grant, 1)
        return grant

    def _count(self, grant: FallbackGrant, sign: int) -> None:
        workers = self._placed.setdefault(grant.version_digest, {})
        had = workers.get(grant.worker_id, Placed())
        workers[grant.worker_id] = Placed(had.kv_blocks + sign * grant.kv_blocks, had.sequences + sign)
