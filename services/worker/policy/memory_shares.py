"""How the versions of a device share its KV memory. Pure.

A version that waits for memory makes those of its own and of lower priorities shrink, so far that it has its
fair share, and none below its least. Nobody shrinks for another reason: while nobody waits the others only
grow, into what is free. So no memory goes to and fro.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.worker.agent.memory_ledger import SLAB_BYTES


@dataclass(frozen=True, slots=True)
class Share:
    """One version. ``fixed_bytes`` are its weights and working memory, ``least_bytes`` of KV it never goes
    below, ``wished_bytes`` it never goes above; ``kv_bytes`` it has, 0: it waits for all of its memory.
    """

    owner: str
    rank: int
    fixed_bytes: int
    least_bytes: int
    wished_bytes: int
    kv_bytes: int = 0

    @property
    def waits(self) -> bool:
        return self.kv_bytes == 0


def kv_targets(total_bytes: int, shares: Sequence[Share]) -> dict[str, int]:
    """Return the KV that each is to have, by owner; one that waits and cannot be helped has no entry.

    The sum of fixed parts and targets is at most ``total_bytes`` where that of the present ones is. Within a
    rank KV is shared max-min fair (water-filling from the least), in whole slabs but for leasts and wishes.
    """
    running = [share for share in shares if not share.waits]
    coming = _helped(total_bytes, shares)
    if coming:
        highest = max(share.rank for share in coming)
        # Who is above all that wait keeps what it has.
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
        # What somebody waits for is not what others grow by.
        targets |= {share.owner: min(targets[share.owner], share.kv_bytes) for share in running}
    return targets


def _helped(total_bytes: int, shares: Sequence[Share]) -> list[Share]:
    """Return those that wait and can have their least, the highest priority first."""
    coming: list[Share] = []
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


def _bounded(share: Share) -> Share:
    """Return it with a least that is not above what it has, or wishes."""
    return replace(share, least_bytes=min(share.least_bytes, share.kv_bytes or share.wished_bytes))


def _filled(room: int, shares: Sequence[Share]) -> list[tuple[Share, int]]:
    """Return what each has when ``room`` is poured on their leasts, up to a common level of whole slabs."""

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
