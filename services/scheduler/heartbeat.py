"""Whom gateways are told of once a second, to place by themselves on while they hear no leader. Less often
when there are so many gateways and pools that the leader would do little else.

Each is told of others, at random: gateways that place alone at the same time do not crowd the same workers.
Those with room come first, and those without are told of too: when the leader is gone what runs there ends,
and a gateway that does not know them could not ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Final, NamedTuple

from services.core.fleet import PoolMember
from services.scheduler.fleet.view import FleetView

PER_POOL: Final = 64
MAX_MEMBERS: Final = 1024  # in one frame, over all pools
MAX_TOLD: Final = 8192  # in one beat, over all gateways: about 25 ms of the leader's core


class Members(NamedTuple):
    """The workers of a version that take requests: with room, and without for now."""

    roomy: list[PoolMember]
    full: list[PoolMember]


Fleet = Mapping[str, Members]


def members_of(fleet: FleetView) -> Fleet:
    """Return, by version, the workers that take requests."""
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
    """Return at most ``per_pool`` of each version, and ``MAX_MEMBERS`` in all."""
    per_pool = max(1, min(per_pool, MAX_MEMBERS // max(1, len(fleet))))
    found: list[PoolMember] = []
    for members in fleet.values():
        roomy = _some(members.roomy, per_pool, rng)
        found += roomy
        found += _some(members.full, per_pool - len(roomy), rng)
    return tuple(found)


def _some(members: list[PoolMember], most: int, rng: Random) -> list[PoolMember]:
    return rng.sample(members, most) if len(members) > most else members
