"""Admission: from a request to a runnable one, within its tenant's quotas and validated.

The cheapest checks run first, then the quotas; only requests within them are tokenised. Token rates and
budgets follow, because they need the exact prompt; where it is known without text work, the store takes them
with the slot. A request that is rejected after its admission releases its slot, but still counts against the
rate of requests.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from fairway.v1 import common_pb2, inference_pb2
from services.core.errors import FailedPrecondition, FairwayError, Unavailable
from services.core.generation import NO_USAGE, GenerationSpec, Principal
from services.core.limits import WORK, Claim, Limit, LimitKind, Price
from services.core.outputs.forms import OutputForm
from services.core.records import Priority, Tenant
from services.core.safety import SafetyPins
from services.gateway.catalog import ModelCatalog
from services.gateway.events import Received
from services.gateway.idempotency.record_codec import terms_of
from services.gateway.policy.claims import (
    NO_BOUNDS,
    Payer,
    RequestBounds,
    admission_limits,
    claims_of,
    usage_claims,
)
from services.gateway.policy.degrade import Degradation, DegradationKind, output_cap, smaller_model
from services.gateway.requests.quotas import RequestQuotas, check_timeout
from services.gateway.requests.request import Request
from services.gateway.requests.stage_timer import Stage
from services.gateway.requests.terms import Admitted, Resume, ticket_of
from services.gateway.requests.validate import Checked, Validator, session_key_of
from services.gateway.safety.inputs import filtered_generation
from services.gateway.safety.packs import SafetyTerms
from services.gateway.safety.requests import CHARS_PER_TOKEN, Asker, RequestSafety
from services.gateway.service_types import AnyRequest, GatewayLimits, Ports
from services.ports.limiter import NO_PRICE
from services.rpc.convert.inference import PRIORITY_OF, seconds_of
from services.runtime.identity import KeyDirectory, model_not_found

log = structlog.get_logger()

# Versions of a request whose input is filtered: of its route, of a larger size, of a smaller model.
_MOST_VERSIONS: Final = 3


class RequestAdmission:
    """Acquires the slot of every request. It releases what it acquired and cannot use."""

    def __init__(
        self,
        validator: Validator,
        identity: KeyDirectory,
        catalog: ModelCatalog,
        ports: Ports,
        limits: GatewayLimits,
    ) -> None:
        self._catalog = catalog
        self._validator = validator
        self._identity = identity
        self._ports = ports
        self._limits = limits
        self._quotas = RequestQuotas(identity, ports)

    async def admit(
        self, principal: Principal, generation: inference_pb2.Generation, request: Request
    ) -> Admitted:
        terms, timer, telemetry = request.terms, request.timer, request.telemetry
        resume, request_id = terms.resume, request.request_id
        if self._catalog.has(generation.model):
            telemetry.addressed(principal.tenant_id, generation.model, class_of(generation))
        checked, form = self._checked(principal, generation, resume)
        route = checked.route
        session_key = session_key_of(principal, generation)
        telemetry.routed(principal.tenant_id, route, checked.priority, session_key)
        payer = self._quotas.payer(principal, generation.user)
        self._quotas.require_recorded(payer)
        bounds = payer.bounds if resume is None else NO_BOUNDS  # a resumed request keeps its terms
        check_timeout(seconds_of(generation.timeout), bounds.timeout_s)
        asker = self._asker(principal, request, payer, checked.priority, session_key)
        obeyed = await self._obeyed(payer, route.version_digest, session_key, resume)
        safety = self._judged(obeyed, asker, route.version_digest)
        timer.enter(Stage.ADMIT, self._ports.clock.monotonic_s())
        # A resumed request was counted against the rates when it began.
        due = admission_limits(payer, anew=resume is None)
        short = (
            None
            if resume is not None or safety is not None
            else self._short(principal, generation, request_id, checked, bounds)
        )
        early = ((), NO_PRICE) if short is None else self._claims(payer, short)
        quota = await self._quotas.reserve(principal.tenant_id, request_id, due, *early)
        try:
            timer.enter(Stage.VALIDATE, self._ports.clock.monotonic_s())
            degradations: tuple[Degradation, ...] = ()
            if short is not None:
                spec = short
            else:
                found = await self._resolved(principal, generation, request, safety, asker, checked, form)
                spec, degradations, generation, safety = found
            telemetry.degraded(degradations, anew=resume is None)
            self._check_quarantine(spec)
            claims, price = early if short is not None else self._claims(payer, spec)
            if claims:
                timer.enter(Stage.ADMIT, self._ports.clock.monotonic_s())
                await quota.claim(claims, price)
            if terms.settlement is not None:
                timer.enter(Stage.ADMIT, self._ports.clock.monotonic_s())
                await terms.settlement.accept(terms_of(spec, degradations, self._ports.clock.unix_s()))
        except BaseException as error:
            if safety is not None:
                safety.end(NO_USAGE)
            await quota.undo(error)
            raise
        self._ports.retries.request_began(self._ports.clock.monotonic_s())
        ticket = ticket_of(self._ports, principal.tenant_id, spec, terms.timeout_s)
        ports, limits = self._ports, self._limits
        admitted = Admitted(
            spec, quota.reservation, payer, ticket, terms, ports, limits, telemetry, degradations
        )
        reroute = partial(self._reroute, principal, generation, bounds, asker)
        egress = ports.egress(principal.tenant_id, terms.received)
        return replace(admitted, price=price, reroute=reroute, egress=egress, safety=safety)

    async def _obeyed(
        self, payer: Payer, version_digest: str, session_key: str, resume: Resume | None
    ) -> SafetyTerms | None:
        """Return what a request obeys on a version: of a resumed one what it obeyed before.

        Raises Unavailable while it cannot be read: no request runs without what judges it.
        """
        packs = self._ports.packs
        if packs is None:
            return None
        model = self._catalog.model_of(version_digest)
        if resume is not None and resume.safety is not None:
            return await packs.pinned(model, version_digest, resume.safety)
        return await packs.terms(model, version_digest, payer.tenant, session_key)

    async def _obeyed_on(self, version_digest: str, safety: RequestSafety | None) -> SafetyTerms | None:
        """Return what a request obeys on another version: that has another pack of its own."""
        packs, pins = self._ports.packs, SafetyPins() if safety is None else safety.terms.pins
        if packs is None:
            return None
        return await packs.pinned(self._catalog.model_of(version_digest), version_digest, pins)

    def _asker(
        self, principal: Principal, request: Request, payer: Payer, priority: Priority, session_key: str
    ) -> Asker:
        terms = request.terms
        deadline_s = terms.received.monotonic_s + terms.timeout_s
        return Asker(
            request.request_id, principal, payer, priority, session_key, deadline_s, request.timer.traceparent
        )

    def _judged(self, terms: SafetyTerms | None, asker: Asker, version_digest: str) -> RequestSafety | None:
        """Return what judges a request by the packs that it obeys. Raises FailedPrecondition."""
        if terms is None:
            return None
        terms.require_probe(self._catalog.model_of(version_digest))
        assert self._ports.safety is not None, "packs without what judges by them"
        return self._ports.safety.open(terms, asker)

    async def _filtered(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        version_digest: str,
        safety: RequestSafety | None,
        *,
        anew: bool,
    ) -> inference_pb2.Generation:
        """Return the generation as the version may read it. Raises ContentFiltered."""
        if safety is None:
            return generation
        decode = partial(self._validator.decoded, principal.tenant_id, version_digest)
        return await filtered_generation(safety, generation, decode, anew=anew)

    async def _resolved(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        request: Request,
        safety: RequestSafety | None,
        asker: Asker,
        checked: Checked,
        form: OutputForm | None,
    ) -> tuple[GenerationSpec, tuple[Degradation, ...], inference_pb2.Generation, RequestSafety | None]:
        """Return what is served, how it differs from the request, what is read of it, and what judges it.

        The length of the prompt and the pressure decide on the version too: for another than that of the
        route, the input is filtered again.
        """
        resume, payer, digest = request.terms.resume, asker.payer, checked.route.version_digest
        bounds = payer.bounds if resume is None else NO_BOUNDS
        before: SafetyPins | None = None
        degradations: tuple[Degradation, ...] = () if resume is None else resume.degradations
        for _ in range(_MOST_VERSIONS):
            pins = None if safety is None else safety.terms.pins
            anew = resume is None and pins != before
            read = await self._filtered(principal, generation, digest, safety, anew=anew)
            spec = await self._validator.resolve(principal, read, request.request_id, checked, bounds, form)
            if resume is None:
                spec, degradations = await self._degraded(principal, read, spec, payer.tenant, bounds)
            else:  # a resumed request keeps its terms, regardless of the present pressure
                spec = replace(spec, size=resume.size)
            if self._ports.packs is None or spec.version_digest == digest:
                return replace(spec, safety=pins), degradations, read, safety
            before, digest = pins, spec.version_digest
            safety = self._judged(await self._obeyed_on(digest, safety), asker, digest)
        raise Unavailable("the request found another version on every try; send it again", retry_after_s=1.0)

    def _checked(
        self, principal: Principal, generation: inference_pb2.Generation, resume: Resume | None
    ) -> tuple[Checked, OutputForm | None]:
        """Return the route of a request, and the form that its outputs keep."""
        if resume is None:
            return self._validator.check(principal, generation), None
        if not resume.replaceable:
            return self._validator.check(principal, generation, pinned=resume.version), resume.form
        found = self._validator.check(principal, generation)
        route = replace(found.route, step="")  # counted, and copied for a shadow version, when it began
        same = route.version_digest == resume.version.version_digest
        return Checked(route, found.priority), resume.form if same else None

    def _short(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        request_id: str,
        checked: Checked,
        bounds: RequestBounds,
    ) -> GenerationSpec | None:
        """Return the request if it is known without text work, and is neither changed nor rejected.

        What rejects it counts against its rate of requests, so it happens after the admission.
        """
        digest, poisons = checked.route.version_digest, self._ports.poisons
        if self._ports.pressure(digest) >= self._limits.degrade.cap_from_ratio:
            return None
        if poisons is not None and poisons.may_refuse(digest):
            return None
        try:
            return self._validator.resolve_short(principal, generation, request_id, checked, bounds)
        except FairwayError:
            return None

    def _claims(self, payer: Payer, spec: GenerationSpec) -> tuple[tuple[Claim, ...], Price]:
        """Return what the request claims of token rates and budgets, and its price."""
        price = self._catalog.price(spec.model, spec.priority)
        predicted = self._ports.outputs.predict(payer.tenant.meta.name, spec.version_digest)
        return usage_claims(payer, spec, price, predicted), price

    async def _reroute(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        bounds: RequestBounds,
        asker: Asker,
        admitted: Admitted,
    ) -> Admitted:
        """Return a request without output on its model's present version; its reservation and terms stay."""
        before, terms = admitted.spec, admitted.terms
        asked = inference_pb2.Generation()
        asked.CopyFrom(generation)
        asked.model = before.model
        checked = self._validator.check(principal, asked)
        digest, safety = checked.route.version_digest, admitted.safety
        if digest != before.version_digest:
            safety = self._judged(await self._obeyed_on(digest, safety), asker, digest)
            asked = await self._filtered(principal, asked, digest, safety, anew=True)
        spec = await self._validator.resolve(principal, asked, before.request_id, checked, bounds)
        self._check_quarantine(spec)
        most = min(spec.limits.max_tokens, before.limits.max_tokens)
        spec = replace(
            spec,
            sampling=replace(spec.sampling, seed=before.sampling.seed),
            limits=replace(spec.limits, max_tokens=most, min_tokens=min(spec.limits.min_tokens, most)),
            size=before.size,
            safety=None if safety is None else safety.terms.pins,
        )
        if terms.settlement is not None:
            recorded = terms_of(spec, admitted.degradations, self._ports.clock.unix_s())
            await terms.settlement.accept(recorded)
        ticket = ticket_of(self._ports, principal.tenant_id, spec, terms.timeout_s)
        return replace(admitted, spec=spec, ticket=ticket, safety=safety)

    def _check_quarantine(self, spec: GenerationSpec) -> None:
        """Raise PoisonedInput for an input that ended engines of the version."""
        if self._ports.poisons is not None:
            self._ports.poisons.check(spec)

    def max_timeout_s(self, principal: Principal, user: str) -> float:
        """Return the longest time of a request of the caller; infinite without a limit."""
        return self._quotas.payer(principal, user).bounds.timeout_s.value or math.inf

    async def judging(
        self,
        principal: Principal,
        request: inference_pb2.ModerateRequest,
        received: Received,
        deadline_s: float,
    ) -> RequestSafety:
        """Return what judges texts by a safety pack. See ``GatewayService.judging``."""
        payer, packs, name = self._quotas.payer(principal, ""), self._ports.packs, request.pack
        own, session_key = payer.tenant.safety_pack, request.session_key or principal.key_id
        if not (name or own) or packs is None:
            raise FailedPrecondition("this tenant has no safety pack: name one", field="pack")
        if name and name != own and not self._identity.may_use(principal, name):
            raise model_not_found(name)
        priority = self._validator.priority(principal, common_pb2.PRIORITY_UNSPECIFIED)
        asker = Asker(
            received.request_id, principal, payer, priority, session_key, deadline_s, received.traceparent
        )
        terms = await packs.named(name or own, payer.tenant.meta.name, session_key)
        assert self._ports.safety is not None, "packs without what judges by them"
        safety = self._ports.safety.open(terms, asker)
        tokens = 1 + sum(map(len, request.inputs)) // CHARS_PER_TOKEN
        for rule in safety.models("output" if request.outputs else "input"):
            await self._require_room(payer, rule.model, priority, f"{received.request_id}-room", tokens)
        return safety

    async def _require_room(
        self, payer: Payer, model: str, priority: Priority, request_id: str, tokens: int
    ) -> None:
        """Return if rates and budgets have room for a model's use, which its settlement charges later.

        Raises UsageUnrecorded, TokenRateExceeded, BudgetExceeded.
        """
        self._quotas.require_recorded(payer)
        price = self._catalog.price(model, priority)
        if claims := claims_of(payer, price, tokens):
            quota = await self._quotas.reserve(payer.tenant.meta.name, request_id, ())
            try:
                await quota.claim(claims, price)
            finally:
                await quota.release()

    async def spend(self, principal: Principal) -> None:
        """Return if the tenant's rate of other calls has room. Raises RequestRateExceeded."""
        tenant = self._identity.still_valid(principal)
        calls = Limit(LimitKind.REQUESTS, tenant.requests_per_minute, name=WORK)
        if self._ports.limiter is not None:
            await self._ports.limiter.take(tenant.meta.name, [Claim(calls)])

    async def _degraded(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        spec: GenerationSpec,
        tenant: Tenant,
        bounds: RequestBounds,
    ) -> tuple[GenerationSpec, tuple[Degradation, ...]]:
        """Return what is served while the model is under pressure, and its differences from the request."""
        pressure_ratio, levels = self._ports.pressure(spec.version_digest), self._limits.degrade
        found: list[Degradation] = []
        by_ids = generation.WhichOneof("input") == "token_ids"
        smaller = smaller_model(spec, tenant.degrade, pressure_ratio, levels, by_ids=by_ids)
        if smaller is not None:
            instead = await self._by_model(principal, generation, spec, smaller, bounds)
            if instead is not None:
                found.append(
                    Degradation(DegradationKind.SMALLER_MODEL, spec.model, instead.model, pressure_ratio)
                )
                spec = instead
        cap = output_cap(spec, tenant.degrade, pressure_ratio, levels)
        if cap is not None:
            asked = str(spec.limits.max_tokens)
            found.append(Degradation(DegradationKind.OUTPUT_CAPPED, asked, str(cap), pressure_ratio))
            spec = replace(spec, limits=replace(spec.limits, max_tokens=cap))
        return spec, tuple(found)

    async def _by_model(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        spec: GenerationSpec,
        model: str,
        bounds: RequestBounds,
    ) -> GenerationSpec | None:
        """Return the request for another model; None where that brings no relief or is impossible."""
        asked = inference_pb2.Generation()
        asked.CopyFrom(generation)
        asked.model = model
        try:
            checked = self._validator.check(principal, asked)
            found = await self._validator.resolve(principal, asked, spec.request_id, checked, bounds)
        except FairwayError as error:  # not deployed, not allowed for this key, or too short for the prompt
            log.info("request.not_degraded", model=model, reason=error.reason)
            return None
        eased = self._ports.pressure(found.version_digest) < self._limits.degrade.smaller_from_ratio
        return found if eased else None


def class_of(generation: AnyRequest) -> Priority:
    """Return the class that the request names, before it is checked."""
    return PRIORITY_OF.get(generation.priority, Priority.STANDARD)
