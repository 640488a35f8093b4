"""How the versions of a device share its KV memory. Pure.

A waiting version makes versions of its own and of lower priority shrink until it has its fair share, but
never below their minimum. Pools shrink for no other reason: while none waits, they only grow into free
memory. So memory does not oscillate between versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.worker.agent.memory_ledger import SLAB_BYTES


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """The claim of one version: its KV pool stays between ``least_bytes`` and ``wished_bytes``.

    ``fixed_bytes`` are its weights and working memory. ``kv_bytes`` is its present pool; 0: it waits for all
    of its memory.
    """

    owner: str
    rank: int
    fixed_bytes: int
    least_bytes: int
    wished_bytes: int
    # Present or requested.
    kv_bytes: int = 0
    # Granted now: more than the pool while it shrinks.
    held_bytes: int = 0
    # The deployment whose arms divide KV among themselves (``kv_division``), and its part of their traffic.
    split: str = ""
    traffic: int = 0
    # It finishes the requests accepted for it, with the pool that it has.
    retires: bool = False

    @property
    def waits(self) -> bool:
        return self.kv_bytes == 0


def kv_targets(total_bytes: int, shares: Sequence[MemoryShare]) -> dict[str, int]:
    """Return the KV target of each version, by owner; a waiting one that cannot be served has no entry.

    The sum of fixed parts and targets is at most ``total_bytes`` if that of the present ones is. Within a
    rank KV is shared max-min fair (water-filling from the minimum), in whole slabs except at the bounds.
    """
    running = [share for share in shares if not share.waits]
    coming = _helped(total_bytes, shares)
    if coming:
        highest = max(share.rank for share in coming)
        # Pools of a higher rank than every waiting version keep their size.
        movable = [replace(s, least_bytes=s.kv_bytes) if s.rank > highest else s for s in running]
    else:
        movable = [replace(share, least_bytes=share.kv_bytes) for share in running]
    moving = [_bounded(share) for share in (*movable, *coming)]
    room = total_bytes - sum(share.fixed_bytes + share.least_bytes for share in moving)
    targets: dict[str, int] = {}
    for rank in sorted({share.rank for share in moving}, reverse=True):
        filled = _filled(room, [share for share in moving if share.rank == rank])
        targets |= {share.owner: kv_bytes for share, kv_bytes in filled}
        room -= sum(kv_bytes - share.least_bytes for share, kv_bytes in filled)
    if coming:
        # Pools do not grow into memory that a waiting version needs.
        targets |= {share.owner: min(targets[share.owner], share.kv_bytes) for share in running}
    return targets


def _helped(total_bytes: int, shares: Sequence[MemoryShare]) -> list[MemoryShare]:
    """Return the waiting versions that can have their minimum, the highest priority first."""
    coming: list[MemoryShare] = []
    for share in sorted(shares, key=lambda each: (-each.rank, each.owner)):
        if not share.waits:
            continue
        held = sum(
            each.fixed_bytes + (_bounded(each).least_bytes if each.rank <= share.rank else each.kv_bytes)
            for each in shares
            if not each.waits
        )
        promised = sum(each.fixed_bytes + _bounded(each).least_bytes for each in coming)
        if held + promised + share.fixed_bytes + _bounded(share).least_bytes <= total_bytes:
            coming.append(share)
    return coming


def _bounded(share: MemoryShare) -> MemoryShare:
    """Return the share with its minimum capped at its present, or else its wished, size."""
    return replace(share, least_bytes=min(share.least_bytes, share.kv_bytes or share.wished_bytes))


def _filled(room: int, shares: Sequence[MemoryShare]) -> list[tuple[MemoryShare, int]]:
    """Return the KV of each after raising all from their minimum to a common level of whole slabs."""

    def at(level: int) -> list[int]:
        return [max(each.least_bytes, min(each.wished_bytes, level * SLAB_BYTES)) for each in shares]

    low, high = 0, -(-max(each.wished_bytes for each in shares) // SLAB_BYTES)
    least = sum(each.least_bytes for each in shares)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(at(middle)) - least <= room:
            low = middle
        else:
            high = middle - 1
    return list(zip(shares, at(low), strict=True))
