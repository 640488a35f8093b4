"""Collects timelines: on request, and of slow and failed requests before their records are overwritten.

The leading control plane answers, since it has the gateways' records of ended requests. It keeps timelines
in memory: its successor has none of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import scheduler_pb2, worker_pb2
from services.adapters.grpc.leader_calls import LeadingPlane
from services.adapters.threads import in_thread
from services.controlplane.diagnosis.store import SampleStore
from services.controlplane.timelines.join import WorkerSteps, joined, unknown, when, without_neighbours
from services.controlplane.timelines.policy.tail import MAX_KEPT_BYTES, Kept, KeptTimelines
from services.core.errors import FairwayError, NoLeader
from services.core.estimates.finished import FinishedRequest, FinishedRequests
from services.ports.clock import Clock
from services.rpc.convert.inference import timestamp
from services.rpc.convert.slis import finished_to_proto
from services.runtime.ids import request_id_of
from services.runtime.telemetry.metrics import Metrics

log = structlog.get_logger()

ROUND_S: Final = 1.0
MAX_WORKERS: Final = 16  # most workers of one timeline
_NEWEST: Final = 256  # ended requests that a round looks at


class EndedRequests(Protocol):
    """``objectives.store.SliStore``."""

    @property
    def leads(self) -> bool: ...

    @property
    def requests(self) -> FinishedRequests: ...

    @property
    def samples(self) -> SampleStore: ...


class Explanations(Protocol):
    """``GrpcQueues``."""

    async def explain(self, request_id: str) -> scheduler_pb2.ExplainResponse: ...


class StepReads(Protocol):
    """Reads of a worker's flight recorder."""

    async def read(self, address: str, request_id: str) -> Sequence[worker_pb2.ReadStepsResponse]:
        """Return the pages of a request's steps, at least one. Raises FairwayError."""


@dataclass(frozen=True, slots=True)
class TimelineSources:
    """Where the parts of a timeline come from."""

    ended: EndedRequests
    decisions: Explanations
    steps: StepReads
    address_of: Callable[[str], str]  # address of a live worker; empty: it is not there
    leader: LeadingPlane


class Timelines:
    """Single writer of what is kept: ``run``."""

    def __init__(self, sources: TimelineSources, clock: Clock, metrics: Metrics) -> None:
        self._sources = sources
        self._clock = clock
        self._kept: KeptTimelines[pb.GetTimelineResponse] = KeptTimelines()
        self._seen = 0  # ended requests that earlier rounds looked at
        self._began_unix_s = clock.unix_s()
        self._looking = asyncio.Lock()  # one search of all samples at a time
        self._outcomes = metrics.counter(
            "fairway_controlplane_timelines_total",
            "Slow and failed requests whose timeline was kept, was kept with parts missing, or was evicted",
            ("outcome",),
        )
        metrics.level(
            "fairway_controlplane_kept_timelines",
            "Timelines of slow and failed requests that this control plane holds",
            lambda: float(len(self._kept)),
        )

    async def get(self, request: pb.GetTimelineRequest, *, forwarded: bool) -> pb.GetTimelineResponse:
        """Return the timeline of a request. Raises NotFound or NoLeader."""
        if not self._sources.ended.leads:
            if forwarded:
                raise NoLeader("this control plane does not lead", retry_after_s=1.0)
            return await self._sources.leader.ask(lambda plane: plane.GetTimeline, request)
        wanted = request_id_of(request.request_name)
        found, others = await self._ended(wanted)
        request_id = wanted if found is None else found.request_id
        if (kept := self._kept.get(request_id)) is not None:
            return kept.timeline
        timeline = await self._collect(request_id, found)
        if others:
            timeline.notes.append(f"{others} other requests of {wanted} ended; this is the slowest")
        if not timeline.HasField("finished") and not timeline.decisions and not timeline.rows:
            raise unknown(wanted)
        return timeline

    async def run(self) -> None:
        """Collect the timelines of slow and failed requests while this process leads, until cancelled."""
        while True:
            await self._clock.sleep(ROUND_S)
            self._kept.expire(self._clock.unix_s())
            if self._sources.ended.leads:
                await self._round()

    async def _round(self) -> None:
        requests, kept = self._sources.ended.requests, self._kept
        fresh = requests.newest(min(requests.added - self._seen, _NEWEST))
        self._seen = requests.added
        for one in kept.wanted(fresh):
            timeline = await self._collect(one.request_id, one)
            self._keep(one, timeline)

    def _keep(self, request: FinishedRequest, timeline: pb.GetTimelineResponse) -> None:
        now_unix_s, evicted = self._clock.unix_s(), self._kept.evicted
        timeline.kept_time.CopyFrom(timestamp(now_unix_s))
        if timeline.ByteSize() > MAX_KEPT_BYTES:
            for host in timeline.workers:
                without_neighbours(host, request.request_id)
            timeline.notes.append("the other requests of its steps are left out: it has too many steps")
        self._outcomes.add("incomplete" if timeline.notes else "kept")
        self._kept.add(Kept(request, now_unix_s, timeline.ByteSize(), timeline))
        if self._kept.evicted > evicted:
            self._outcomes.add("evicted", amount=self._kept.evicted - evicted)

    async def _ended(self, wanted: str) -> tuple[FinishedRequest | None, int]:
        """Return the ended request of the id, or the slowest of its parts, and the number of others."""

        def takes(one: FinishedRequest) -> bool:
            return one.request_id == wanted or one.request_id.startswith(f"{wanted}-")

        found: Sequence[FinishedRequest]
        found = self._sources.ended.requests.find(takes, slow=True, limit=1000)
        if not found:  # neither slow nor failed
            async with self._looking:
                found = await in_thread(self._sources.ended.samples.ended, wanted)
        exact = [one for one in found if one.request_id == wanted] or list(found)
        return (exact[0], len(exact) - 1) if exact else (None, 0)

    async def _collect(self, request_id: str, ended: FinishedRequest | None) -> pb.GetTimelineResponse:
        notes = list[str]()
        finished = None if ended is None else finished_to_proto(ended)
        if ended is None:
            notes.append(
                "its end is not known: it runs, or it was neither slow nor failed nor drawn as a sample, "
                f"or it ended before this control plane started at {when(self._began_unix_s * 1e6)}"
            )
        explained = await self._explain(request_id, notes)
        workers = _workers_of(explained, ended)
        if len(workers) > MAX_WORKERS:
            notes.append(f"it was on {len(workers)} workers; the steps of the last {MAX_WORKERS} are here")
        reads = (self._read(worker_id, request_id, notes) for worker_id in workers[-MAX_WORKERS:])
        found = await asyncio.gather(*reads)
        return joined(request_id, finished, explained, found, notes)

    async def _explain(self, request_id: str, notes: list[str]) -> scheduler_pb2.ExplainResponse | None:
        try:
            found = await self._sources.decisions.explain(request_id)
        except FairwayError as error:
            notes.append(f"its placement is not known: {error.message}")
            return None
        if not found.decisions and not found.rows:
            since = when(found.since.ToMicroseconds())
            notes.append(f"its placement is not known: the records of the scheduler begin at {since}")
        return found

    async def _read(self, worker_id: str, request_id: str, notes: list[str]) -> WorkerSteps:
        sent_us = round(self._clock.unix_s() * 1e6)
        pages: Sequence[worker_pb2.ReadStepsResponse] = ()
        if address := self._sources.address_of(worker_id):
            try:
                pages = await self._sources.steps.read(address, request_id)
            except FairwayError as error:
                notes.append(f"the steps on worker {worker_id} are not known: {error.message}")
        else:
            notes.append(f"the steps on worker {worker_id} are gone: it has left the fleet")
        if pages:
            notes.extend(_gaps(worker_id, request_id, pages))
        return WorkerSteps(worker_id, pages, sent_us, round(self._clock.unix_s() * 1e6))


def _workers_of(explained: scheduler_pb2.ExplainResponse | None, ended: FinishedRequest | None) -> list[str]:
    """Return the workers that the request was on, in order; of its end, where no placement is known."""
    named = list[str]()
    if explained is not None:
        named += [one.worker_id for one in explained.decisions]
        named += [trip.worker_id for rows in explained.rows for trip in rows.trips]
    if ended is not None:
        named.append(ended.run.worker_id)
    return list(dict.fromkeys(filter(None, named)))


def _gaps(worker_id: str, request_id: str, pages: Sequence[worker_pb2.ReadStepsResponse]) -> list[str]:
    """Return what a worker's recorder no longer has of the request."""
    since_us, last = pages[0].since_unix_us, pages[-1]
    own = [one for page in pages for one in page.sequences if one.request_id == request_id]
    recorded = f"the recorder of worker {worker_id} begins at {when(since_us)}"
    if not own:
        return [f"{recorded}: it has restarted, or the steps of the request are overwritten"]
    found = list[str]()
    if min(one.accepted_unix_us for one in own) < since_us:
        found.append(f"{recorded}: earlier steps are overwritten")
    if last.next_step:
        found.append(f"worker {worker_id} has more steps of it than were read: the first are here")
    return found
