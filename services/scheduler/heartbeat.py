"""Heartbeat: the worker list that gateways use for fallback placement while no leader answers.

It is sent once a second, or less often when gateways and pools are so many that it would take most of the
leader's time. Each gateway gets a random sample, so that gateways in fallback do not all place on the same
workers. Workers with room come first. Workers without room are included too: their sequences end while there
is no leader, and a gateway can place only on workers in its list.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from random import Random
from typing import Final, NamedTuple

from services.core.fleet import PoolMember
from services.ports.clock import Clock
from services.scheduler.fleet.view import FleetView
from services.scheduler.overload.pool_load import Overload
from services.scheduler.term_streams import GatewaySession

_MEMBERS_S: Final = 0.25  # age up to which a read of the fleet is used again
PER_POOL: Final = 64
MAX_MEMBERS: Final = 1024  # most members of one frame, over all pools
MAX_LISTED: Final = 8192  # most members of one heartbeat, over all gateways: about 25 ms of the leader's core


class Members(NamedTuple):
    """The serving workers of a version: with room, and without room now."""

    roomy: list[PoolMember]
    full: list[PoolMember]


Fleet = Mapping[str, Members]


class LeaderHeartbeat:
    """Sends the worker list and the pressures of the pools to the gateways."""

    def __init__(
        self, fleet: FleetView, overload: Overload, clock: Clock, rng: Random, period_s: float
    ) -> None:
        self._fleet = fleet
        self._overload = overload
        self._clock = clock
        self._rng = rng
        self._period_s = period_s
        self._members: Fleet = {}
        self._members_until_s = -math.inf
        self.due_s = clock.monotonic_s() + period_s  # time of the next ``send``

    def greet(self, session: GatewaySession) -> None:
        """Send the worker list to a new session. Before the first worker reports, no list is sent."""
        if members := sample_of(self._members_now(), self._rng):
            session.members, session.listed_s = members, self._clock.monotonic_s()
            session.wake()

    def send(self, sessions: Collection[GatewaySession], now_s: float) -> None:
        """Send every gateway the pressures, and the worker list to the gateways with the oldest lists: to
        all, unless they are many."""
        self.due_s = now_s + self._period_s
        pressures = self._overload.pressures()
        fleet = self._members_now() if sessions else {}
        left = MAX_LISTED
        for session in sorted(sessions, key=lambda found: found.listed_s):
            session.pressures = pressures
            if left > 0 and (members := sample_of(fleet, self._rng)):
                session.members, session.listed_s = members, now_s
                left -= len(members)
            session.wake()

    def _members_now(self) -> Fleet:
        """Return the workers for fallback placement, cached for a short time: many gateways connect to a new
        leader at once, and reading the whole fleet for each would delay it."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._members_until_s:
            self._members, self._members_until_s = members_of(self._fleet), now_s + _MEMBERS_S
        return self._members


def members_of(fleet: FleetView) -> Fleet:
    """Return the serving workers by version."""
    found: dict[str, Members] = {}
    for digest in fleet.versions[:MAX_MEMBERS]:
        for candidate in fleet.candidates(digest).values():
            if not candidate.serving:
                continue
            members = found.setdefault(digest, Members([], []))
            row_slots = fleet.pool_of(candidate.worker_id, digest).row_slots
            has_room = row_slots > 0 or (candidate.kv_tokens_room > 0 and candidate.slots > 0)
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
                    row_slots=row_slots,
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
