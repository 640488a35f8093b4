"""One choice of a request: placed, run, and placed again until it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import structlog
from msgspec.structs import replace as replaced

from services.core.errors import (
    FairwayError,
    VersionGone,
)
from services.core.generation import (
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
from services.gateway.events import ChoiceResult, OutputSink
from services.gateway.poison import condemned_error
from services.gateway.policy.retry import PlaceAgain
from services.gateway.requests.attempts import (
    Lost,
    Outcome,
    SequenceAttempts,
    StartRefused,
    is_not_finite,
    placed,
)
from services.gateway.requests.stage_timer import Stage, StageTimer
from services.gateway.requests.terms import Admitted
from services.gateway.safety.screen import OutputScreen

log = structlog.get_logger()
# A worker that lost its lease for a moment returns within it.
GONE_AFTER_S: Final = 10.0
# Takes the next of them: the place of the first, the tokens and their entries.
Take = Callable[[int, Sequence[int], Sequence[TokenLogprobs]], None]


class ChoiceRun(SequenceAttempts):
    """The sink of its sequence on any worker that runs it; stores what a resume needs.

    ``run`` is the only task that writes the control state; the token path only appends.
    """

    def __init__(
        self,
        request: Admitted,
        choice: int,
        sink: OutputSink,
        timer: StageTimer,
        scores: SharedScores,
        screen: OutputScreen | None = None,
        has_output: Callable[[], bool] = lambda: False,
    ) -> None:
        """The sequence continues what an earlier run produced; its sink receives only the later output.

        ``scores``: those of the prompt, which the request's choices share. Choice 0 is made first.
        ``screen``: the sink, where it holds output until its verdicts; None: nothing is held.
        ``has_output``: whether any choice of the request has some.
        """
        super().__init__(request.spec, request.ports, request.queue_ttl_s)
        produced = request.produced(choice)
        self.choice = choice
        self.timer = timer
        self.cached_tokens = 0
        self._request = request
        self._clock = request.ports.clock
        self._sink = sink
        self._screen = screen
        self._pace = request.telemetry.pace()
        self._first_run = True  # the worker computes the prompt for the first time
        self._granted = bool(produced.ids)  # whether it ever had a placement
        # The stream begins with the prompt where its log-probabilities are requested.
        self._scored = min(len(produced.ids), self._spec.scored_tokens)
        self._scores = scores
        self._has_output = has_output
        self._sent_begun = False  # whether the last start stated that the request has output
        self._follows = choice > 0 and scores.follow(self._scored, self._take_scores)
        self._produced = list(produced.ids[self._scored :])
        self._chars = produced.chars
        # What the transport took of the stream. Output offsets: what the client permits, and the limit sent
        # to the worker, which holds back nothing of the prompt.
        self._taken = len(produced.ids)
        self._window = request.limits.window_tokens
        self._allowed = request.terms.client_window
        self._limit = 0
        # What withholds credit beyond the windows; None: nothing does.
        self._egress = egress = request.egress
        self._earned = None if egress is None else egress.wait(self._grant)
        self._paid = 0  # tokens of the next start that the egress rates let pass; 0: it is not limited
        self._worker_id = ""  # the worker of its last run
        self._preemptions = 0  # runs that ended for the sake of others
        self._held = False  # whether the egress rates left its last run without credit at its end

    @property
    def output_tokens(self) -> int:
        return len(self._produced)

    @property
    def begun(self) -> bool:
        """Whether anything of its stream arrived, of any worker."""
        return bool(self._scored or self._produced)

    @property
    def buffered_tokens(self) -> int:
        """Tokens that arrived and that the transport has not taken."""
        return self._scored + len(self._produced) - self._taken

    async def run(self) -> ChoiceResult:
        """Return once the choice ended successfully. Raises the error that ended it otherwise."""
        if self._follows:
            self.timer.enter(Stage.ENGINE_WAIT, self._clock.monotonic_s())
            await self._scores.complete()
            self._granted = True  # its client has output, of the first choice's worker
            if not self._spec.limits.max_tokens:
                return self._result(SequenceEnd(FinishReason.LENGTH))
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

    def filtered(self) -> ChoiceResult:
        """Return the result of a run that was cancelled because of its output, which is charged."""
        return self._result(SequenceEnd(FinishReason.FILTERED, output_tokens=self.output_tokens))

    def credit(self, tokens: int) -> None:
        """The transport took ``tokens``: the worker earns as much credit, sent in quarters of the window."""
        self._taken += tokens
        window = self._window
        if (self._taken_output + window - self._limit) * 4 >= window:
            self._extend()

    def allow(self, tokens: int) -> None:
        """The client's own window grew. Without a client window this has no effect."""
        if self._allowed is not None:
            self._allowed += tokens
            if self._screen is not None:
                self._screen.allow(self.choice, tokens)
            self._extend()

    def _credit_limit(self) -> int:
        """The output offset up to which tokens may arrive.

        Unread tokens of a wide client window are buffered here, so it never widens this process's own window.
        What a screen holds, no reader can take: it leaves the room of both windows as it is.
        """
        limit = self._taken_output + self._window
        if self._allowed is not None:
            limit = min(limit, self._allowed)
        return limit if self._screen is None else limit + self._screen.held(self.choice)

    def _extend_for_held(self) -> None:
        """Earn what is held, before the worker runs out of credit."""
        if (self._limit - len(self._produced)) * 4 < self._window:
            self._extend()

    @property
    def _taken_output(self) -> int:
        return max(0, self._taken - self._spec.scored_tokens)

    def _extend(self) -> None:
        limit = self._credit_limit()
        if self._running is None or limit <= self._limit:
            return
        if self._egress is None or self._earned is None or not self._egress.limited:
            self._grant(limit - self._limit)
            return
        limit = min(limit, self._spec.limits.max_tokens)
        if limit > self._limit:
            self._egress.want(self._earned, limit - self._limit)

    def _grant(self, tokens: int) -> None:
        assert self._running is not None, "only a run waits for credit"
        self._running.credit(tokens)
        self._limit += tokens

    async def _place(self, excluded: tuple[str, ...]) -> AnyGrant:
        place = partial(self._place_unless, self._gone_watch()) if self.begun else self._place_or_wake()
        self.timer.enter(Stage.QUEUE, self._clock.monotonic_s())
        try:
            # The first token is paid for before the placement, so that nothing waits on a worker for it.
            self._paid = 0 if self._egress is None else await self._egress.first_token()
            return await placed(place, self._place_spec(), excluded)
        finally:
            self.timer.enter(Stage.DISPATCH, self._clock.monotonic_s())

    def _gone_watch(self) -> Callable[[], FairwayError | None]:
        """Return what finds that nothing has served the version of a begun output for a while."""
        serves, spec, served_s = self._request.ports.serves, self._spec, self._clock.monotonic_s()

        def gone() -> FairwayError | None:
            nonlocal served_s
            now_s = self._clock.monotonic_s()
            if serves(spec.model, spec.version_digest):
                served_s = now_s
            return None if now_s - served_s < GONE_AFTER_S else self._version_gone()

        return gone

    def _begun_since(self) -> bool:
        return self._has_output() and not self._sent_begun

    def _version_gone(self) -> VersionGone:
        spec = self._spec
        return VersionGone(
            f"{spec.model} withdrew version {spec.version_digest} and lost its last worker before the "
            "output ended; send the request again",
            model=spec.model,
            version_digest=spec.version_digest,
        )

    def _place_spec(self) -> PlaceSpec:
        request, spec = self._request, self._spec
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
            queue_ttl_s=self._most_queued_s(),
            ticket=request.ticket,
            traceparent=self.timer.traceparent,
            prefix_hashes=spec.prompt.prefix_hashes[: request.limits.placed_prefix_blocks],
            deadline_left_s=self._time_left_s(),
            tenant_weight=tenant.weight,
            attempt=received.attempt,
            ttft_target_s=request.ports.ttft_target_s(spec.model, spec.priority),
            committed_tokens_per_minute=tenant.committed_tokens_per_minute,
            begun=self._granted,
            node_group=tenant.node_group,
            isolation_waits=request.ports.waits_for_node(tenant, spec.model),
            kv_share=tenant.kv_share,
            size_reason="" if spec.size is None else spec.size.text,
            safety="" if spec.safety is None else spec.safety.text,
        )

    def _most_queued_s(self) -> float:
        """How long to queue. A stream that has begun waits until its deadline, to avoid a broken stream; the
        request of a deployment without replicas waits for the start of the first.
        """
        queue_ttl_s, left_s = self._request.queue_ttl_s, self._time_left_s()
        if self.begun:
            return max(queue_ttl_s, left_s)
        waking = self._request.ports.waking(self._spec.model)
        return queue_ttl_s if waking is None else max(queue_ttl_s, min(waking.hold_s, left_s))

    def _time_left_s(self) -> float:
        """The time until the request's deadline; above zero."""
        return max(0.001, self._request.deadline_s - self._clock.monotonic_s())

    async def _execute(self, grant: AnyGrant) -> Outcome:
        """Run under a grant until the outcome."""
        request = self._request
        # A start has at least one token of credit. A stream that resumes at the end of the client's window
        # exceeds it by that token.
        produced = len(self._produced)
        self._limit = max(0 if self._paid else self._credit_limit(), produced + 1)
        start = StartSpec(
            generation=self._spec,
            choice=self.choice,
            tenant_id=request.tenant.meta.name,
            grant=grant,
            initial_credit_tokens=self._limit - produced,
            produced_ids=tuple(self._produced),
            delivered_chars=self._chars,
            time_left_s=self._time_left_s(),
            traceparent=self.timer.traceparent,
            apart_tokens=self._trial_tokens,
            scored_tokens=self._scored,
            node_group=request.tenant.node_group,
            kv_share=request.tenant.kv_share,
            probe=self._screen is not None and self._screen.probed,
            unmerged=self._screen is not None and self._screen.judged,
            begun=self._has_output(),
        )
        self._sent_begun = start.begun
        if isinstance(grant, FallbackGrant):
            request.telemetry.placed_by_fallback()
        self._first_run = not self.begun
        self._worker_id = grant.worker_id
        try:
            return await self._attempt(start, self)
        finally:
            if self._egress is not None and self._earned is not None:
                unused = self._limit - len(self._produced)  # credit on its way, if the worker waited for some
                waited = self._egress.leave(self._earned, unused)
                self._held = waited or (self._paid > 0 and unused > 0)

    def _decide(self, outcome: Outcome, grant: AnyGrant) -> PlaceAgain | Condemned:
        """Return the next placement, or that there is none because the input is the cause of its losses.

        Raises another error that ends the choice.
        """
        if self.begun and outcome == StartRefused(NotAdmittedReason.STALE_ROUTE):
            raise self._version_gone()  # a worker that had the version has another's weights in its place
        if isinstance(outcome, SequenceEnd):
            self._record_use(outcome)
            if self._held and outcome.reason is FinishReason.SLOW_READER:
                # Not its reader: the worker ended a sequence that its egress rates had left without credit.
                outcome = replace(outcome, reason=FinishReason.PREEMPTED)
        again = self._after(outcome, grant.worker_id)
        if isinstance(again, PlaceAgain):
            self._log_placed_again(grant, outcome)
        return again

    async def _condemned(self, verdict: Condemned) -> FairwayError:
        """Return the error of the request, once the fleet refuses its input."""
        if (poisons := self._request.ports.poisons) is not None:
            await poisons.condemn(self._spec, verdict.deaths)
        return condemned_error(self._spec, verdict.deaths)

    def _check_quarantine(self) -> None:
        """Raise PoisonedInput for a suspect whose input another request proved to be the cause."""
        poisons = self._request.ports.poisons
        if self._trial_tokens and poisons is not None:
            poisons.check(self._spec)

    def _log_placed_again(self, grant: AnyGrant, outcome: Outcome) -> None:
        cause = "lost" if isinstance(outcome, Lost) else outcome.reason.value
        cause = "not_finite" if is_not_finite(outcome) else cause
        self._request.telemetry.placed_again(cause)
        log.info(
            "sequence.placed_again",
            request_id=self._spec.request_id,
            choice=self.choice,
            worker_id=grant.worker_id,
            after=outcome.message if isinstance(outcome, Lost) else outcome.reason.value,
            produced=len(self._produced),
        )

    def _record_use(self, end: SequenceEnd) -> None:
        """A resume may find cached blocks that this request itself computed: they do not count as cached."""
        if self._first_run:
            self.cached_tokens = end.cached_tokens
        self._preemptions += end.reason is FinishReason.PREEMPTED
        preemptions = self._preemptions + end.run.preemptions
        worker_id = self._worker_id
        self._request.telemetry.ran(replaced(end.run, worker_id=worker_id, preemptions=preemptions))

    def _result(self, end: SequenceEnd) -> ChoiceResult:
        self._record_use(end)
        self.device_us += end.device_us
        now_s = self._clock.monotonic_s()
        self._pace.finished(len(self._produced), now_s)
        self.timer.enter(Stage.SEND, now_s)
        self.timer.split_wait(end.engine_wait_us / 1e6)
        return ChoiceResult(self.choice, end.reason, end.stop, end.output_tokens)

    # --- SequenceSink: called by the worker client's reader -------------------------------------

    def on_accepted(self) -> None:
        super().on_accepted()
        self.timer.enter(Stage.ENGINE_WAIT, self._clock.monotonic_s())
        if self._paid:
            self._extend()

    def on_scores(self, offset: int, scores: Sequence[float]) -> None:
        if self._screen is not None:
            self._screen.on_scores(self.choice, offset, scores)

    def on_tokens(
        self, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        produced = self._produced
        if offset != self._scored + len(produced):
            self._resolve(Lost(f"received token {offset}, expected token {self._scored + len(produced)}"))
            return
        output = ids
        if self._scored < self._spec.scored_tokens:
            end = min(self._scored + len(ids), self._spec.scored_tokens)
            prompt, output = ids[: end - self._scored], ids[end - self._scored :]
            if list(prompt) != list(self._spec.prompt.ids[self._scored : end]):
                self._resolve(Lost("received other tokens than the prompt's: a worker of an earlier release"))
                return
            self._scored = end
            if self._egress is not None:
                self._egress.charge(len(prompt))
            if not self.choice:
                self._scores.add(offset, prompt, logprobs[: len(prompt)])
        if output or text:
            now_s = self._clock.monotonic_s()
            if self.timer.current is not Stage.DECODE:
                self.timer.enter(Stage.DECODE, now_s)
            if output:
                self._pace.tokens(len(output), now_s)
        produced.extend(output)
        self._chars += len(text)
        self._sink.on_tokens(self.choice, offset, ids, text, logprobs)
        if self._screen is not None:
            self._extend_for_held()

    def _take_scores(self, offset: int, ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> None:
        """Send what the first choice received of the prompt, as far as this one lacks it."""
        first = self._scored - offset
        if first < len(ids):
            self._scored = offset + len(ids)
            if self._egress is not None:
                self._egress.charge(len(ids) - first)
            self._sink.on_tokens(self.choice, offset + first, ids[first:], "", entries[first:])


class SharedScores:
    """The log-probabilities of a prompt, from the worker of the first choice, for all that follow it.

    Of an earlier run a choice may have less than the first has: it does not follow, and has its own computed.
    Written by the token path of the first choice.
    """

    def __init__(self, tokens: int, had: int) -> None:
        """``tokens``: of the prompt, 0 where none is wanted. ``had``: those of an earlier run."""
        self._tokens = tokens
        self._had = had
        self._takers: list[Take] = []
        self._complete = asyncio.Event()
        self._note(had)

    def follow(self, had: int, take: Take) -> bool:
        """Return whether a choice that has the entries of ``had`` tokens receives the rest by ``take``."""
        follows = self._had <= had < self._tokens
        if follows:
            self._takers.append(take)
        return follows

    def add(self, offset: int, ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> None:
        """Give what the first choice received to those that follow it."""
        for take in self._takers:
            take(offset, ids, entries)
        self._note(offset + len(ids))

    async def complete(self) -> None:
        """Return once the whole prompt is scored."""
        await self._complete.wait()

    def _note(self, scored: int) -> None:
        if scored >= self._tokens:
            self._complete.set()
