"""Verdicts of the judges that a pack names: generations of guard models, in the turn of the tenant.

Each runs as every generation does, and is reported to the usage ledger as one. No pack reads it, and limits
are charged for it with the request that it judges for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec

from fairway.formats.guards import GUARDS, GuardPrompt, JudgedTurn, UnreadableVerdict
from fairway.formats.safety import JudgeRule
from fairway.task_group import TaskGroup
from fairway.v1 import common_pb2, inference_pb2
from services.core.errors import FailedPrecondition, PromptTooLong, first_failure
from services.core.generation import FinishReason
from services.core.rollouts.routes import SHADOW_TENANT
from services.gateway.catalog import ModelCatalog, Route
from services.gateway.events import Received, never
from services.gateway.requests.request import Request
from services.gateway.requests.sequences import Sequences
from services.gateway.requests.streaming import BufferedStream, Completion, complete
from services.gateway.requests.terms import Admitted, RunTerms, ticket_of
from services.gateway.requests.validate import Checked, Validator
from services.gateway.safety.requests import Asker
from services.gateway.service_types import GatewayLimits, Ports
from services.gateway.telemetry import GatewayTelemetry
from services.ports.limiter import Reservation

# A text that is too long for a model is judged in up to 2 to the power of this many parts.
MOST_HALVINGS: Final = 7
_OVERLAP: Final = 8  # a part repeats so small a share of the one before
_FACE: Final = "safety"
_GREEDY: Final = common_pb2.Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)


class Judges:
    """Asks guard models by the run of every request."""

    def __init__(
        self, catalog: ModelCatalog, validator: Validator, ports: Ports, limits: GatewayLimits
    ) -> None:
        self._catalog = catalog
        self._validator = validator
        self._limits = limits
        telemetry = GatewayTelemetry(clock=ports.clock)  # no request of a client, and in no indicator
        self._ports = replace(ports, limiter=None, telemetry=telemetry)
        self._unreported = replace(self._ports, report_usage=lambda _event: None)

    async def scores(
        self, asker: Asker, rule: JudgeRule, turns: Sequence[JudgedTurn], halvings: int = MOST_HALVINGS
    ) -> dict[str, float]:
        """Return the score of each label of the rule in the last turn, as ``Classifiers.scores`` does.

        One that is too long for the model is judged in parts, each after the ends of the turns before it.
        """
        try:
            return await self._judged(asker, rule, turns)
        except PromptTooLong:
            if not halvings:
                raise
        *before, last = turns
        shorter = [replace(turn, text=turn.text[len(turn.text) // 2 :]) for turn in before]
        found = dict.fromkeys(rule.labels, 0.0)
        for half in halves(last.text):
            part = await self.scores(asker, rule, (*shorter, replace(last, text=half)), halvings - 1)
            found = {label: max(score, part[label]) for label, score in found.items()}
        return found

    async def _judged(self, asker: Asker, rule: JudgeRule, turns: Sequence[JudgedTurn]) -> dict[str, float]:
        prompts = GUARDS[rule.template].prompts(turns, rule.guidelines)
        try:
            async with TaskGroup() as group:
                tasks = [group.create_task(self._verdict(asker, rule, prompt)) for prompt in prompts]
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        named: dict[str, float] = {}
        for task in tasks:
            named |= task.result()
        return {label: named.get(label, 0.0) for label in rule.labels}

    async def _verdict(self, asker: Asker, rule: JudgeRule, prompt: GuardPrompt) -> dict[str, float]:
        """Return the labels that an answer names. Raises FailedPrecondition for one that cannot be read."""
        answer = await self._completed(asker, rule, prompt)
        (end,) = answer.finished.choices
        first = answer.logprobs[0][0] if answer.logprobs[0] else None
        alternatives = dict(zip(first.top_tokens, first.top_logprobs, strict=True)) if first else {}
        try:
            if end.finish_reason is not FinishReason.STOP and prompt.max_tokens > 1:
                raise UnreadableVerdict(f"an answer was cut after {end.output_tokens} tokens")
            return GUARDS[rule.template].read(prompt, answer.texts[0], alternatives)
        except UnreadableVerdict as error:
            raise FailedPrecondition(f"{rule.model}: {error}", model=rule.model) from error

    async def _completed(self, asker: Asker, rule: JudgeRule, prompt: GuardPrompt) -> Completion:
        ports = self._unreported if asker.payer.tenant.meta.name == SHADOW_TENANT else self._ports
        now_s, unix_us = ports.clock.monotonic_s(), int(ports.clock.unix_s() * 1e6)
        left_s = min(max(0.0, asker.deadline_s - now_s), self._limits.max_timeout_s)
        received = Received(now_s, unix_us, asker.next_id(), _FACE, asker.traceparent)
        request = Request(RunTerms(received, left_s), ports)
        buffer = BufferedStream(self._limits.heartbeat_s, withdraws=never)
        route: Route | None = None

        async def admitted(_: Admitted | None = None) -> Admitted:
            nonlocal route
            route = asker.route(self._catalog, rule.model)
            found = await self._admitted(asker, route, prompt, request, ports)
            return replace(found, reroute=admitted)

        async def admit() -> Sequences:
            return Sequences(await admitted(), buffer, request)

        def start() -> Request:
            ports.supervisor.spawn(f"judge {request.request_id}", request.deliver(admit, buffer))
            return request

        try:
            return await complete(buffer.events(start), parts=False)
        finally:
            if route is not None:
                use = asker.use_of(route)
                use.is_reported = True
                use.add(request.usage)

    async def _admitted(
        self, asker: Asker, route: Route, prompt: GuardPrompt, request: Request, ports: Ports
    ) -> Admitted:
        """Return the generation on a route, within the limits of its model alone."""
        tenant_id, terms = asker.payer.tenant.meta.name, request.terms
        model = await self._catalog.text_model(route.version_digest)
        if prompt.guideline and not model.is_guided:
            raise FailedPrecondition(
                f"the chat template of {route.model} takes no guideline: publish the version with the "
                "template of its family",
                model=route.model,
            )
        generation, checked = _generation(route, prompt, asker), Checked(route, asker.priority)
        spec = await self._validator.resolve(asker.principal, generation, request.request_id, checked)
        if ports.poisons is not None:
            ports.poisons.check(spec)
        ports.retries.request_began(ports.clock.monotonic_s())
        return Admitted(
            spec,
            Reservation(tenant_id, request.request_id),
            asker.payer,
            ticket_of(ports, tenant_id, spec, terms.timeout_s),
            terms,
            ports,
            self._limits,
            request.telemetry,
            price=self._catalog.price(route.model, asker.priority),
        )


def halves(text: str) -> tuple[str, str]:
    """Return both halves of a text; the second begins before the end of the first."""
    half = -(-len(text) // 2)
    return text[:half], text[max(0, half - len(text) // _OVERLAP) :]


def _generation(route: Route, prompt: GuardPrompt, asker: Asker) -> inference_pb2.Generation:
    found = inference_pb2.Generation(
        model=route.model, max_output_tokens=prompt.max_tokens, session_key=asker.session_key
    )
    for turn in prompt.turns:
        found.chat.messages.add(role=turn.role, content=turn.text)
    if prompt.guideline:
        found.chat.template_variables = msgspec.json.encode({"guideline": prompt.guideline}).decode()
    found.sampling.CopyFrom(_GREEDY)
    found.sampling.constraint.regex = prompt.pattern
    if prompt.logprobs:
        found.logprobs = prompt.logprobs
    return found
