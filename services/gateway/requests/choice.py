"""One choice of a request: placed, run, and placed again until it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from services.core.errors import (
    DeadlineExceeded,
    FairwayError,
    InternalError,
    NoLeader,
    NoWorkerAvailable,
    QueueTimeout,
    SlowReader,
    StaleRoute,
    StreamBroken,
    VersionFailing,
    VersionGone,
)
from services.core.generation import (
    NOT_FINITE,
    AnyGrant,
    FallbackGrant,
    FinishReason,
    NotAdmittedReason,
    PlaceSpec,
    SequenceEnd,
    StartSpec,
    TokenLogprobs,
)
from services.core.poison.suspicion import Condemned
from services.gateway.events import ChoiceResult, RequestSink
from services.gateway.poison import condemned_error
from services.gateway.policy.retry import (
    EXCLUDED_S,
    GiveUp,
    PlaceAgain,
    after_not_finite,
    after_refusal,
    after_unreached,
)
from services.gateway.requests.losses import Losses
from services.gateway.requests.stage_timer import Stage, StageTimer
from services.gateway.requests.terms import Admitted
from services.ports.worker import RunningSequence

log = structlog.get_logger()
# A worker that lost its lease for a moment returns within it.
GONE_AFTER_S: Final = 10.0
_GONE_CHECK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class StartRefused:
    reason: NotAdmittedReason


@dataclass(frozen=True, slots=True)
class Lost:
    message: str


Outcome = SequenceEnd | StartRefused | Lost


class ChoiceRun:
    """The sink of its sequence on any worker that runs it; stores what a resume needs.

    ``run`` is the only task that writes the control state; the token path only appends.
    """

    def __init__(
        self,
        request: Admitted,
        choice: int,
        sink: RequestSink,
        timer: StageTimer,
    ) -> None:
        """The sequence continues what an earlier run produced; its sink receives only the later output."""
        produced = request.produced(choice)
        self.spec = request.spec
        self.choice = choice
        self.timer = timer
        self.losses = 0
        self._losses = Losses(request.ports.kills)
        self._not_finite = 0
        self.cached_tokens = 0
        self.device_us = 0  # on all workers that ran it and reported its end
        self._request = request
        self._clock = request.ports.clock
        self._sink = sink
        self._pace = request.telemetry.pace()
        self._refusals = 0
        self._first_run = True  # the worker computes the prompt for the first time
        self._accepted = False  # by the worker that was started last
        self._granted = bool(produced.ids)  # whether it ever had a placement
        self._unreached = 0  # consecutive starts whose worker disconnected before acceptance, and since when
        self._unreached_since_s = 0.0
        self._produced = list(produced.ids)
        self._chars = produced.chars
        self._running: RunningSequence | None = None
        self._outcome: asyncio.Future[Outcome] | None = None
        # Output offsets: what the transport took, what the client permits, and the limit sent to the worker.
        self._taken = len(produced.ids)
        self._window = request.limits.window_tokens
        self._allowed = request.terms.client_window
        self._limit = 0

    @property
    def output_tokens(self) -> int:
        return len(self._produced)

    @property
    def buffered_tokens(self) -> int:
        """Tokens that arrived and that the transport has not taken."""
        return len(self._produced) - self._taken

    async def run(self) -> ChoiceResult:
        """Return once the choice ended successfully. Raises the error that ended it otherwise."""
        excluded: tuple[str, ...] = ()
        while True:
            grant = await self._place(excluded)
            self._granted = True
            outcome = await self._execute(grant)
            if isinstance(outcome, SequenceEnd) and outcome.reason in (
                FinishReason.STOP,
                FinishReason.LENGTH,
            ):
                return self._result(outcome)
            again = self._decide(outcome, grant)
            if isinstance(again, Condemned):
                raise await self._condemned(again)
            self._check_quarantine()
            excluded = (again.exclude_worker,) if again.exclude_worker else ()
            if again.delay_s > 0:
                await self._clock.sleep(again.delay_s)

    def credit(self, tokens: int) -> None:
        """The transport took ``tokens``: the worker earns as much credit, sent in quarters of the window."""
        self._taken += tokens
        window = self._window
        if (self._taken + window - self._limit) * 4 >= window:
            self._extend()

    def allow(self, tokens: int) -> None:
        """The client's own window grew. Without a client window this has no effect."""
        if self._allowed is not None:
            self._allowed += tokens
            self._extend()

    def _credit_limit(self) -> int:
        """The output offset up to which tokens may arrive.

        Unread tokens of a wide client window are buffered here, so it never widens this process's own window.
        """
        limit = self._taken + self._window
        return limit if self._allowed is None else min(limit, self._allowed)

    def _extend(self) -> None:
        limit = self._credit_limit()
        if self._running is not None and limit > self._limit:
            self._running.credit(limit - self._limit)
            self._limit = limit

    async def _place(self, excluded: tuple[str, ...]) -> AnyGrant:
        """Return a grant, without an excluded worker if another becomes available soon.

        A lost worker may be the only one, and return: after a while it is no longer excluded.
        """
        place = self._place_begun if self._produced else self._request.ports.placement.place
        self.timer.enter(Stage.QUEUE, self._clock.monotonic_s())
        spec = self._place_spec()
        try:
            if not excluded:
                return await place(spec)
            patient_s = min(spec.queue_ttl_s, EXCLUDED_S)
            return await place(replace(spec, excluded_workers=excluded, queue_ttl_s=patient_s))
        except (QueueTimeout, NoWorkerAvailable, NoLeader):
            if not excluded:
                raise
            return await place(spec)
        finally:
            self.timer.enter(Stage.DISPATCH, self._clock.monotonic_s())

    async def _place_begun(self, spec: PlaceSpec) -> AnyGrant:
        """Place a sequence that has output. Raises VersionGone when nothing serves its version any more."""
        ports = self._request.ports
        try:
            async with asyncio.timeout(None) as placing:
                watch = ports.supervisor.spawn(f"watch {spec.request_id}", self._end_once_gone(placing))
                try:
                    return await ports.placement.place(spec)
                finally:
                    watch.cancel()
        except TimeoutError:
            raise VersionGone(
                f"{spec.model} withdrew version {spec.version_digest} and lost its last worker before the "
                "output ended; send the request again",
                model=spec.model,
                version_digest=spec.version_digest,
            ) from None

    async def _end_once_gone(self, placing: asyncio.Timeout) -> None:
        serves, gone_since_s = self._request.ports.serves, self._clock.monotonic_s()
        while (now_s := self._clock.monotonic_s()) - gone_since_s < GONE_AFTER_S:
            if serves(self.spec.model, self.spec.version_digest):
                gone_since_s = now_s
            await self._clock.sleep(_GONE_CHECK_S)
        placing.reschedule(asyncio.get_running_loop().time())

    def _place_spec(self) -> PlaceSpec:
        request, spec = self._request, self.spec
        received, tenant = request.terms.received, request.tenant
        return PlaceSpec(
            request_id=spec.request_id,
            choice=self.choice,
            tenant_id=tenant.meta.name,
            priority=spec.priority,
            model=spec.model,
            version_digest=spec.version_digest,
            route_revision=spec.route_revision,
            prompt_tokens=len(spec.prompt.ids) + len(self._produced),
            max_output_tokens=spec.limits.max_tokens - len(self._produced),
            arrival_unix_us=received.unix_us,
            queue_ttl_s=self._patience_s(),
            ticket=request.ticket,
            traceparent=self.timer.traceparent,
            prefix_hashes=spec.prompt.prefix_hashes[: request.limits.placed_prefix_blocks],
            deadline_left_s=self._time_left_s(),
            tenant_weight=tenant.weight,
            attempt=received.attempt,
            ttft_target_s=request.ports.ttft_target_s(spec.model, spec.priority),
            committed_tokens_per_minute=tenant.committed_tokens_per_minute,
            begun=self._granted,
        )

    def _patience_s(self) -> float:
        """How long to queue. A stream that has begun waits until its deadline, to avoid a broken stream."""
        queue_ttl_s = self._request.queue_ttl_s
        return max(queue_ttl_s, self._time_left_s()) if self._produced else queue_ttl_s

    def _time_left_s(self) -> float:
        """The time until the request's deadline; above zero."""
        return max(0.001, self._request.deadline_s - self._clock.monotonic_s())

    async def _execute(self, grant: AnyGrant) -> Outcome:
        """Start under a grant and wait for the outcome. Leaving early frees the worker's KV."""
        request, ports = self._request, self._request.ports
        # A start has at least one token of credit. A stream that resumes at the end of the client's window
        # exceeds it by that token.
        self._limit = max(self._credit_limit(), len(self._produced) + 1)
        start = StartSpec(
            generation=self.spec,
            choice=self.choice,
            tenant_id=request.tenant.meta.name,
            grant=grant,
            initial_credit_tokens=self._limit - len(self._produced),
            produced_ids=tuple(self._produced),
            delivered_chars=self._chars,
            time_left_s=self._time_left_s(),
            traceparent=self.timer.traceparent,
            apart_tokens=self._losses.trial_tokens,
        )
        if isinstance(grant, FallbackGrant):
            request.telemetry.placed_by_fallback()
        self._losses.starts(self._clock.monotonic_s())
        self._accepted = False
        self._first_run = not self._produced
        self._outcome = asyncio.get_running_loop().create_future()
        self._running = ports.workers.start(start, self)
        try:
            return await self._outcome
        finally:
            if (
                not self._outcome.done()
                or self._outcome.cancelled()
                or isinstance(self._outcome.result(), Lost)
            ):
                self._running.cancel()
            ports.placement.over(grant, _refusal_of(self._outcome))
            self._running = self._outcome = None

    def _decide(self, outcome: Outcome, grant: AnyGrant) -> PlaceAgain | Condemned:
        """Return the next placement, or that there is none because the input is the cause of its losses.

        Raises another error that ends the choice.
        """
        jitter = self._request.ports.rng.random()
        if isinstance(outcome, StartRefused):
            if outcome.reason is NotAdmittedReason.INVALID:
                raise InternalError(f"{grant.worker_id} took the start for out of bounds")
            if outcome.reason is NotAdmittedReason.STALE_ROUTE:
                raise StaleRoute(
                    f"{self.spec.model} withdrew version {self.spec.version_digest} while the request "
                    "waited; send it again",
                    retry_after_s=1.0,
                    model=self.spec.model,
                    version_digest=self.spec.version_digest,
                )
            self._refusals += 1
            again = after_refusal(outcome.reason, grant.worker_id, self._refusals, jitter)
            if isinstance(again, GiveUp):
                raise NoWorkerAvailable(again.why, retry_after_s=1.0)
        else:
            if isinstance(outcome, SequenceEnd):
                self._record_use(outcome)
                if outcome.reason is FinishReason.PREEMPTED:
                    self._log_placed_again(grant, outcome)
                    return PlaceAgain()
                if outcome.reason is not FinishReason.ENGINE_LOST:
                    raise self._error(outcome)
            decision = self._after_end(outcome, grant, jitter)
            if isinstance(decision, Condemned):
                return decision
            if isinstance(decision, GiveUp) and _is_not_finite(outcome):
                raise VersionFailing(
                    f"version {self.spec.version_digest} of {self.spec.model} gave logits that are not "
                    f"finite on {self._not_finite} tries: the version is faulty",
                    retry_after_s=10.0,
                    version_digest=self.spec.version_digest,
                    model=self.spec.model,
                    tries=self._not_finite,
                )
            if isinstance(decision, GiveUp):
                raise StreamBroken(f"{decision.why}; send it again", retry_after_s=1.0)
            paced_s = self._request.ports.retries.take(self._clock.monotonic_s())
            again = replace(decision, delay_s=decision.delay_s + paced_s)
        self._log_placed_again(grant, outcome)
        return again

    def _after_end(self, outcome: Outcome, grant: AnyGrant, jitter: float) -> PlaceAgain | GiveUp | Condemned:
        """Count a loss, unless the worker never accepted the sequence."""
        now_s = self._clock.monotonic_s()
        if self._accepted or not isinstance(outcome, Lost):
            self.losses += 1
            if _is_not_finite(outcome):
                self._not_finite += 1
                return after_not_finite(grant.worker_id, self._not_finite, jitter)
            end = outcome if isinstance(outcome, SequenceEnd) else None
            return self._losses.after(end, grant.worker_id, self.losses, now_s, jitter)
        if self._unreached == 0:
            self._unreached_since_s = now_s
        self._unreached += 1
        waited_s = now_s - self._unreached_since_s
        return after_unreached(grant.worker_id, self._unreached, waited_s, self._request.queue_ttl_s, jitter)

    async def _condemned(self, verdict: Condemned) -> FairwayError:
        """Return the error of the request, once the fleet refuses its input."""
        if (poisons := self._request.ports.poisons) is not None:
            await poisons.condemn(self.spec, verdict.deaths)
        return condemned_error(self.spec, verdict.deaths)

    def _check_quarantine(self) -> None:
        """Raise PoisonedInput for a suspect whose input another request proved to be the cause."""
        poisons = self._request.ports.poisons
        if self._losses.trial_tokens and poisons is not None:
            poisons.check(self.spec)

    def _log_placed_again(self, grant: AnyGrant, outcome: Outcome) -> None:
        cause = "lost" if isinstance(outcome, Lost) else outcome.reason.value
        cause = "not_finite" if _is_not_finite(outcome) else cause
        self._request.telemetry.placed_again(cause)
        log.info(
            "sequence.placed_again",
            request_id=self.spec.request_id,
            choice=self.choice,
            worker_id=grant.worker_id,
            after=outcome.message if isinstance(outcome, Lost) else outcome.reason.value,
            produced=len(self._produced),
        )

    def _record_use(self, end: SequenceEnd) -> None:
        """A resume may find cached blocks that this request itself computed: they do not count as cached."""
        self.device_us += end.device_us
        if self._first_run:
            self.cached_tokens = end.cached_tokens

    def _error(self, end: SequenceEnd) -> FairwayError:
        if end.reason is FinishReason.DEADLINE:
            return DeadlineExceeded("the deadline passed while the output was being produced")
        if end.reason is FinishReason.SLOW_READER:
            return SlowReader("the output was not read for too long; read faster or request less")
        if end.reason is FinishReason.ERROR:
            return self._request.ports.error_of(end.error_reason, end.error_message)
        return InternalError(f"the worker ended the sequence with {end.reason.value}")

    def _result(self, end: SequenceEnd) -> ChoiceResult:
        self._record_use(end)
        now_s = self._clock.monotonic_s()
        self._pace.finished(len(self._produced), now_s)
        self.timer.enter(Stage.SEND, now_s)
        self.timer.split_wait(end.engine_wait_us / 1e6)
        return ChoiceResult(self.choice, end.reason, end.stop, end.output_tokens)

    # --- SequenceSink: called by the worker client's reader -------------------------------------

    def on_accepted(self) -> None:
        self._accepted = True
        self._refusals = self._unreached = 0
        self.timer.enter(Stage.ENGINE_WAIT, self._clock.monotonic_s())

    def on_not_admitted(self, reason: NotAdmittedReason) -> None:
        self._resolve(StartRefused(reason))

    def on_tokens(
        self, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        now_s = self._clock.monotonic_s()
        if self.timer.current is not Stage.DECODE:
            self.timer.enter(Stage.DECODE, now_s)
        if ids:
            self._pace.tokens(len(ids), now_s)
        produced = self._produced
        if offset != len(produced):
            self._resolve(Lost(f"received token {offset}, expected token {len(produced)}"))
            return
        produced.extend(ids)
        self._chars += len(text)
        self._sink.on_tokens(self.choice, offset, ids, text, logprobs)

    def on_finished(self, end: SequenceEnd) -> None:
        self._resolve(end)

    def on_lost(self, message: str) -> None:
        self._resolve(Lost(message))

    def _resolve(self, outcome: Outcome) -> None:
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(outcome)


def _is_not_finite(outcome: Outcome) -> bool:
    return isinstance(outcome, SequenceEnd) and outcome.error_reason == NOT_FINITE


def _refusal_of(outcome: asyncio.Future[Outcome]) -> NotAdmittedReason | None:
    if not outcome.done() or outcome.cancelled():
        return None
    found = outcome.result()
    return found.reason if isinstance(found, StartRefused) else None
