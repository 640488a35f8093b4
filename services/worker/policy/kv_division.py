"""How the arms of a split that have different weights divide KV memory on one worker: by their traffic. Pure.

Together they have what one version may have, never twice that. Each keeps at least its minimum, and one that
retires the pool that it has. Arms whose computation is the same share one pool and are one claim here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.worker.agent.memory_ledger import SLAB_BYTES
from services.worker.policy.memory_shares import MemoryShare


def divided(targets: Mapping[str, int], shares: Sequence[MemoryShare]) -> dict[str, int]:
    """Return the targets (``kv_targets``) with those of each split divided. No sum of targets grows."""
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
    found = _filled(total, arms, least)
    moves = {arm.owner: found[arm.owner] - arm.kv_bytes for arm in arms if not arm.waits}
    if len(moves) == len(arms) and all(abs(change) < SLAB_BYTES for change in moves.values()):
        return {arm.owner: arm.kv_bytes for arm in arms}  # what rounding moves is left where it is
    if any(arm.held_bytes > found[arm.owner] for arm in arms):  # No arm grows before others have shrunk.
        return {arm.owner: min(found[arm.owner], arm.kv_bytes or found[arm.owner]) for arm in arms}
    return found


def _least(arm: MemoryShare, target: int) -> int:
    return min(target, arm.kv_bytes or target) if arm.retires else min(target, arm.least_bytes)


def _filled(total: int, arms: Sequence[MemoryShare], least: Mapping[str, int]) -> dict[str, int]:
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
