"""The work of a generation: its choices, or the stored answer of an equal request."""

from __future__ import annotations

from dataclasses import replace

from fairway.task_group import TaskGroup
from services.core.errors import first_failure
from services.core.generation import Usage
from services.core.usage import RequestUsage
from services.gateway.events import Accepted, ChoiceResult, Finished, RequestSink
from services.gateway.requests.choice import ChoiceRun, SharedScores
from services.gateway.requests.request import Request
from services.gateway.requests.terms import Admitted
from services.gateway.response_cache import CachedAnswer, CollectedAnswer, ResponseCache
from services.gateway.safety.screen import OutputScreen


def work_of(admitted: Admitted, sink: RequestSink, request: Request) -> Sequences:
    """Return the work of a generation. An equal request has an equal answer only if it draws nothing."""
    cache, spec = admitted.ports.responses, admitted.spec
    if cache is not None and admitted.terms.cache and spec.sampling.temperature == 0 and spec.choices == 1:
        return StoredAnswer(admitted, sink, request, cache)
    return Sequences(admitted, sink, request)


class Sequences:
    """The choices of a generation, run concurrently. Their sink receives acceptance and tokens."""

    def __init__(self, admitted: Admitted, sink: RequestSink, request: Request) -> None:
        self.reservation = admitted.reservation
        self.choices: tuple[ChoiceRun, ...] = ()
        self._admitted = admitted
        self._sink = sink
        self._request = request
        self._results: tuple[ChoiceResult, ...] = ()
        self._screen: OutputScreen | None = None

    @property
    def replaceable(self) -> bool:
        return self._admitted.reroute is not None and not self._has_output()

    def _has_output(self) -> bool:
        return any(run.begun for run in self.choices)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self._admitted.spec.prompt.ids),
            output_tokens=sum(run.output_tokens for run in self.choices),
            cached_tokens=max((run.cached_tokens for run in self.choices), default=0),
            device_s=sum(run.device_us for run in self.choices) / 1e6,
        )

    async def run(self) -> None:
        """Run the choices; the first failure ends the others and is raised itself."""
        admitted, spec = self._admitted, self._admitted.spec
        admitted.telemetry.accepted(admitted.tenant.meta.name, spec)
        scores = SharedScores(spec.scored_tokens, min(len(admitted.produced(0).ids), spec.scored_tokens))
        timer, sink, screen = self._request.timer, self._sink, self._screened()
        self.choices = tuple(
            ChoiceRun(admitted, choice, screen or sink, timer.fork(), scores, screen, self._has_output)
            for choice in range(spec.choices)
        )
        for run in self.choices:
            run.allow(self._request.allowed)
        self._sink.on_accepted(self._accepted())
        if admitted.accepted is not None:
            admitted.accepted()
        self._results = await self._run_choices()

    async def _run_choices(self) -> tuple[ChoiceResult, ...]:
        run_one = ChoiceRun.run if self._screen is None else self._screen.run
        if len(self.choices) == 1:
            return (await run_one(self.choices[0]),)
        try:
            async with TaskGroup() as group:
                tasks = [group.create_task(run_one(run)) for run in self.choices]
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        return tuple(task.result() for task in tasks)

    def _screened(self) -> OutputScreen | None:
        """Return what holds the output of this run until its verdicts; None: it has no safety pack."""
        admitted = self._admitted
        if admitted.safety is not None:
            window = admitted.terms.client_window
            self._screen = OutputScreen(admitted.safety, admitted.spec, self._sink, admitted.released, window)
        return self._screen

    async def reroute(self) -> None:
        """Resolve the request again; its next run is accepted again, and copied for no shadow version."""
        assert self._admitted.reroute is not None, "only a replaceable request has another route"
        self._admitted = replace(await self._admitted.reroute(self._admitted), accepted=None)

    def report(self) -> RequestUsage:
        if self._admitted.safety is not None:
            self._admitted.safety.end(self.usage)
        return self._admitted.usage_report(self.usage)

    async def finished(self, usage: Usage) -> Finished:
        """Return the result. Its clock covers the settlement, for which the client waits too."""
        admitted, spec = self._admitted, self._admitted.spec
        for result in self._results if spec.limits.max_tokens else ():
            admitted.ports.outputs.note(
                admitted.payer.tenant.meta.name, spec.version_digest, result.output_tokens
            )
        resumes = sum(run.losses for run in self.choices)
        return Finished(self._results, usage, self._request.clock(), resumes)

    def _accepted(self, *, cached: bool = False) -> Accepted:
        admitted, spec = self._admitted, self._admitted.spec
        return Accepted(
            request_id=spec.request_id,
            model=spec.model,
            version_digest=spec.version_digest,
            route_revision=spec.route_revision,
            seed=spec.sampling.seed,
            prompt_tokens=len(spec.prompt.ids),
            cached=cached,
            request_rate=admitted.reservation.request_rate,
            token_rate=admitted.reservation.token_rate,
            degradations=admitted.degradations,
            form=spec.form,
            weights_digest=spec.weights_digest,
            base_digest=spec.base_digest,
            exact=spec.exact,
            size=spec.size,
            safety=spec.safety,
        )


class StoredAnswer(Sequences):
    """A generation whose client takes a stored answer. Without one it runs, and its answer is stored."""

    def __init__(self, admitted: Admitted, sink: RequestSink, request: Request, cache: ResponseCache) -> None:
        super().__init__(admitted, sink, request)
        self._cache = cache
        self._found: CachedAnswer | None = None
        self._collected: CollectedAnswer | None = None

    @property
    def usage(self) -> Usage:
        """A stored answer counts its prompt as cached; no device computed it."""
        if self._found is None:
            return super().usage
        prompt_tokens = len(self._admitted.spec.prompt.ids)
        return Usage(prompt_tokens, self._found.finished.usage.output_tokens, cached_tokens=prompt_tokens)

    async def run(self) -> None:
        admitted = self._admitted
        if self._collected is None:
            admitted.telemetry.accepted(admitted.tenant.meta.name, admitted.spec)
            found = self._found = await self._cache.find(admitted.reservation.tenant_id, admitted.spec)
            if found is not None:
                self._sink.on_accepted(self._accepted(cached=True))
                if admitted.egress is not None:
                    await admitted.egress.answer(len(found.ids))
                self._sink.on_tokens(0, 0, found.ids, found.text, found.logprobs)
                self._results = found.finished.choices
                return
            self._sink = self._collected = CollectedAnswer(self._sink)
        await super().run()

    async def finished(self, usage: Usage) -> Finished:
        finished, admitted = await super().finished(usage), self._admitted
        answer = self._collected.answer(finished) if self._collected is not None else None
        if answer is not None:
            keeping = self._cache.put(admitted.reservation.tenant_id, admitted.spec, answer)
            admitted.ports.supervisor.spawn(f"keep {self._request.request_id}", keeping)
        return finished
