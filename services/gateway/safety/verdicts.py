"""Verdicts of the models that a pack names, in the turn of the tenant: rows of classifiers, generations of
judges.

A generation runs as every one does, and is reported to the usage ledger as one. No pack reads it, and limits
are charged for it with the request that it judges for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from fairway.formats.guards import GUARDS, GuardPrompt, JudgedTurn, UnreadableVerdict
from fairway.formats.safety import JudgeRule
from fairway.task_group import TaskGroup
from fairway.v1 import common_pb2, inference_pb2
from services.core.errors import (
    FailedPrecondition,
    FairwayError,
    PoisonedInput,
    PromptTooLong,
    first_failure,
)
from services.core.fixed_cost.rows import RowEnd, RowsRequest
from services.core.fixed_cost.signature import Operation, Signature
from services.core.generation import FinishReason, Usage
from services.core.rollouts.routes import SHADOW_TENANT
from services.gateway.catalog import ModelCatalog, Route
from services.gateway.events import Received, never
from services.gateway.policy.claims import claims_of
from services.gateway.requests.request import Request
from services.gateway.requests.sequences import Sequences
from services.gateway.requests.streaming import BufferedStream, Completion, complete
from services.gateway.requests.terms import Admitted, RunTerms, ticket_of, usage_of
from services.gateway.requests.validate import Checked, Validator
from services.gateway.rows.inputs import PreparedRows, output_tensors, text_rows
from services.gateway.rows.results import class_outputs
from services.gateway.safety.requests import Asker, ModelRule, ModelUse
from services.gateway.service_types import GatewayLimits, Ports
from services.gateway.telemetry import GatewayTelemetry
from services.gateway.text.text_model import TextModel
from services.ports.limiter import Reservation
from services.ports.rows import RowRunner

log = structlog.get_logger()

# A text that is too long for a model is judged in up to 2 to the power of this many parts.
_MOST_HALVINGS: Final = 7
_OVERLAP: Final = 8  # a part repeats so small a share of the one before
_FACE: Final = "safety"
_GREEDY: Final = common_pb2.Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)


class RowClassifiers:
    """Implements ``Classifiers``. A verdict is no request of the tenant: no rate of requests counts it."""

    def __init__(self, catalog: ModelCatalog, runner: RowRunner, ports: Ports, judges: Judges) -> None:
        self._catalog = catalog
        self._runner = runner
        self._ports = ports
        self._judges = judges

    async def scores(self, asker: Asker, rule: ModelRule, turns: Sequence[JudgedTurn]) -> Mapping[str, float]:
        if isinstance(rule, JudgeRule):
            return await self._judges.scores(asker, rule, turns)
        route = asker.route(self._catalog, rule.model)
        model = (await self._catalog.text_model(route.version_digest)).of_rows
        signature = _checked(rule, model)
        prepared = await self._rows(model, asker.payer.tenant.meta.name, turns[-1].text)
        if self._ports.poisons is not None:
            self._ports.poisons.check_rows(route.model, route.version_digest, prepared.rows)
        ends = await self._runner.run(self._request(asker, route, prepared))
        self._count(asker, route, prepared, ends)
        for row, end in zip(prepared.rows, ends, strict=True):
            if end.error is not None:
                if isinstance(end.error, PoisonedInput) and self._ports.poisons is not None:
                    deaths = int(end.error.metadata.get("deaths", "1"))
                    await self._ports.poisons.condemn_row(
                        asker.request_id, route.model, route.version_digest, row, deaths
                    )
                raise end.error
        found = _probabilities(ends, signature)
        return {name: float(found[at]) for at, name in enumerate(signature.classes.names)}

    def settle(self, asker: Asker) -> None:
        uses, asker.uses = asker.uses, {}
        for (model, digest), use in uses.items():
            self._ports.supervisor.spawn(f"settle {use.request_id}", self._settle(asker, model, digest, use))

    async def _settle(self, asker: Asker, model: str, digest: str, use: ModelUse) -> None:
        """Charge the use of one model. A tenant without room for it is charged in the ledger alone."""
        ports, payer, name, usage = self._ports, asker.payer, use.request_id, use.usage
        price = self._catalog.price(model, asker.priority)
        try:
            if ports.limiter is not None:
                reservation = await ports.limiter.admit(payer.tenant.meta.name, name, ())
                try:
                    output = usage.output_tokens
                    claims = claims_of(payer, price, usage.prompt_tokens, output, output)
                    reservation = await ports.limiter.reserve(reservation, claims, price)
                finally:
                    await ports.limiter.settle(reservation, usage)
        except FairwayError as error:
            log.info("safety.use_not_claimed", request_id=asker.request_id, reason=error.reason)
        if not use.is_reported:
            ports.report_usage(usage_of(payer, name, model, digest, price, usage, ports.clock.unix_s()))

    async def _rows(self, model: TextModel, tenant_id: str, text: str) -> PreparedRows:
        """Return the text as one row, or in parts where that is too long for the model."""
        parts, texts = [text], self._catalog.texts
        for _ in range(_MOST_HALVINGS):
            try:
                return await text_rows(texts, model, tenant_id, parts, (), cut_to=None, field="text")
            except PromptTooLong:
                parts = [half for part in parts for half in _halves(part)]
        return await text_rows(texts, model, tenant_id, parts, (), cut_to=None, field="text")

    def _request(self, asker: Asker, route: Route, prepared: PreparedRows) -> RowsRequest:
        tenant, now_s = asker.payer.tenant, self._ports.clock.monotonic_s()
        return RowsRequest(
            request_id=asker.use_of(route).request_id,
            tenant_id=tenant.meta.name,
            model=route.model,
            version_digest=route.version_digest,
            rows=prepared.rows,
            priority=asker.priority,
            route_revision=route.route_revision,
            tenant_weight=tenant.weight,
            node_group=tenant.node_group,
            isolation_waits=tenant.isolation_waits,
            kv_share=tenant.kv_share,
            deadline_s=asker.deadline_s,
            traceparent=asker.traceparent,
            target_s=self._ports.ttft_target_s(route.model, asker.priority) or 0.0,
            received_s=now_s,
        )

    def _count(self, asker: Asker, route: Route, prepared: PreparedRows, ends: Sequence[RowEnd]) -> None:
        counted = zip(prepared.tokens, ends, strict=True)
        tokens = sum(count for count, end in counted if end.error is None)
        device_s = sum(end.device_s for end in ends)
        asker.use_of(route).add(Usage(tokens, 0, device_s=device_s))


def _checked(rule: ModelRule, model: TextModel) -> Signature:
    """Return the signature of a model that has the labels of a rule. Raises FailedPrecondition."""
    signature = model.signature
    if signature is None or signature.operation is not Operation.CLASSIFY:
        raise FailedPrecondition(f"{rule.model} classifies no texts: roll out a pack that names a classifier")
    if missing := sorted(rule.labels.keys() - set(signature.classes.names)):
        raise FailedPrecondition(f"{rule.model} has no label {missing[0]!r}: roll out a pack that fits it")
    return signature


def _probabilities(ends: Sequence[RowEnd], signature: Signature) -> NDArray[np.float64]:
    """Return the highest probability of each label in any row. Raises FailedPrecondition for other values."""
    (logits,) = output_tensors(ends, (), signature)
    labels = len(signature.classes.names)
    if logits.datatype != "FP32" or logits.shape != (len(ends), labels):
        raise FailedPrecondition(f"a classifier gave {logits.datatype} of shape {list(logits.shape)}")
    tensor, _ = class_outputs(logits, signature.classes)
    found = np.frombuffer(tensor.data, np.float64).reshape(len(ends), labels)
    if not ((found >= 0) & (found <= 1)).all():
        raise FailedPrecondition("a classifier gave values that are no probabilities")
    highest: NDArray[np.float64] = found.max(axis=0)
    return highest


class Judges:
    """Requests verdicts of guard models by the run of every request."""

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
        self, asker: Asker, rule: JudgeRule, turns: Sequence[JudgedTurn], halvings: int = _MOST_HALVINGS
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
        for half in _halves(last.text):
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


def _halves(text: str) -> tuple[str, str]:
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
