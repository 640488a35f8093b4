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

from fairway.v1 import inference_pb2
from services.core.errors import FairwayError, Unavailable
from services.core.generation import GenerationSpec, Principal
from services.core.limits import WORK, Claim, Limit, LimitKind, Price
from services.core.outputs.forms import OutputForm
from services.core.records import Priority, Tenant
from services.gateway.catalog import ModelCatalog
from services.gateway.idempotency.record_codec import terms_of
from services.gateway.policy.claims import (
    NO_BOUNDS,
    Payer,
    RequestBounds,
    admission_limits,
    usage_claims,
)
from services.gateway.policy.degrade import Degradation, DegradationKind, output_cap, smaller_model
from services.gateway.requests.quotas import RequestQuotas, check_timeout
from services.gateway.requests.request import Request
from services.gateway.requests.stage_timer import Stage
from services.gateway.requests.terms import Admitted, Resume
from services.gateway.requests.validate import Checked, Validator, session_key_of
from services.gateway.safety.inputs import filtered_generation
from services.gateway.safety.requests import Asker, RequestSafety
from services.gateway.service_types import AnyRequest, GatewayLimits, Ports
from services.ports.limiter import NO_PRICE
from services.rpc.convert.inference import PRIORITY_OF, seconds_of
from services.runtime.identity import KeyDirectory
from services.runtime.secrets import Ticket

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
        telemetry.routed(principal.tenant_id, route, checked.priority, session_key_of(principal, generation))
        payer = self._quotas.payer(principal, generation.user)
        self._quotas.require_recorded(payer)
        bounds = payer.bounds if resume is None else NO_BOUNDS  # a resumed request keeps its terms
        check_timeout(seconds_of(generation.timeout), bounds.timeout_s)
        timer.enter(Stage.ADMIT, self._ports.clock.monotonic_s())
        # A resumed request was counted against the rates when it began.
        due = admission_limits(payer, anew=resume is None)
        asker = self._asker(principal, generation, request, payer, checked)
        safety = await self._open(asker, route.version_digest)
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
                found = await self._resolved(principal, generation, request, asker, safety, checked, form)
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
                safety.settle()
            await quota.undo(error)
            raise
        self._ports.retries.request_began(self._ports.clock.monotonic_s())
        ticket = self._ticket(principal.tenant_id, spec, terms.timeout_s)
        ports, limits = self._ports, self._limits
        admitted = Admitted(
            spec, quota.reservation, payer, ticket, terms, ports, limits, telemetry, degradations
        )
        reroute = partial(self._reroute, principal, generation, bounds, asker)
        egress = ports.egress(principal.tenant_id, terms.received)
        return replace(admitted, price=price, reroute=reroute, egress=egress, safety=safety)

    def _asker(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        request: Request,
        payer: Payer,
        checked: Checked,
    ) -> Asker:
        terms = request.terms
        return Asker(
            request.request_id,
            principal,
            payer,
            checked.priority,
            session_key_of(principal, generation),
            terms.received.monotonic_s + terms.timeout_s,
            request.timer.traceparent,
        )

    async def _open(self, asker: Asker, version_digest: str) -> RequestSafety | None:
        """Return what judges the texts of a request on a version."""
        return None if self._ports.safety is None else await self._ports.safety.open(asker, version_digest)

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
        asker: Asker,
        safety: RequestSafety | None,
        checked: Checked,
        form: OutputForm | None,
    ) -> tuple[GenerationSpec, tuple[Degradation, ...], inference_pb2.Generation, RequestSafety | None]:
        """Return what is served, how it differs from the request, what is read of it, and its rules.

        The rules are those of the version that serves it, which the length of its prompt and the pressure
        decide too: for another version than that of the route its input is filtered again.
        """
        resume, payer, digest = request.terms.resume, asker.payer, checked.route.version_digest
        bounds = payer.bounds if resume is None else NO_BOUNDS
        before: str | None = None
        for _ in range(_MOST_VERSIONS):
            anew = resume is None and (safety is None or safety.terms.digests != before)
            read = await self._filtered(principal, generation, digest, safety, anew=anew)
            spec = await self._validator.resolve(principal, read, request.request_id, checked, bounds, form)
            if resume is not None:  # a resumed request keeps its terms, regardless of the present pressure
                return replace(spec, size=resume.size), resume.degradations, read, safety
            spec, degradations = await self._degraded(principal, read, spec, payer.tenant, bounds)
            if self._ports.safety is None or spec.version_digest == digest:
                return spec, degradations, read, safety
            before, digest = None if safety is None else safety.terms.digests, spec.version_digest
            safety = await self._open(asker, digest)
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
        digest, had = checked.route.version_digest, admitted.safety
        safety = await self._open(asker, digest)
        anew = safety is not None and (had is None or had.terms.digests != safety.terms.digests)
        asked = await self._filtered(principal, asked, digest, safety, anew=anew)
        spec = await self._validator.resolve(principal, asked, before.request_id, checked, bounds)
        self._check_quarantine(spec)
        most = min(spec.limits.max_tokens, before.limits.max_tokens)
        spec = replace(
            spec,
            sampling=replace(spec.sampling, seed=before.sampling.seed),
            limits=replace(spec.limits, max_tokens=most, min_tokens=min(spec.limits.min_tokens, most)),
            size=before.size,
        )
        if terms.settlement is not None:
            recorded = terms_of(spec, admitted.degradations, self._ports.clock.unix_s())
            await terms.settlement.accept(recorded)
        ticket = self._ticket(principal.tenant_id, spec, terms.timeout_s)
        return replace(admitted, spec=spec, ticket=ticket, safety=safety)

    def _check_quarantine(self, spec: GenerationSpec) -> None:
        """Raise PoisonedInput for an input that ended engines of the version."""
        if self._ports.poisons is not None:
            self._ports.poisons.check(spec)

    def max_timeout_s(self, principal: Principal, user: str) -> float:
        """Return the longest time of a request of the caller; infinite without a limit."""
        return self._quotas.payer(principal, user).bounds.timeout_s.value or math.inf

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

    def _ticket(self, tenant_id: str, spec: GenerationSpec, timeout_s: float) -> bytes:
        """Return the signed ticket of a request: its placements use no more than was reserved for it."""
        expire_unix_s = int(self._ports.clock.unix_s() + timeout_s) + 1
        tokens = len(spec.prompt.ids) + spec.limits.max_tokens
        return self._ports.sign_ticket(
            Ticket(tenant_id, spec.request_id, expire_unix_s, tokens, spec.choices)
        )


def class_of(generation: AnyRequest) -> Priority:
    """Return the class that the request names, before it is checked."""
    return PRIORITY_OF.get(generation.priority, Priority.STANDARD)
