"""Index of the workers of one version, so that a placement evaluates few of them.

A *seat* is one worker's pool. It is *open* while it serves, has a sequence slot and any KV room. Open seats
are in an array, from which a sample is drawn, and in a heap by room, whose top is the largest room. Serving
seats are counted by size, other seats by reason. A change of a seat costs O(log n), a choice costs the
candidates that it evaluates, and a refusal costs nothing that grows with the fleet.

``choose`` finds a worker whenever one has room for the whole query and passes the filters: when no candidate
does, it evaluates the seat with the largest room, then every open seat. A query for which every open seat was
evaluated without success is remembered until a seat improves; it and larger queries are not repeated. Finally
it evaluates some workers that have room for the part of the query that they do not share. Pure; single
writer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Final, NamedTuple

from services.scheduler.policy.placement.candidate import (
    Candidate,
    Filter,
    PlaceQuery,
    RoomSummary,
    can_ever_fit,
    fits_when_empty,
    has_kv_room,
    has_sequence_slot,
    heard,
    not_draining,
    not_ejected,
    not_excluded,
    ready,
)
from services.scheduler.policy.placement.choose import (
    Chosen,
    NoWorker,
    PlacementProfile,
    Rejections,
    choose,
)
from services.scheduler.policy.placement.shared_prefix import NOTHING_SHARED

SERVING: Final = ""
_MAX_FUTILE: Final = 4
_MAX_YIELDING: Final = 8  # evaluated for a tenant below its share, when no worker has a slot
_MAX_SHARERS: Final = 8  # evaluated for a prompt whose prefix they share, when none has room for all of it
# Filters that every open seat passes.
_OF_OPEN_SEATS: Final = (ready, heard, not_draining, not_ejected, has_sequence_slot)
# Filters that seats with room pass, when no worker is excluded.
_OF_ROOM: Final = (fits_when_empty, has_kv_room, not_excluded)


class SeatLevel(NamedTuple):
    """Indexed state of a seat."""

    # ``SERVING``, or the name of the filter that rejects the seat.
    standing: str
    room_tokens: int
    slots: int
    kv_tokens_total: int
    max_model_len: int
    number: int  # the worker's bit in masks of workers
    # Lowest class whose tenants below their share may take the slot of another tenant, where none is free; 0:
    # none.
    yields_to_rank: int = 0


@dataclass(slots=True, eq=False)
class _Seat:
    worker_id: str
    level: SeatLevel
    place: int = -1  # index in the array of open seats
    candidate: Candidate | None = None


class PoolSeats:
    """Seats of one pool. ``build`` returns the candidate of a worker at its present level; it is called once
    per level."""

    def __init__(self, build: Callable[[str, SeatLevel], Candidate]) -> None:
        self._build = build
        self._seats: dict[str, _Seat] = {}
        self._open: list[_Seat] = []
        self._by_room: list[tuple[int, str]] = []  # heap of (-room, worker), including outdated entries
        self._sizes: dict[tuple[int, int], int] = {}  # serving seats by (pool size, model length)
        # Bounds of the sizes for ``room``, while they are unchanged.
        self._bounds: tuple[int, int, int] | None = None
        self._away: dict[str, int] = {}  # the other seats by standing
        # Seats whose slots are taken, except for tenants below their share.
        self._yielding: dict[str, _Seat] = {}
        self._futile: list[tuple[PlaceQuery, NoWorker]] = []
        self._profile: PlacementProfile | None = None
        self._filters: tuple[Filter, ...] = ()
        self._filters_with_room: tuple[Filter, ...] = ()
        self.open_mask = 0

    def __len__(self) -> int:
        return len(self._seats)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._seats

    # --- changes ----------------------------------------------------------------------------------

    def put(self, worker_id: str, level: SeatLevel) -> None:
        """Set the level of a seat."""
        self._futile.clear()
        self.take(worker_id, level)

    def take(self, worker_id: str, level: SeatLevel) -> None:
        """Set the level of a seat that improves for no query."""
        seat = self._seats.get(worker_id)
        if seat is None:
            seat = self._seats[worker_id] = _Seat(worker_id, level)
            self._count(level, 1)
            before = None
        else:
            before = seat.level
            if _kind(before) != _kind(level):
                self._count(before, -1)
                self._count(level, 1)
            seat.level, seat.candidate = level, None
        if _is_open(level):
            if seat.place < 0:
                self._enter(seat)
            elif before is None or before.number != level.number:
                self._remask(before, level)
            if before is None or before.room_tokens != level.room_tokens or not _is_open(before):
                self._push(seat)
        elif seat.place >= 0:
            self._leave(seat, before)
        if _yields(level):
            self._yielding[worker_id] = seat
        else:
            self._yielding.pop(worker_id, None)

    def drop(self, worker_id: str) -> None:
        """Remove a worker that no longer has this pool."""
        seat = self._seats.pop(worker_id)
        self._yielding.pop(worker_id, None)
        self._count(seat.level, -1)
        if seat.place >= 0:
            self._leave(seat, seat.level)
        if len(self._by_room) > self._most_entries:
            self._tidy()

    def forget_candidates(self) -> None:
        """Discard all candidates because the results of ``build`` have changed."""
        self._futile.clear()
        for seat in self._seats.values():
            seat.candidate = None

    # --- queries ----------------------------------------------------------------------------------

    def candidate(self, worker_id: str) -> Candidate:
        """Return the seat as a candidate for the filters. KeyError without such a seat."""
        return self._candidate(self._seats[worker_id])

    def all(self) -> Iterator[str]:
        return iter(self._seats)

    def room(self) -> RoomSummary:
        """Return the maximum that any serving seat offers."""
        if not self._sizes:
            return RoomSummary(serving=False)
        top = self._top()
        if self._bounds is None:
            self._bounds = (
                min(total for total, _ in self._sizes),
                min(length or total for total, length in self._sizes),
                sum(total * count for (total, _), count in self._sizes.items()),
            )
        return RoomSummary(True, 0 if top is None else top.level.room_tokens, *self._bounds)

    def choose(
        self,
        query: PlaceQuery,
        profile: PlacementProfile,
        rng: Random,
        *,
        holders: Sequence[str] = (),
        cached_tokens: Callable[[Sequence[str]], Mapping[str, int]] = lambda _: {},
    ) -> Chosen | NoWorker:
        """Return a worker that passes the filters, whenever one has room for the whole query, or why there is
        none. Workers that have room only because they share its prefix are evaluated in part.

        ``holders`` are evaluated besides the sample; ``cached_tokens`` returns the cached prompt tokens of
        workers.
        """
        found = self._with_room(query, profile, rng, holders, cached_tokens)
        if isinstance(found, Chosen) or query.shared is NOTHING_SHARED:
            return found
        names = query.shared.workers(_MAX_SHARERS, rng)
        seats = [seat for name in names if (seat := self._seats.get(name)) is not None and seat.place >= 0]
        sharing = self._choose(seats, query, profile, rng, cached_tokens)
        return sharing if isinstance(sharing, Chosen) else found

    @property
    def any_yields(self) -> bool:
        return bool(self._yielding)

    def choose_yielding(
        self, query: PlaceQuery, rank: int, profile: PlacementProfile, rng: Random
    ) -> Chosen | NoWorker:
        """Return a worker without a free slot where another tenant yields one to a class of that rank."""
        some = islice(self._yielding.values(), _MAX_YIELDING * 4)
        seats = [seat for seat in some if seat.level.yields_to_rank <= rank]
        if len(seats) > _MAX_YIELDING:
            seats = rng.sample(seats, _MAX_YIELDING)
        return self._choose(seats, query, profile, rng, lambda _: {})

    def _with_room(
        self,
        query: PlaceQuery,
        profile: PlacementProfile,
        rng: Random,
        holders: Sequence[str],
        cached_tokens: Callable[[Sequence[str]], Mapping[str, int]],
    ) -> Chosen | NoWorker:
        top = self._top()
        if top is None or top.level.room_tokens < query.demand.reserved_tokens:
            return self._nobody(query, None)
        known = self._found_futile(query)
        if known is not None:  # evaluate the workers that have much of it cached
            seats = [seat for name in holders if (seat := self._seats[name]).place >= 0]
            found = self._choose(seats, query, profile, rng, cached_tokens)
            return found if isinstance(found, Chosen) else self._nobody(query, known)
        first = self._sampled(profile, rng, holders)
        found = self._choose(first, query, profile, rng, cached_tokens)
        if isinstance(found, Chosen) or len(first) >= len(self._open):
            return found if isinstance(found, Chosen) else self._nobody(query, found)
        found = self._choose([top], query, profile, rng, cached_tokens)
        if isinstance(found, Chosen):
            return found
        fits = [seat for seat in self._open if seat.level.room_tokens >= query.demand.reserved_tokens]
        found = self._choose(fits, query, profile, rng, cached_tokens)
        if isinstance(found, Chosen):
            return found
        self._futile = [(query, found), *self._futile[: _MAX_FUTILE - 1]]
        return self._nobody(query, found)

    def check_integrity(self) -> None:
        """Raise AssertionError when an index disagrees with the seats."""
        opened = {worker_id for worker_id, seat in self._seats.items() if _is_open(seat.level)}
        assert {seat.worker_id for seat in self._open} == opened
        assert all(self._open[seat.place] is seat for seat in self._open)
        assert all(seat.place < 0 for worker_id, seat in self._seats.items() if worker_id not in opened)
        assert self.open_mask == sum(1 << seat.level.number for seat in self._open)
        entries = set(self._by_room)
        assert all((-seat.level.room_tokens, seat.worker_id) in entries for seat in self._open)
        yielding = {worker_id for worker_id, seat in self._seats.items() if _yields(seat.level)}
        assert self._yielding.keys() == yielding, "who yields a slot is miscounted"
        assert len(self._by_room) <= self._most_entries, "the heap outgrows the seats"
        assert sum(self._sizes.values()) + sum(self._away.values()) == len(self._seats)
        for seat in self._seats.values():
            kind = _kind(seat.level)
            assert (self._away if isinstance(kind, str) else self._sizes)[kind] > 0  # type: ignore[index]
            if seat.candidate is not None:
                built = self._build(seat.worker_id, seat.level)
                assert seat.candidate == built, "a candidate is out of date"

    # --- choosing ---------------------------------------------------------------------------------

    def _sampled(self, profile: PlacementProfile, rng: Random, holders: Sequence[str]) -> Sequence[_Seat]:
        """Return the open holders and a sample of all open seats; all open seats when that is as many."""
        count, wanted = len(self._open), profile.sample
        if wanted is None or count <= wanted + len(holders):
            return self._open
        found = {name: seat for name in holders if (seat := self._seats[name]).place >= 0}
        wanted += len(found)
        for _ in range(2 * wanted):  # few draws repeat a seat
            seat = self._open[int(rng.random() * count)]
            found[seat.worker_id] = seat
            if len(found) >= wanted:
                break
        return list(found.values())

    def _found_futile(self, query: PlaceQuery) -> NoWorker | None:
        """Return the result of a full search for a query that needs no more than this one, None without one.
        Filters are monotonic: a worker that rejects a demand rejects a larger one, unless it has more of that
        prompt cached."""
        for known, found in self._futile:
            if (
                query.demand.reserved_tokens >= known.demand.reserved_tokens
                and query.demand.prompt_tokens >= known.demand.prompt_tokens
                and query.demand.worst_case_tokens >= known.demand.worst_case_tokens
                and query.ttft_target_s == known.ttft_target_s
                and query.over_share >= known.over_share
                and query.node_group == known.node_group
                and known.excluded_workers in ((), query.excluded_workers)
            ):
                return found
        return None

    def _choose(
        self,
        seats: Sequence[_Seat],
        query: PlaceQuery,
        profile: PlacementProfile,
        rng: Random,
        cached_tokens: Callable[[Sequence[str]], Mapping[str, int]],
    ) -> Chosen | NoWorker:
        if self._profile is not profile:
            self._profile = profile
            self._filters = tuple(check for check in profile.filters if check not in _OF_OPEN_SEATS)
            self._filters_with_room = tuple(check for check in self._filters if check not in _OF_ROOM)
        cached = cached_tokens([seat.worker_id for seat in seats])
        candidates = [seat.candidate or self._candidate(seat) for seat in seats]
        if query.excluded_workers or not _have_room(seats, query):
            filters = self._filters
        else:
            filters = self._filters_with_room
        return choose(query, candidates, profile, rng, cached_tokens=cached, filters=filters)

    def _nobody(self, query: PlaceQuery, found: NoWorker | None) -> NoWorker:
        """Return why no seat passes, judged by the sizes of the serving seats, because none of them has room
        now."""
        sizes = dict(self._sizes)
        excluded = 0
        for worker_id in dict.fromkeys(query.excluded_workers):
            seat = self._seats.get(worker_id)
            if seat is not None and seat.level.standing == SERVING:
                excluded += 1
                sizes[seat.level.kv_tokens_total, seat.level.max_model_len] -= 1
        usable = small = 0
        for (total, length), count in sizes.items():
            if can_ever_fit(query.demand, kv_tokens_total=total, max_model_len=length):
                usable += count
            else:
                small += count
        if usable:
            return NoWorker(
                Rejections() if found is None else found.rejections, never_fits=False, waits_for_room=True
            )
        counts = dict(self._away)
        counts |= {not_excluded.__name__: excluded} if excluded else {}
        counts |= {fits_when_empty.__name__: small} if small else {}
        return NoWorker(Rejections(tuple(counts.items())), never_fits=bool(small), waits_for_room=False)

    # --- inside -----------------------------------------------------------------------------------

    def _candidate(self, seat: _Seat) -> Candidate:
        if seat.candidate is None:
            seat.candidate = self._build(seat.worker_id, seat.level)
        return seat.candidate

    def _top(self) -> _Seat | None:
        """Return the open seat with the largest room."""
        heap = self._by_room
        while heap:
            seat = self._seats.get(heap[0][1])
            if seat is not None and seat.place >= 0 and seat.level.room_tokens == -heap[0][0]:
                return seat
            heapq.heappop(heap)
        return None

    def _push(self, seat: _Seat) -> None:
        if len(self._by_room) >= self._most_entries:
            self._tidy()
        else:
            heapq.heappush(self._by_room, (-seat.level.room_tokens, seat.worker_id))

    @property
    def _most_entries(self) -> int:
        return 64 + 3 * len(self._seats)

    def _tidy(self) -> None:
        """Rebuild the heap from the open seats."""
        self._by_room = [(-found.level.room_tokens, found.worker_id) for found in self._open]
        heapq.heapify(self._by_room)

    def _enter(self, seat: _Seat) -> None:
        seat.place = len(self._open)
        self._open.append(seat)
        self.open_mask |= 1 << seat.level.number

    def _leave(self, seat: _Seat, before: SeatLevel | None) -> None:
        last = self._open.pop()
        if last is not seat:
            self._open[seat.place] = last
            last.place = seat.place
        seat.place = -1
        if before is not None:
            self.open_mask &= ~(1 << before.number)

    def _remask(self, before: SeatLevel | None, level: SeatLevel) -> None:
        if before is not None:
            self.open_mask &= ~(1 << before.number)
        self.open_mask |= 1 << level.number

    def _count(self, level: SeatLevel, change: int) -> None:
        if level.standing == SERVING:
            size = level.kv_tokens_total, level.max_model_len
            self._bounds = None
            self._sizes[size] = self._sizes.get(size, 0) + change
            if not self._sizes[size]:
                del self._sizes[size]
        else:
            self._away[level.standing] = self._away.get(level.standing, 0) + change
            if not self._away[level.standing]:
                del self._away[level.standing]


def _is_open(level: SeatLevel) -> bool:
    return level.standing == SERVING and level.slots > 0 and level.room_tokens > 0


def _yields(level: SeatLevel) -> bool:
    if level.standing != SERVING or level.slots > 0:
        return False
    return level.yields_to_rank > 0 and level.room_tokens > 0


def _have_room(seats: Sequence[_Seat], query: PlaceQuery) -> bool:
    """Whether each of these open seats has room for the whole query and would accept it when empty."""
    demand = query.demand
    reserved, worst_case = demand.reserved_tokens, demand.worst_case_tokens
    for seat in seats:
        level = seat.level
        if level.room_tokens < reserved or 0 < level.max_model_len < worst_case:
            return False
    return True


def _kind(level: SeatLevel) -> str | tuple[int, int]:
    """Return the key under which the seat is counted."""
    return level.standing or (level.kv_tokens_total, level.max_model_len)
