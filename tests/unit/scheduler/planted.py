"""Bugs that the scheduler does not have, to see that the tests would find them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from msgspec import structs

from services.core.errors import FairwayError, QueueFull, ShareExceeded
from services.core.fleet import ReportSnapshot
from services.core.generation import Grant
from services.ports.clock import Clock
from services.scheduler.fleet.view import FleetView
from services.scheduler.fleet.worker import Outstanding, WorkerState
from services.scheduler.policy.placement.candidate import PlaceQuery
from services.scheduler.policy.placement.choose import Chosen, NoWorker, PlacementProfile
from services.scheduler.queue.flow_queue import FlowQueue
from services.scheduler.term import Term, TermSettings
from tests.unit.scheduler.model import Fleet


class ForgetsOutstandingGrants(FleetView):
    """Room is what was reported, whatever was granted since."""

    def issue(
        self, chosen: Chosen, query: PlaceQuery, *, digest: str, route_revision: int, now_s: float
    ) -> Grant:
        grant = super().issue(chosen, query, digest=digest, route_revision=route_revision, now_s=now_s)
        super().give_back(grant)
        return grant


class SettlesAllOnReport(FleetView):
    """Takes every grant as seen with the next report, also those that came after its instant."""

    def apply(self, stream: int, report: ReportSnapshot, now_s: float) -> tuple[str, ...]:
        seen = tuple(self._roster._sequences.get(report.worker_id, 0) + 1 - n for n in range(1, 100))
        return super().apply(stream, replace(report, grants_seen=seen), now_s)


class HearsOldStreams(FleetView):
    """Takes a report of a stream that the worker has left."""

    def apply(self, stream: int, report: ReportSnapshot, now_s: float) -> tuple[str, ...]:
        worker = self._workers.get(report.worker_id)
        newest = stream if worker is None else max(stream, worker.stream)
        return super().apply(newest, report, now_s)


class HonoursAnyEpoch(FleetView):
    """Places on a worker that still takes the grants of the leader before."""

    def apply(self, stream: int, report: ReportSnapshot, now_s: float) -> tuple[str, ...]:
        return super().apply(stream, replace(report, epoch=self.epoch), now_s)


class KeepsWhatIsShared(FleetView):
    """Never counts a grant on its way anew when sequences stop sharing what it begins with."""

    def apply(self, stream: int, report: ReportSnapshot, now_s: float) -> tuple[str, ...]:
        pools = tuple(replace(pool, prefix_unshared=()) for pool in report.pools)
        return super().apply(stream, replace(report, pools=pools), now_s)


class LeansOften(FleetView):
    """Lets every grant on its way lean on the same prefix."""

    def choose(
        self, digest: str, query: PlaceQuery, profile: PlacementProfile, rng: Random
    ) -> Chosen | NoWorker:
        self.shared._leaning.clear()
        return super().choose(digest, query, profile, rng)

    def check_integrity(self) -> None:
        """It would see that."""


class SharesNothing(FleetView):
    """Counts every block of a grant, also those that are there already."""

    def _counted(self, worker_id: str, grant: Outstanding) -> Outstanding:
        return grant


class KeepsWhatAStreamLeft(FleetView):
    """Takes the first report of a stream for a change of what the stream before told."""

    def _learn_shared(self, worker: WorkerState, report: ReportSnapshot, *, whole: bool) -> None:
        super()._learn_shared(worker, report, whole=False)


class SharesWhatIsCached(FleetView):
    """Takes a whole prompt as shared wherever sequences share its beginning."""

    def _counted(self, worker_id: str, grant: Outstanding) -> Outstanding:
        shared = len(grant.chain) if self.shared.blocks_on(worker_id, grant.chain, 65) else 0
        return structs.replace(grant, kv_blocks=grant.whole_blocks - shared * grant.each_blocks)


class CountsNoGrantAnew(FleetView):
    """Counts the grants on their way by what was shared when each was issued."""

    def _learn_shared(self, worker: WorkerState, report: ReportSnapshot, *, whole: bool) -> None:
        outstanding, worker.outstanding = worker.outstanding, {}
        super()._learn_shared(worker, report, whole=whole)
        worker.outstanding = outstanding

    def check_integrity(self) -> None:
        """It would see that."""


class LapsesWithoutMargin(FleetView):
    """Holds a grant for its time to live and not for its travel."""

    def expire(self, now_s: float) -> tuple[str, ...]:
        return super().expire(now_s + self.limits.transit_margin_s)


class GivesBackTwice(FlowQueue):
    """A cancelled grant stays known, and another cancellation returns its room again."""

    def cancel(self, session: int, placement_id: int, now_s: float) -> None:
        grant = self._granted.get((session, placement_id))
        super().cancel(session, placement_id, now_s)
        if grant is None:
            return
        self._granted[session, placement_id] = grant
        worker = self._fleet._workers.get(grant.worker_id)
        if worker is not None and grant.version_digest in worker.sums:
            worker.sums[grant.version_digest].kv_blocks -= grant.kv_blocks
            self._fleet._refresh(worker, (grant.version_digest,))


class KeepsLapsedAdvances(FlowQueue):
    """A tenant stays charged for a grant that never started."""

    def expire(self, now_s: float) -> None:
        self.ledger._unseen.clear()
        super().expire(now_s)


class LosesOnFullQueue(FlowQueue):
    """A placement that finds the queue full gets no answer."""

    def _refuse(self, session: int, placement_id: int, error: FairwayError) -> None:
        if not isinstance(error, QueueFull | ShareExceeded):
            super()._refuse(session, placement_id, error)


def fleet_with(bug: type[FleetView] | type[FlowQueue]) -> type[Fleet]:
    """Return a model fleet whose scheduler has this bug."""

    class BuggyFleet(Fleet):
        @staticmethod
        def new_term(epoch: int, settings: TermSettings, clock: Clock, rng: Random) -> Term:
            term = Term(epoch, settings, clock, rng)
            if issubclass(bug, FleetView):
                term.fleet.__class__ = bug
            else:
                term.queue.__class__ = bug
            return term

    return BuggyFleet
