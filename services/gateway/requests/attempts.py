"""The attempts of one sequence: how each runs, what follows from its end, and whether it is a suspect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from services.core.errors import (
    DeadlineExceeded,
    FairwayError,
    InternalError,
    IsolationUnavailable,
    NoLeader,
    NoWorkerAvailable,
    QueueTimeout,
    SlowReader,
    StaleRoute,
    StreamBroken,
    VersionFailing,
)
from services.core.generation import (
    NOT_FINITE,
    AnyGrant,
    FinishReason,
    GenerationSpec,
    NotAdmittedReason,
    PlaceSpec,
    SequenceEnd,
    StartSpec,
)
from services.core.poison.suspicion import Condemned, LossCause, LostTooOften, StepRole, Suspicion, judge
from services.gateway.policy.retry import (
    EXCLUDED_S,
    GiveUp,
    PlaceAgain,
    after_loss,
    after_not_finite,
    after_refusal,
    after_unreached,
)
from services.gateway.service_types import Ports
from services.ports.worker import RunningSequence, SequenceSink

_CHECK_S: Final = 1.0  # time between two looks at what ends a placement early


@dataclass(frozen=True, slots=True)
class StartRefused:
    reason: NotAdmittedReason


@dataclass(frozen=True, slots=True)
class Lost:
    message: str


Outcome = SequenceEnd | StartRefused | Lost


async def placed(
    place: Callable[[PlaceSpec], Awaitable[AnyGrant]], spec: PlaceSpec, excluded: tuple[str, ...]
) -> AnyGrant:
    """Return a grant, without an excluded worker if another becomes available soon.

    A lost worker may be the only one, and return: after a while it is no longer excluded.
    """
    if not excluded:
        return await place(spec)
    patient_s = min(spec.queue_ttl_s, EXCLUDED_S)
    try:
        return await place(replace(spec, excluded_workers=excluded, queue_ttl_s=patient_s))
    except (QueueTimeout, NoWorkerAvailable, IsolationUnavailable, NoLeader):
        return await place(spec)


class SequenceAttempts:
    """One sequence on any worker that runs it. It is the sink of each attempt, without the output.

    Written by the sequence's task; the reader of its worker only resolves the outcome.
    """

    def __init__(self, spec: GenerationSpec, ports: Ports, patience_s: float) -> None:
        """``patience_s``: how long workers may be out of reach."""
        self.losses = 0
        self.device_us = 0  # device time on all workers that ran it and reported its end
        self._spec = spec
        self._ports = ports
        self._patience_s = patience_s
        self._running: RunningSequence | None = None
        self._outcome: asyncio.Future[Outcome] | None = None
        self._refusals = self._not_finite = 0
        self._accepted = False  # by the worker that was started last
        self._unreached = 0  # consecutive starts whose worker disconnected before acceptance, and since when
        self._unreached_since_s = 0.0
        self._suspicion = Suspicion()
        self._suspect_since_s: float | None = None  # the start of its first run apart

    def _begun_since(self) -> bool:
        """Whether the request's first output came after the last start was sent: a next one is admitted."""
        return False

    @property
    def _trial_tokens(self) -> int:
        """How many tokens the next run produces apart; 0: the sequence is no suspect."""
        return self._suspicion.trial_tokens

    def _place_or_wake(self) -> Callable[[PlaceSpec], Awaitable[AnyGrant]]:
        """Return what places the sequence. Where it waits for its deployment's first replica, that raises why
        the start failed."""
        ports, model = self._ports, self._spec.model
        if ports.waking(model) is None:
            return ports.placement.place

        def failed_start() -> FairwayError | None:
            waking = ports.waking(model)
            return None if waking is None else waking.failure

        return partial(self._place_unless, failed_start)

    async def _place_unless(self, ended: Callable[[], FairwayError | None], spec: PlaceSpec) -> AnyGrant:
        """Place a sequence. Raises what ``ended`` returns meanwhile."""
        found: list[FairwayError] = []

        async def watch() -> None:
            while (error := ended()) is None:
                await self._ports.clock.sleep(_CHECK_S)
            found.append(error)
            placing.reschedule(asyncio.get_running_loop().time())

        ports = self._ports
        try:
            async with asyncio.timeout(None) as placing:
                watching = ports.supervisor.spawn(f"watch {spec.request_id}", watch())
                try:
                    return await ports.placement.place(spec)
                finally:
                    watching.cancel()
        except TimeoutError:
            raise found[0] from None

    async def _attempt(self, start: StartSpec, sink: SequenceSink) -> Outcome:
        """Start under a grant and wait for the outcome. Leaving early frees the worker's KV."""
        ports = self._ports
        self._accepted = False
        if self._trial_tokens and self._suspect_since_s is None:
            self._suspect_since_s = ports.clock.monotonic_s()
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._outcome = outcome
        self._running = ports.workers.start(start, sink)
        try:
            return await outcome
        finally:
            if ran_on(outcome):
                self._running.cancel()
            ports.placement.over(start.grant, refusal_of(outcome))
            self._running = self._outcome = None

    # --- part of SequenceSink: called by the worker client's reader --------------------------------

    def on_accepted(self) -> None:
        self._accepted = True
        self._refusals = self._unreached = 0

    def on_not_admitted(self, reason: NotAdmittedReason) -> None:
        self._resolve(StartRefused(reason))

    def on_scores(self, offset: int, scores: Sequence[float]) -> None:
        """Drop the scores of a probe, which no attempt of this kind requests."""

    def on_finished(self, end: SequenceEnd) -> None:
        self._resolve(end)

    def on_lost(self, message: str) -> None:
        self._resolve(Lost(message))

    def _resolve(self, outcome: Outcome) -> None:
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(outcome)

    # --- what follows from an outcome -------------------------------------------------------------

    def _after(self, outcome: Outcome, worker_id: str) -> PlaceAgain | Condemned:
        """Return the next placement, or that there is none because the input is the cause of its losses.

        Raises another error that ends the sequence.
        """
        jitter = self._ports.rng.random()
        if isinstance(outcome, SequenceEnd):
            self.device_us += outcome.device_us
            if outcome.reason not in (FinishReason.PREEMPTED, FinishReason.ENGINE_LOST):
                raise self._error(outcome)
        if isinstance(outcome, StartRefused):
            return self._after_refusal(outcome.reason, worker_id, jitter)
        if isinstance(outcome, SequenceEnd) and outcome.reason is FinishReason.PREEMPTED:
            return PlaceAgain()
        now_s = self._ports.clock.monotonic_s()
        decision = self._after_end(outcome, worker_id, now_s, jitter)
        if isinstance(decision, Condemned):
            return decision
        if isinstance(decision, GiveUp):
            if is_not_finite(outcome):
                raise VersionFailing(
                    f"version {self._spec.version_digest} of {self._spec.model} gave logits that are not "
                    f"finite on {self._not_finite} tries: the version is faulty",
                    retry_after_s=10.0,
                    version_digest=self._spec.version_digest,
                    model=self._spec.model,
                    tries=self._not_finite,
                )
            raise StreamBroken(f"{decision.why}; send it again", retry_after_s=1.0)
        return replace(decision, delay_s=decision.delay_s + self._ports.retries.take(now_s))

    def _error(self, end: SequenceEnd) -> FairwayError:
        """Return the error of an end that no other run follows."""
        if end.reason is FinishReason.DEADLINE:
            return DeadlineExceeded("the deadline passed while the output was being produced")
        if end.reason is FinishReason.SLOW_READER:
            return SlowReader("the output was not read for too long; read faster or request less")
        if end.reason is FinishReason.ERROR:
            return self._ports.error_of(end.error_reason, end.error_message)
        return InternalError(f"the worker ended the sequence with {end.reason.value}")

    def _after_refusal(self, reason: NotAdmittedReason, worker_id: str, jitter: float) -> PlaceAgain:
        spec = self._spec
        if reason is NotAdmittedReason.INVALID:
            raise InternalError(f"{worker_id} took the start for out of bounds")
        if reason is NotAdmittedReason.STALE_ROUTE and not self._begun_since():
            raise StaleRoute(
                f"{spec.model} withdrew version {spec.version_digest} while the request waited; "
                "send it again",
                retry_after_s=1.0,
                model=spec.model,
                version_digest=spec.version_digest,
            )
        self._refusals += 1
        again = after_refusal(reason, worker_id, self._refusals, jitter)
        if isinstance(again, GiveUp):
            raise NoWorkerAvailable(again.why, retry_after_s=1.0)
        return again

    def _after_end(
        self, outcome: SequenceEnd | Lost, worker_id: str, now_s: float, jitter: float
    ) -> PlaceAgain | GiveUp | Condemned:
        """Count a loss, unless the worker never accepted the sequence."""
        if self._accepted or isinstance(outcome, SequenceEnd):
            self.losses += 1
            if is_not_finite(outcome):
                self._not_finite += 1
                return after_not_finite(worker_id, self._not_finite, jitter)
            return self._after_loss(outcome, worker_id, now_s, jitter)
        if self._unreached == 0:
            self._unreached_since_s = now_s
        self._unreached += 1
        waited_s = now_s - self._unreached_since_s
        return after_unreached(worker_id, self._unreached, waited_s, self._patience_s, jitter)

    def _after_loss(
        self, outcome: SequenceEnd | Lost, worker_id: str, now_s: float, jitter: float
    ) -> PlaceAgain | GiveUp | Condemned:
        """Judge the sequence after a loss."""
        kills, since_s = self._ports.kills, self._suspect_since_s
        cause, role = LossCause.OUTSIDE, StepRole.NONE
        if isinstance(outcome, SequenceEnd):
            cause, role = outcome.loss_cause, outcome.step_role
            kills.note(cause, role, now_s)
        others_killed = since_s is not None and kills.any_since(since_s)
        verdict = judge(self._suspicion, cause, role, others_killed=others_killed)
        if isinstance(verdict, Condemned):
            return verdict
        if isinstance(verdict, LostTooOften):
            return GiveUp(f"the worker was lost under this request {verdict.losses} times")
        self._suspicion = verdict.suspicion
        if others_killed:
            self._suspect_since_s = None  # its next run apart is its first evidence
        return after_loss(worker_id, self.losses, jitter, cause, role)


def is_not_finite(outcome: Outcome) -> bool:
    """Whether the engine ended the sequence because its model gave no finite numbers."""
    return isinstance(outcome, SequenceEnd) and outcome.error_reason == NOT_FINITE


def ran_on(outcome: asyncio.Future[Outcome]) -> bool:
    """Whether the worker may still run the sequence when its run is left."""
    return not outcome.done() or outcome.cancelled() or isinstance(outcome.result(), Lost)


def refusal_of(outcome: asyncio.Future[Outcome]) -> NotAdmittedReason | None:
    """Return why the worker did not admit the sequence; None if it did, or is still to answer."""
    if not outcome.done() or outcome.cancelled():
        return None
    found = outcome.result()
    return found.reason if isinstance(found, StartRefused) else None
