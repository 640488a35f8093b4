"""The leading control plane's samples of requests: the last hour in memory, hours of the last week stored.

A minute is stored as one object when it has passed, so that a new leader goes on from there. Baselines are
objects too. Requests are kept as they are encoded on the wire, since few of them are ever read.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from random import Random
from typing import Final

import structlog

from fairway.mirror import Mirror
from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import slis_pb2
from services.adapters.frames import parsed, sealed_whole
from services.adapters.threads import in_thread
from services.controlplane.diagnosis.policy.samples import FleetMoment
from services.core.arms import SliReport
from services.core.errors import FailedPrecondition, IntegrityError, NotFound
from services.core.estimates.finished import FinishedRequest
from services.core.records import VersionState, Worker
from services.ports.clock import Clock
from services.ports.usage import LedgerStore
from services.rpc.convert.inference import timestamp
from services.rpc.convert.slis import finished_from_proto, finished_to_proto

log = structlog.get_logger()

BUCKET_S: Final = 10.0
KEPT_S: Final = 3900.0
MINUTE_S: Final = 60.0
HOUR_S: Final = 3600.0
MAX_OF_MODEL: Final = 512  # samples of one model in a bucket
MAX_MODELS: Final = 16  # models of a bucket with a limit of their own
MAX_BYTES: Final = 64 * 1024 * 1024  # most memory of all samples; the oldest bucket goes first
HOURS: Final = 7 * 24  # stored hours
MAX_OF_HOUR: Final = 4096  # samples of a stored hour, and of a saved baseline
MAX_BASELINES: Final = 64
MOMENT_S: Final = 2.0
AHEAD_S: Final = 0.5  # a clock that is so far ahead, or behind, is corrected
BEHIND_S: Final = 4.0
_LOADING: Final = (VersionState.FETCHING, VersionState.LOADING)
_CALLS: Final = 16  # calls of a source by which its clock is judged
_MAX_SOURCES: Final = 1024
# The usage ledger is in the same store, and deletes below its own ``hours/``.
_MINUTES: Final = "samples/minute-"
_HOURS: Final = "samples/hour-"
_BASELINES: Final = "samples/saved-"  # prefix of NAME-NUMBER
_MOMENT: Final = Mirror(FleetMoment, pb.FleetMoment)


@dataclass(slots=True)
class _Bucket:
    """By model, encoded requests and how many requests each stands for."""

    requests: defaultdict[str, list[tuple[float, bytes]]] = field(default_factory=lambda: defaultdict(list))
    size_bytes: int = 0


@dataclass(slots=True)
class _Source:
    """One life of a gateway. ``skews_s``: by how much its newest calls were sent before they arrived here.
    ``last``: number of its last report."""

    skews_s: deque[float] = field(default_factory=lambda: deque(maxlen=_CALLS))
    gateway: str = ""
    seen_s: float = 0.0
    last: int = 0

    @property
    def skew_s(self) -> float:
        """How far its clock is behind; 0 within the usual delay of a call.

        No call arrives before it is sent, but a new leader may be slow for a while: that takes ``_CALLS``.
        """
        skew_s = min(self.skews_s, default=0.0)
        is_behind = skew_s > BEHIND_S and len(self.skews_s) == _CALLS
        return skew_s if skew_s < -AHEAD_S or is_behind else 0.0


@dataclass(frozen=True, slots=True)
class Found:
    """The samples of a time. ``zones``: the last known zone of each worker that ran one of them. ``covered``:
    the times of samples within it; empty: all of it."""

    begin_s: float
    end_s: float
    requests: Sequence[FinishedRequest] = ()
    moments: Sequence[FleetMoment] = ()
    zones: Mapping[str, str] = field(default_factory=dict)
    installation: str = ""
    devices: tuple[str, ...] = ()
    covered: Sequence[tuple[float, float]] = ()


class SampleStore:
    """Only the event loop changes it; threads read it. ``workers`` returns the fleet's live workers."""

    def __init__(
        self,
        store: LedgerStore,
        clock: Clock,
        *,
        workers: Callable[[], Iterable[Worker]] = tuple,
        installation: Callable[[], str] = str,
        rng: Random | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._workers = workers
        self._installation = installation
        self._rng = rng if rng is not None else Random(0)
        self._buckets: dict[int, _Bucket] = {}
        self._size_bytes = 0
        self._moments: deque[FleetMoment] = deque(maxlen=int(KEPT_S / MOMENT_S))
        self._zones: dict[str, tuple[str, float]] = {}  # zone of each worker, and the time it was seen
        self._devices: tuple[str, ...] = ()
        self._sources: dict[str, _Source] = {}
        self._lost: deque[tuple[float, int]] = deque(maxlen=1024)
        self._gaps: deque[tuple[float, float]] = deque(maxlen=64)  # what an earlier leader had not stored
        self._stored_minute = self._stored_hour = 0

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def last_of(self, source: str) -> int:
        """Return the number of the last report of a source that was added, 0 for none."""
        return self._sources[source].last if source in self._sources else 0

    def add(
        self,
        source: str,
        reports: Sequence[SliReport],
        lost: int,
        *,
        last: int = 0,
        sent_unix_s: float | None = None,
    ) -> None:
        """Add the samples of reports that are new; ``lost``: reports before them that will not come.

        ``last`` is the number of the last one, ``sent_unix_s`` the time of the call by the source's clock.
        """
        now_s = self._clock.unix_s()
        known = self._sources.pop(source, None) or _Source()
        self._sources[source] = known
        while len(self._sources) > _MAX_SOURCES:
            del self._sources[next(iter(self._sources))]
        known.seen_s, known.last = now_s, last
        if lost > 0:
            self._lost.append((now_s, lost))
        if sent_unix_s is not None:
            known.skews_s.append(now_s - sent_unix_s)
        for report in reports:
            for request in report.sampled:
                known.gateway = request.gateway
                self._put(request, known.skew_s, now_s)
        self._note_fleet(now_s)
        self._forget(now_s)

    def find(self, begin_s: float, end_s: float) -> Found:
        """Return the samples in memory of requests that ended within a time."""
        requests = [
            one
            for number, bucket in sorted(self._buckets.items())
            if begin_s - BUCKET_S < number * BUCKET_S < end_s
            for one in _decoded(bucket)
            if begin_s <= one.ended_unix_us / 1e6 < end_s
        ]
        moments = tuple(one for one in list(self._moments) if begin_s <= one.unix_s < end_s)
        seen, devices = self._zones, self._devices
        workers = {one.run.worker_id for one in requests}
        zones = {worker: seen[worker][0] for worker in sorted(workers) if worker in seen}
        return Found(begin_s, end_s, requests, moments, zones, self._installation(), devices)

    def ended(self, request_id: str) -> list[FinishedRequest]:
        """Return the sampled requests of an id and of its parts, the slowest first."""
        wanted = request_id.encode()
        found = [
            finished_from_proto(slis_pb2.FinishedRequest.FromString(data))
            for data in self._kept()
            if (own := _id_of(data)) == wanted or own.startswith(wanted + b"-")
        ]
        return sorted(found, key=lambda one: -one.total_us)

    @property
    def began_s(self) -> float:
        """Since when samples are in memory; infinite without one."""
        return min(self._buckets, default=float("inf")) * BUCKET_S

    def notes(self, begin_s: float, end_s: float) -> tuple[str, ...]:
        """Return what limits an answer about a time: reports that are lost, and clocks that differ."""
        found = []
        lost = sum(count for at_s, count in self._lost if begin_s <= at_s < end_s + MINUTE_S)
        if lost:
            found.append(f"{lost} reports of gateways are lost: their requests are missing in the samples")
        for name, source in self._sources.items():
            if source.skew_s and source.seen_s >= begin_s:
                ahead = "behind" if source.skew_s > 0 else "ahead"
                whose = source.gateway or name
                text = f"the clock of {whose} is {abs(source.skew_s):.1f} s {ahead}; its times are corrected"
                found.append(text)
            if source.gateway and begin_s <= source.seen_s < end_s - 3 * BUCKET_S:
                found.append(
                    f"{source.gateway} reported nothing in the last {end_s - source.seen_s:.0f} s: it was "
                    "idle, or ended with up to 2 s of requests unreported"
                )
        return tuple(found)

    def missing(self, *times: Found) -> tuple[str, ...]:
        """Return a note if an earlier leader may have had samples of these times that it did not store."""
        lasted_s = (min(end, at.end_s) - max(begin, at.begin_s) for begin, end in self._gaps for at in times)
        if (most_s := max(lasted_s, default=0.0)) <= 0:
            return ()
        return (f"the leader changed: requests of {most_s:.0f} s of this time may be missing in the samples",)

    # --- stored objects --------------------------------------------------------------------------

    async def load(self) -> None:
        """Read the stored minutes of the last hour. Raises StoreUnavailable.

        What is in memory stays, once: a process may lead again, and a load may be repeated. Minutes that it
        stored or loaded itself are in memory, some by a smaller sample now.
        """
        now_s = self._clock.unix_s()
        oldest = max(int((now_s - KEPT_S) // MINUTE_S), self._stored_minute)
        known = {_id_of(data) for data in self._kept()}
        for name in await self._store.names(_MINUTES, after=_minute(oldest)):
            if (found := await self._readable(name)) is None:
                continue
            moments = {one.unix_s: one for one in chain(self._moments, found.moments)}
            self._moments.clear()
            self._moments.extend(moments[unix_s] for unix_s in sorted(moments))
            self._zones |= {worker: (zone, found.end_s) for worker, zone in found.zones.items()}
            for request in found.requests:
                if request.request_id.encode() not in known:
                    self._put(request, 0.0, now_s)
            self._stored_minute = max(self._stored_minute, int(name.rpartition("-")[2]))
        if self._stored_minute:  # gateways forget reports before the samples of their minute are stored
            self._gaps.append(((self._stored_minute + 1) * MINUTE_S, now_s))

    async def store(self) -> None:
        """Store the minutes and hours that have passed. Raises StoreUnavailable."""
        now_s = self._clock.unix_s()
        # Requests of a minute are reported within 2 s, and a little later after an outage.
        last = int((now_s - BUCKET_S) // MINUTE_S) - 1
        for minute in range(max(self._stored_minute + 1, last - 60), last + 1):
            found = self.find(minute * MINUTE_S, (minute + 1) * MINUTE_S)
            if found.requests:
                await self._create(_minute(minute), found)
            self._stored_minute = minute
        hour = int((now_s - MINUTE_S) // HOUR_S) - 1
        if hour > self._stored_hour:
            found = self.find(hour * HOUR_S, (hour + 1) * HOUR_S)
            if found.requests:
                await self._create(_hour(hour), found)
            self._stored_hour = hour
            await self._prune(int((now_s - KEPT_S) // MINUTE_S), hour - HOURS)

    async def save(self, name: str, found: Found) -> None:
        """Keep samples as the baseline of this name. Raises StoreUnavailable."""
        every = await self._store.names(_BASELINES)
        had = [one for one in every if _baseline(one) == name]
        if not had and len(every) >= MAX_BASELINES:
            raise FailedPrecondition(f"{MAX_BASELINES} baselines are saved: save under a name that exists")
        number = int(had[-1].rpartition("-")[2]) + 1 if had else 1
        await self._create(f"{_BASELINES}{name}-{number:08d}", found)
        await self._store.delete(had)

    async def baseline(self, name: str) -> Found:
        """Return a saved baseline. Raises NotFound, IntegrityError or StoreUnavailable."""
        every = await self._store.names(_BASELINES)
        had = [one for one in every if _baseline(one) == name]
        if not had:
            names = ", ".join(sorted({*map(_baseline, every)})[:8])
            raise NotFound(
                f"no baseline {name} is saved (saved: {names or 'none'}); "
                f"`fairway diagnose --save-baseline {name}` saves one",
                name=name,
            )
        return await self._read(had[-1])

    async def hours_before(self, begin_s: float) -> Found | None:
        """Return the stored hours that a window is compared with: the same hour of the three days before, or
        the three hours before; None without any. Raises StoreUnavailable."""
        hour = int(begin_s // HOUR_S)
        stored = [int(one.rpartition("-")[2]) for one in await self._store.names(_HOURS)]
        earlier = [number for number in stored if number < hour]
        chosen = [number for number in earlier if (hour - number) % 24 == 0][-3:] or earlier[-3:]
        parts = [part for number in chosen if (part := await self._readable(_hour(number)))]
        if not parts:
            return None
        return Found(
            parts[0].begin_s,
            parts[-1].end_s,
            [request for part in parts for request in part.requests],
            [moment for part in parts for moment in part.moments],
            {worker: zone for part in parts for worker, zone in part.zones.items()},
            parts[-1].installation,
            parts[-1].devices,
            # An hour is covered from its first request on: this process may have started within it.
            [(min(one.ended_unix_us / 1e6 for one in part.requests), part.end_s) for part in parts],
        )

    # --- inside ----------------------------------------------------------------------------------

    def _kept(self) -> Iterator[bytes]:
        """Yield the encoded requests in memory."""
        for bucket in list(self._buckets.values()):
            for _, data in chain.from_iterable(list(bucket.requests.values())):
                yield data

    def _put(self, request: FinishedRequest, skew_s: float, now_s: float) -> None:
        message = finished_to_proto(request)
        message.received_unix_us = max(0, message.received_unix_us + round(skew_s * 1e6))
        ended_s = request.ended_unix_us / 1e6 + skew_s
        if not now_s - KEPT_S <= ended_s <= now_s + BUCKET_S:
            return
        bucket = self._buckets.setdefault(int(ended_s // BUCKET_S), _Bucket())
        model = request.model
        if model not in bucket.requests and len(bucket.requests) >= MAX_MODELS:
            model = ""
        kept = bucket.requests[model]
        kept.append((request.weight, message.SerializeToString()))
        self._grow(bucket, len(kept[-1][1]))
        if len(kept) > MAX_OF_MODEL:
            bucket.requests[model] = thinned = _half(kept, self._rng)
            self._grow(bucket, sum(len(data) for _, data in thinned) - sum(len(data) for _, data in kept))

    def _grow(self, bucket: _Bucket, size_bytes: int) -> None:
        bucket.size_bytes += size_bytes
        self._size_bytes += size_bytes

    def _note_fleet(self, now_s: float) -> None:
        if self._moments and now_s - self._moments[-1].unix_s < MOMENT_S:
            return
        ready: defaultdict[str, int] = defaultdict(int)
        loading, devices = [], set()
        self._zones = {name: seen for name, seen in self._zones.items() if seen[1] >= now_s - KEPT_S}
        for worker in self._workers():
            self._zones[worker.worker_id] = worker.zone, now_s
            devices.add(worker.device)
            for version in worker.versions:
                ready[version.deployment] += version.state is VersionState.READY
            if any(version.state in _LOADING for version in worker.versions):
                loading.append(worker.worker_id)
        self._devices = tuple(sorted(devices))
        self._moments.append(FleetMoment(now_s, tuple(sorted(loading)), dict(ready)))

    def _forget(self, now_s: float) -> None:
        oldest = int((now_s - KEPT_S) // BUCKET_S)
        for number in sorted(self._buckets):
            if number >= oldest and self._size_bytes <= MAX_BYTES:
                return
            self._size_bytes -= self._buckets.pop(number).size_bytes

    async def _create(self, name: str, found: Found) -> None:
        await self._store.create(name, await in_thread(_encoded, found, self._rng.random()))

    async def _read(self, name: str) -> Found:
        return await in_thread(_found_from, await self._store.read(name))

    async def _readable(self, name: str) -> Found | None:
        """Return stored samples; None, with a line in the log, where they are damaged or pruned."""
        try:
            return await self._read(name)
        except (IntegrityError, NotFound) as error:
            log.error("samples.skipped", name=name, error=error.message)
            return None

    async def _prune(self, minute: int, hour: int) -> None:
        minutes, hours = await self._store.names(_MINUTES), await self._store.names(_HOURS)
        old = [one for one in minutes if one < _minute(minute)] + [one for one in hours if one < _hour(hour)]
        await self._store.delete(old)


def _minute(number: int) -> str:
    return f"{_MINUTES}{number:016d}"


def _baseline(stored: str) -> str:
    return stored.removeprefix(_BASELINES).rpartition("-")[0]


def _hour(number: int) -> str:
    return f"{_HOURS}{number:016d}"


def _half(kept: Sequence[tuple[float, bytes]], rng: Random) -> list[tuple[float, bytes]]:
    """Return a random half, which stands for as many requests as the whole."""
    half = rng.sample(kept, len(kept) // 2)
    ratio = sum(weight for weight, _ in kept) / (sum(weight for weight, _ in half) or 1.0)
    return [(weight * ratio, data) for weight, data in half]


def _id_of(data: bytes) -> bytes:
    """Return the id of an encoded request: its first field, of at most 128 bytes."""
    begin, size = (2, data[1]) if data[1] < 128 else (3, 128)
    return data[begin : begin + size]


def _decoded(bucket: _Bucket) -> Iterator[FinishedRequest]:
    for requests in list(bucket.requests.values()):
        for weight, data in requests:
            message = slis_pb2.FinishedRequest.FromString(data)
            message.weight = weight
            yield finished_from_proto(message)


def samples_message(found: Found, seed: float = 0.0) -> pb.RequestSamples:
    """Return samples on the wire, at most ``MAX_OF_HOUR`` of them."""
    requests = list(found.requests)
    scale = 1.0
    if len(requests) > MAX_OF_HOUR:
        scale = len(requests) / MAX_OF_HOUR
        requests = Random(seed).sample(requests, MAX_OF_HOUR)
    message = pb.RequestSamples(
        installation=found.installation, devices=found.devices, to=timestamp(found.end_s)
    )
    getattr(message, "from").CopyFrom(timestamp(found.begin_s))
    for request in requests:
        one = finished_to_proto(request)
        one.weight *= scale
        message.requests.append(one)
    message.moments.extend(map(_MOMENT.to_proto, found.moments or [FleetMoment(found.begin_s)]))
    message.moments[-1].zones.update(found.zones)
    return message


def found_of(message: pb.RequestSamples) -> Found:
    """Return the samples of a message."""
    zones = {worker: zone for one in message.moments for worker, zone in one.zones.items()}
    moments = map(_MOMENT.from_proto, message.moments)
    begin, end = getattr(message, "from"), message.to
    return Found(
        begin.seconds + begin.nanos / 1e9,
        end.seconds + end.nanos / 1e9,
        [finished_from_proto(one) for one in message.requests],
        [one for one in moments if one.ready or one.loading],
        zones,
        message.installation,
        tuple(message.devices),
    )


def _encoded(found: Found, seed: float) -> bytes:
    return sealed_whole(samples_message(found, seed=seed).SerializeToString())


def _found_from(data: bytes) -> Found:
    """Raises IntegrityError."""
    what = "stored samples of requests are"
    return parsed(data, lambda whole: found_of(pb.RequestSamples.FromString(whole)), what)
