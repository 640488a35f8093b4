"""A gateway's own placement of a sequence while no scheduler leads. Pure: no clock, no I/O.

It takes the one with more room of two workers drawn at random (Mitzenmacher, The Power of Two Choices in
Randomized Load Balancing, 2001): every gateway has the same old snapshot, and would otherwise choose the same
best worker. Room is the snapshot's figure, less what was placed since. Other sequences end meanwhile without
a report: where no worker has room by that count, one is *guessed* among those that may have room by now.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

from services.core.fleet import PoolMember


@dataclass(frozen=True, slots=True)
class Need:
    """``reserved_tokens``: prompt and predicted output; ``worst_case_tokens``: prompt and maximum output."""

    reserved_tokens: int
    worst_case_tokens: int
    excluded_workers: Collection[str] = ()


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
    if member.worker_id in need.excluded_workers:
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
