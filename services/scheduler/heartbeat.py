"""Heartbeat: the worker list that gateways use for fallback placement while no leader answers.

It is sent once a second, or less often when gateways and pools are so many that it would take most of the
leader's time. Each gateway gets a random sample, so that gateways in fallback do not all place on the same
workers. Workers with room come first. Workers without room are included too: their sequences end while there
is no leader, and a gateway can place only on workers in its list.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Final, NamedTuple

from services.core.fleet import PoolMember
from services.scheduler.fleet.view import FleetView

PER_POOL: Final = 64
MAX_MEMBERS: Final = 1024  # in one frame, over all pools
MAX_LISTED: Final = 8192  # in one heartbeat, over all gateways: about 25 ms of the leader's core


class Members(NamedTuple):
    """The serving workers of a version: with room, and without room now."""

    roomy: list[PoolMember]
    full: list[PoolMember]


Fleet = Mapping[str, Members]


def members_of(fleet: FleetView) -> Fleet:
    """Return the serving workers by version."""
    found: dict[str, Members] = {}
    for digest in fleet.versions[:MAX_MEMBERS]:
        for candidate in fleet.candidates(digest).values():
            if not candidate.serving:
                continue
            members = found.setdefault(digest, Members([], []))
            has_room = candidate.kv_tokens_room > 0 and candidate.slots > 0
            address, incarnation = fleet.life_of(candidate.worker_id)
            (members.roomy if has_room else members.full).append(
                PoolMember(
                    worker_id=candidate.worker_id,
                    address=address,
                    incarnation=incarnation,
                    digest=digest,
                    kv_tokens_room=max(0, candidate.kv_tokens_room),
                    kv_tokens_total=candidate.kv_tokens_total,
                    block_size=candidate.block_size,
                    slots=max(0, candidate.slots),
                    max_model_len=candidate.max_model_len,
                )
            )
    return found


def sample_of(fleet: Fleet, rng: Random, *, per_pool: int = PER_POOL) -> tuple[PoolMember, ...]:
    """Return a sample of at most ``per_pool`` of each version, and ``MAX_MEMBERS`` in all."""
    per_pool = max(1, min(per_pool, MAX_MEMBERS // max(1, len(fleet))))
    found: list[PoolMember] = []
    for members in fleet.values():
        roomy = _some(members.roomy, per_pool, rng)
        found += roomy
        found += _some(members.full, per_pool - len(roomy), rng)
    return tuple(found)


def _some(members: list[PoolMember], most: int, rng: Random) -> list[PoolMember]:
    return rng.sample(members, most) if len(members) > most else members
