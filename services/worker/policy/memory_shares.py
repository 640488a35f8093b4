"""How the versions of a device share its KV memory. Pure.

A waiting version makes versions of its own and of lower priority shrink until it has its fair share, but
never below their minimum. Pools shrink for no other reason: while none waits, they only grow into free
memory. So memory does not oscillate between versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from services.worker.memory_ledger import SLAB_BYTES


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """The claim of one engine on the device's memory."""

    owner: str  # the version in whose name it is granted
    rank: int  # the highest priority of its deployments
    # Weights and working memory.
    fixed_bytes: int
    # The pool stays between these two.
    least_bytes: int
    wished_bytes: int
    # Its pool, present or requested; 0: it waits for all of its memory.
    kv_bytes: int = 0
    # Granted now: more than the pool while it shrinks.
    held_bytes: int = 0
    # The deployment whose arms divide KV among themselves (``kv_division``).
    split: str = ""
    # Its part of their traffic.
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


def divided(targets: Mapping[str, int], shares: Sequence[MemoryShare]) -> dict[str, int]:
    """Return the targets (``kv_targets``) with those of each split divided by the traffic of its arms.

    Together arms have what one version may have, never twice that. Each keeps at least its minimum, and one
    that retires the pool that it has. Arms whose computation is the same share one pool and are one claim.
    """
    found = dict(targets)
    for split in sorted({share.split for share in shares if share.split}):
        arms = [share for share in shares if share.split == split and share.owner in targets]
        if len(arms) > 1 and any(arm.traffic for arm in arms):
            found |= _by_traffic(arms, targets)
    return found


def _by_traffic(arms: Sequence[MemoryShare], targets: Mapping[str, int]) -> dict[str, int]:
    total = min(sum(targets[arm.owner] for arm in arms), max(arm.wished_bytes for arm in arms))
    least = {arm.owner: _least(arm, targets[arm.owner]) for arm in arms}
    if total < sum(least.values()):
        return {arm.owner: min(targets[arm.owner], arm.kv_bytes or least[arm.owner]) for arm in arms}
    found = _divided_by_traffic(total, arms, least)
    moves = {arm.owner: found[arm.owner] - arm.kv_bytes for arm in arms if not arm.waits}
    if len(moves) == len(arms) and all(abs(change) < SLAB_BYTES for change in moves.values()):
        return {arm.owner: arm.kv_bytes for arm in arms}  # what rounding moves is left where it is
    if any(arm.held_bytes > found[arm.owner] for arm in arms):  # No arm grows before others have shrunk.
        return {arm.owner: min(found[arm.owner], arm.kv_bytes or found[arm.owner]) for arm in arms}
    return found


def _least(arm: MemoryShare, target: int) -> int:
    return min(target, arm.kv_bytes or target) if arm.retires else min(target, arm.least_bytes)


def _divided_by_traffic(total: int, arms: Sequence[MemoryShare], least: Mapping[str, int]) -> dict[str, int]:
    """Return each arm's part of the total, by traffic and at least its minimum, in whole slabs beyond that.

    What rounding leaves goes to the arm with the most traffic.
    """
    found = dict(least)
    order = sorted(arms, key=lambda arm: (-arm.traffic, arm.owner))
    sharing = order
    while sharing:
        left = total - sum(found[arm.owner] for arm in order if arm not in sharing)
        traffic = sum(arm.traffic for arm in sharing)
        part = {arm.owner: left * arm.traffic // max(1, traffic) for arm in sharing}
        short = [arm for arm in sharing if part[arm.owner] <= least[arm.owner]]
        if not short:
            for arm in sharing:
                found[arm.owner] = max(least[arm.owner], part[arm.owner] // SLAB_BYTES * SLAB_BYTES)
            break
        sharing = [arm for arm in sharing if arm not in short]
    most = order[0]
    found[most.owner] = min(most.wished_bytes, found[most.owner] + total - sum(found.values()))
    return found
