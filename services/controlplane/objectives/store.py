"""The leading control plane's sums of what gateways measured, with a snapshot that outlives it.

A report counts in memory at once. Every ``SNAPSHOT_S`` the whole is stored as one object under the next
number, which must be free: if two leaders continue from the same number, one finds it taken and loads
again. A gateway forgets a report only when a snapshot contains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from fairway.v1 import slis_pb2 as pb
from services.adapters.frames import parsed, sealed_whole
from services.adapters.threads import in_thread
from services.controlplane.diagnosis.store import SampleStore
from services.controlplane.objectives.policy.book import (
    BurnKey,
    ObjectivesByClass,
    SliBook,
    SliSource,
    StepSums,
)
from services.controlplane.objectives.policy.burn import BurnRings, EventCounts, alert_of, burn_of
from services.core.arms import ArmKey, ArmWindow, GateWindow, SliKey, SliReceipt, SliReport, SliSums
from services.core.errors import FairwayError, IntegrityError, NoLeader, NotFound
from services.core.estimates.finished import FinishedRequests
from services.core.estimates.traffic_shapes import RequestShape, probed_shapes
from services.core.records import BurnAlert, Objective, Priority, Sli
from services.ports.clock import Clock
from services.ports.usage import LedgerStore
from services.rpc.convert.inference import PRIORITIES, PRIORITY_OF
from services.rpc.convert.slis import (
    clusters_to_proto,
    series_from_proto,
    series_to_proto,
    shapes_from_proto,
    shapes_to_proto,
    windows_from_proto,
)
from services.runtime.fleet_state.leadership import Leadership
from services.runtime.supervisor import first_of

log = structlog.get_logger()

SNAPSHOT_S: Final = 20.0
_KEPT: Final = 4  # snapshots
_LOADS: Final = 5
_RETRY_S: Final = 0.5
_PREFIX: Final = "slis/"
_SLIS = tuple(Sli)


def book_to_message(book: SliBook, number: int) -> pb.SliSnapshot:
    message = pb.SliSnapshot(
        number=number, shapes=shapes_to_proto(book.shapes), shapes_number=book.shapes_number
    )
    for name, source in book.sources.items():
        message.sources.add(name=name, last=source.last, seen_unix_ms=round(source.seen_s * 1000))
    for at, series in book.intervals.items():
        message.intervals.add(number=at, series=(series_to_proto(*one) for one in series.items()))
    for key, rings in book.burns.items():
        message.burns.add(
            model=key.arm.model,
            version_digest=key.arm.version_digest,
            priority=PRIORITIES[key.priority],
            rings=(_ring_to(ring) for ring in rings.rings),
        )
    for window, step in book.steps.items():
        message.windows.add(
            model=window.model,
            step=window.step,
            seen_unix_ms=round(step.seen_s * 1000),
            began_unix_ms=round(step.began_s * 1000),
            clusters=clusters_to_proto({window: book.arms_of(window)}),
        )
    return message


def snapshot_to_bytes(message: pb.SliSnapshot) -> bytes:
    return sealed_whole(message.SerializeToString())


def book_from_bytes(data: bytes) -> SliBook:
    """Raises IntegrityError."""
    what = "the snapshot of service level indicators is"
    return parsed(data, lambda whole: _book_from(pb.SliSnapshot.FromString(whole)), what)


def _book_from(message: pb.SliSnapshot) -> SliBook:
    book = SliBook(message.number)
    book.sources = {one.name: SliSource(one.last, one.seen_unix_ms / 1000) for one in message.sources}
    book.intervals = {one.number: dict(map(series_from_proto, one.series)) for one in message.intervals}
    for burn in message.burns:
        key = BurnKey(ArmKey(burn.model, burn.version_digest), PRIORITY_OF[burn.priority])
        book.burns[key] = BurnRings([_ring_from(ring.bins) for ring in burn.rings])
    for one in message.windows:
        window = GateWindow(one.model, one.step)
        arms: dict[str, dict[int, SliSums]] = {
            digest: dict(arm.clusters)
            for digest, arm in windows_from_proto(one.clusters).get(window, {}).items()
        }
        book.steps[window] = StepSums(arms, one.seen_unix_ms / 1000, one.began_unix_ms / 1000)
    book.shapes, book.shapes_number = shapes_from_proto(message.shapes), message.shapes_number
    return book


def _ring_to(ring: dict[int, dict[Sli, EventCounts]]) -> pb.SliSnapshot.Ring:
    message = pb.SliSnapshot.Ring()
    for number, counts in ring.items():
        found = (counts.get(sli, EventCounts()) for sli in _SLIS)
        message.bins.add(number=number, counts=(one for each in found for one in (each.events, each.bad)))
    return message


def _ring_from(bins: Iterable[pb.SliSnapshot.Bin]) -> dict[int, dict[Sli, EventCounts]]:
    return {
        one.number: {
            sli: EventCounts(one.counts[2 * at], one.counts[2 * at + 1])
            for at, sli in enumerate(_SLIS)
            if any(one.counts[2 * at : 2 * at + 1])  # an earlier version stored fewer indicators
        }
        for one in bins
    }


class SnapshotTaken(Exception):
    """Another control plane stored a snapshot under the next number."""


@dataclass(slots=True)
class _Term:
    """The state of one leadership. ``durable`` has what the last snapshot contains, by source."""

    epoch: int
    book: SliBook
    durable: dict[str, int]
    began_s: float
    changed: bool = False


class SliStore:
    """Runs in every control plane; acts while it leads. Only the event loop changes the sums."""

    def __init__(
        self,
        store: LedgerStore,
        clock: Clock,
        leadership: Leadership,
        objectives: Callable[[], ObjectivesByClass],
        samples: SampleStore | None = None,
    ) -> None:
        self.samples: Final = samples if samples is not None else SampleStore(store, clock)
        self._store = store
        self._clock = clock
        self._leadership = leadership
        self._objectives = objectives
        self._term: _Term | None = None
        self.requests: Final = FinishedRequests()

    @property
    def leads(self) -> bool:
        return self._term is not None and self._leadership.epoch == self._term.epoch

    def report(
        self,
        source: str,
        first: int,
        oldest: int,
        reports: Sequence[SliReport],
        *,
        sent_unix_s: float | None = None,
    ) -> SliReceipt:
        """Count reports: see ``SliReports`` of the gateway. Raises NoLeader.

        ``sent_unix_s``: the time of the call by the source's clock.
        """
        term = self._leading()
        # The samples outlive a term: they have reports that came after the snapshot of the book.
        had = max(term.book.last_of(source), self.samples.last_of(source))
        last = term.book.apply(source, first, oldest, reports, self._objectives(), now_s=self._clock.unix_s())
        if last > had:
            new = reports[max(0, had + 1 - first) :]
            lost = last - had - len(new) if had else 0
            self.samples.add(source, new, lost, last=last, sent_unix_s=sent_unix_s)
        term.changed = term.changed or bool(reports)
        for report in reports:
            self.requests.add(report.requests)
        return SliReceipt(last, min(last, term.durable.get(source, 0)))

    def arms_of(self, window: GateWindow) -> Mapping[str, ArmWindow]:
        """Return what was measured in a step of a rollout, by version digest. Raises NoLeader."""
        return self._leading().book.arms_of(window)

    def lasted_s(self, window: GateWindow) -> float:
        """Return for how long requests of a step ended so far. Raises NoLeader."""
        return self._leading().book.lasted_s(window)

    def counting_s(self) -> float:
        """Return for how long this leader has taken reports. Raises NoLeader."""
        return self._clock.monotonic_s() - self._leading().began_s

    def probes(self) -> dict[str, tuple[RequestShape, ...]]:
        """Return with which shapes of its traffic a version of each model is probed; {} without leading."""
        if self._term is None or not self.leads:
            return {}
        return {model: probed_shapes(one.items()) for model, one in self._term.book.shapes.items()}

    def series(self, window_s: float) -> set[SliKey]:
        """Return the series with requests in the window that ends now. Raises NoLeader."""
        return self._leading().book.series(window_s, self._clock.unix_s())

    def sums_of(self, series: SliKey, window_s: float) -> SliSums:
        """Return the sums of one series in the window that ends now. Raises NoLeader."""
        return self._leading().book.sums_of(series, window_s, self._clock.unix_s())

    def events_of(self, model: str, priority: Priority, sli: Sli, window_s: float) -> EventCounts:
        """Return the events of a model and class in the window that ends now. Raises NoLeader."""
        found, now_s = EventCounts(), self._clock.unix_s()
        for rings in self._leading().book.burns_of(model, priority):
            found += rings.over(sli, window_s, now_s)
        return found

    def burn_of(self, objective: Objective) -> float:
        """Return how many times too fast the budget is spent that replicas may save; 0 without leading."""
        over = partial(self.events_of, objective.model, objective.priority)
        return burn_of(objective, over) if self.leads else 0.0

    def arm_alerts(self, arm: ArmKey, since_unix_s: float) -> dict[tuple[Priority, Sli], BurnAlert]:
        """Return the burn alerts of one arm alone, by its model's objectives and the events since then.

        Raises NoLeader.
        """
        now_s, objectives = self._clock.unix_s(), self._objectives()
        found: dict[tuple[Priority, Sli], BurnAlert] = {}
        for priority, rings in self._leading().book.burns_of_arm(arm).items():
            objective = objectives.get((arm.model, priority))
            if objective is None:
                continue
            over = partial(rings.since, since_unix_s=since_unix_s, unix_s=now_s)
            alerts = {(priority, sli): alert_of(objective, sli, over) for sli in Sli}
            found |= {key: alert for key, alert in alerts.items() if alert is not BurnAlert.NONE}
        return found

    async def run(self) -> None:
        """Lead whenever this control plane is elected, until cancelled; survives an outage of the store."""
        while True:
            epoch = await self._leadership.wait_leading()
            try:
                book = await self._load()
                durable = {name: source.last for name, source in book.sources.items()}
                self._term = _Term(epoch, book, durable, self._clock.monotonic_s())
                log.info("slis.loaded", snapshot=book.number, epoch=epoch)
                await self.samples.load()
                await first_of(self._store_forever(), self._leadership.wait_lost(epoch))
            except SnapshotTaken:
                log.info("slis.superseded", epoch=epoch)
            except FairwayError as error:
                log.warning("slis.interrupted", reason=error.reason, error=error.message)
            finally:
                self._term = None
            await self._clock.sleep(_RETRY_S)

    async def store(self) -> None:
        """Store a snapshot if anything changed. Raises SnapshotTaken, NoLeader or StoreUnavailable."""
        term = self._leading()
        if not term.changed:
            return
        book = term.book
        book.forget(self._clock.unix_s())
        message = book_to_message(book, book.number + 1)  # a copy: reports go on while it is written
        durable = {name: source.last for name, source in book.sources.items()}
        term.changed = False
        data = await in_thread(snapshot_to_bytes, message)
        name = f"{_PREFIX}{book.number + 1:016d}"
        try:
            created = await self._store.create(name, data) or await self._store.read(name) == data
        except FairwayError:
            term.changed = True
            raise
        names = await self._store.names(_PREFIX)
        if not created or names[-1] != name:
            raise SnapshotTaken
        book.number += 1
        term.durable = durable
        await self._store.delete(names[:-_KEPT])

    async def _store_forever(self) -> None:
        while True:
            await self._clock.sleep(SNAPSHOT_S)
            try:
                await self.store()
                await self.samples.store()
            except NoLeader:
                return
            except FairwayError as error:
                log.warning("slis.not_stored", reason=error.reason, error=error.message)

    async def _load(self) -> SliBook:
        """Return the sums of the newest snapshot without damage, empty ones without any.

        Raises StoreUnavailable.
        """
        for _ in range(_LOADS):
            names = await self._store.names(_PREFIX)
            try:
                return await self._newest(names)
            except NotFound:
                continue  # deleted: there is a newer one
        raise NoLeader("other control planes replace the snapshots of service level indicators")

    async def _newest(self, names: Sequence[str]) -> SliBook:
        book = SliBook()
        for name in reversed(names):
            try:
                book = await in_thread(book_from_bytes, await self._store.read(name))
                break
            except IntegrityError as error:  # gateways send again what an earlier snapshot lacks
                log.error("slis.snapshot_damaged", name=name, error=error.message)
        if names:
            book.number = int(names[-1].removeprefix(_PREFIX))
        return book

    def _leading(self) -> _Term:
        if self._term is None or self._leadership.epoch != self._term.epoch:
            raise NoLeader("this control plane does not lead", retry_after_s=1.0)
        return self._term
