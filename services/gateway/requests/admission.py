"""Admission: from a request to a runnable one, within its tenant's quotas and validated.

The cheapest checks run first, then the quotas; only requests within them are tokenised. Token rates and
budgets follow, because they need the exact prompt. A request that is rejected after its admission releases
its slot, but still counts against the rate of requests.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from fairway.v1 import inference_pb2
from services.core.errors import FairwayError, InvalidInput, OverQuota, UsageUnrecorded
from services.core.generation import GenerationSpec, Principal, Usage
from services.core.limits import Limit
from services.core.records import Priority, Tenant
from services.gateway.catalog import ModelCatalog
from services.gateway.policy.claims import (
    Payer,
    RequestBound,
    RequestBounds,
    admission_limits,
    bounds_of,
    usage_claims,
)
from services.gateway.policy.degrade import Degradation, DegradationKind, output_cap, smaller_model
from services.gateway.requests.stage_timer import Stage, StageTimer
from services.gateway.requests.terms import Admitted, RunTerms
from services.gateway.requests.validate import Validator
from services.gateway.service_types import GatewayLimits, Ports
from services.gateway.telemetry import RequestTelemetry
from services.ports.limiter import Reservation
from services.rpc.convert.inference import PRIORITY_OF
from services.rpc.convert.times import seconds_of
from services.runtime.identity import KeyDirectory
from services.runtime.secrets import Ticket

log = structlog.get_logger()
_FULL_RETRY_S: Final = 5.0


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

    async def admit(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        timer: StageTimer,
        terms: RunTerms,
        telemetry: RequestTelemetry,
    ) -> Admitted:
        resume, request_id = terms.resume, terms.received.request_id
        pinned = resume.version if resume is not None else None
        if self._catalog.has(generation.model):
            telemetry.addressed(principal.tenant_id, generation.model, _class_of(generation))
        checked = self._validator.check(principal, generation, pinned=pinned)
        route = checked.route
        telemetry.addressed(principal.tenant_id, route.model, checked.priority, route.version_digest)
        payer = self._payer(principal, generation.user)
        self._require_recorded(payer)
        bounds = bounds_of(payer) if resume is None else RequestBounds()  # a resumed request keeps its terms
        _check_timeout(generation, bounds.timeout_s)
        timer.enter(Stage.ADMIT, self._ports.clock.monotonic_s())
        # A resumed request was counted against the rates when it began.
        due = admission_limits(payer, anew=resume is None)
        reservation = await self._reserve(principal.tenant_id, request_id, due)
        reserving: asyncio.Task[Reservation | FairwayError] | None = None
        try:
            timer.enter(Stage.VALIDATE, self._ports.clock.monotonic_s())
            spec = await self._validator.resolve(principal, generation, request_id, checked, bounds)
            if resume is None:
                spec, degradations = await self._degraded(principal, generation, spec, payer.tenant, bounds)
            else:  # a resumed request keeps its terms, regardless of the present pressure
                degradations = resume.degradations
            telemetry.degraded(degradations, anew=resume is None)
            self._check_quarantine(spec)
            price = self._catalog.price(spec.model)
            predicted = self._ports.outputs.predict(payer.tenant.meta.name, spec.version_digest)
            claims = usage_claims(payer, spec, price, predicted)
            if claims:
                timer.enter(Stage.ADMIT, self._ports.clock.monotonic_s())
                reserving = self._ports.supervisor.spawn(
                    f"reserve {request_id}",
                    _as_value(self._ports.limiter.reserve(reservation, claims, price)),
                )
                reservation = self._granted(await asyncio.shield(reserving))
            if terms.record is not None:
                timer.enter(Stage.ADMIT, self._ports.clock.monotonic_s())
                await terms.record(spec, degradations)
        except BaseException as error:
            if isinstance(error, OverQuota):  # the request stays counted against this rate
                error.request_rate = reservation.request_rate
            # The slot is released before the error is returned, so that the client's next request finds it
            # free.
            undoing = self._release(reservation, reserving)
            await asyncio.shield(self._ports.supervisor.spawn(f"undo {request_id}", undoing))
            raise
        self._ports.retries.request_began(self._ports.clock.monotonic_s())
        ticket = self._ticket(principal.tenant_id, spec, terms.timeout_s)
        ports, limits = self._ports, self._limits
        admitted = Admitted(spec, reservation, payer, ticket, terms, ports, limits, telemetry, degradations)
        reroute = partial(self._reroute, principal, generation, bounds)
        return replace(admitted, price=price, reroute=reroute)

    async def _reroute(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        bounds: RequestBounds,
        admitted: Admitted,
    ) -> Admitted:
        """Return a request without output on its model's present version; its reservation and terms stay."""
        before, terms = admitted.spec, admitted.terms
        asked = inference_pb2.Generation()
        asked.CopyFrom(generation)
        asked.model = before.model
        checked = self._validator.check(principal, asked)
        spec = await self._validator.resolve(principal, asked, before.request_id, checked, bounds)
        self._check_quarantine(spec)
        most = min(spec.limits.max_tokens, before.limits.max_tokens)
        spec = replace(
            spec,
            sampling=replace(spec.sampling, seed=before.sampling.seed),
            limits=replace(spec.limits, max_tokens=most, min_tokens=min(spec.limits.min_tokens, most)),
        )
        if terms.record is not None:
            await terms.record(spec, admitted.degradations)
        ticket = self._ticket(principal.tenant_id, spec, terms.timeout_s)
        return replace(admitted, spec=spec, ticket=ticket)

    def _check_quarantine(self, spec: GenerationSpec) -> None:
        """Raise PoisonedInput for an input that ended engines of the version."""
        if self._ports.poisons is not None:
            self._ports.poisons.check(spec)

    def max_timeout_s(self, principal: Principal, user: str) -> float:
        """Return the longest time of a request of the caller; infinite without a limit."""
        return bounds_of(self._payer(principal, user)).timeout_s.value or math.inf

    def _require_recorded(self, payer: Payer) -> None:
        """Raises UsageUnrecorded while the use of a tenant with budgets cannot be recorded."""
        problem = self._ports.unrecorded() if payer.budgets else ""
        if problem:
            error = UsageUnrecorded(
                f"this tenant's use cannot be recorded: {problem}", retry_after_s=_FULL_RETRY_S
            )
            self._ports.telemetry.admission(error.reason)
            raise error

    def _payer(self, principal: Principal, user: str) -> Payer:
        """Return whose limits and budgets apply. Raises Unauthenticated for a key that is not valid now."""
        tenant, key = self._identity.tenant_and_key(principal)
        return Payer(tenant, key, user, self._ports.budgets_of(tenant.meta.name))

    async def spend(self, principal: Principal) -> None:
        """Return if the tenant's rate of other calls has room. Raises RequestRateExceeded."""
        tenant = self._identity.still_valid(principal)
        await self._ports.limiter.spend(tenant.meta.name, tenant.requests_per_minute)

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

    async def _reserve(self, tenant_id: str, request_id: str, limits: Sequence[Limit]) -> Reservation:
        """Return the slot. A call cancelled before the store's answer releases the slot afterwards."""
        ports = self._ports
        admission = ports.supervisor.spawn(
            f"admit {request_id}", _as_value(ports.limiter.admit(tenant_id, request_id, limits))
        )
        try:
            reservation = self._granted(await asyncio.shield(admission))
        except asyncio.CancelledError:
            ports.supervisor.spawn(f"undo {request_id}", self._undo(admission))
            raise
        ports.telemetry.admission("ADMITTED_LOCALLY" if reservation.local else "ADMITTED")
        return reservation

    def _ticket(self, tenant_id: str, spec: GenerationSpec, timeout_s: float) -> bytes:
        """Return the signed ticket of a request: its placements use no more than was reserved for it."""
        expire_unix_s = int(self._ports.clock.unix_s() + timeout_s) + 1
        tokens = len(spec.prompt.ids) + spec.limits.max_tokens
        return self._ports.sign_ticket(
            Ticket(tenant_id, spec.request_id, expire_unix_s, tokens, spec.choices)
        )

    def _granted(self, outcome: Reservation | FairwayError) -> Reservation:
        """Return the reservation. Raises the refusal, and counts it."""
        if isinstance(outcome, FairwayError):
            self._ports.telemetry.admission(outcome.reason)
            raise outcome
        return outcome

    async def _undo(self, admission: asyncio.Task[Reservation | FairwayError]) -> None:
        outcome = await admission
        if not isinstance(outcome, FairwayError):
            await self._release(outcome)

    async def _release(
        self, reservation: Reservation, reserving: asyncio.Task[Reservation | FairwayError] | None = None
    ) -> None:
        """Return what a request holds, including the tokens that ``reserving`` may have reserved."""
        if reserving is not None and isinstance(outcome := await reserving, Reservation):
            reservation = outcome
        try:
            await self._ports.limiter.settle(reservation, Usage(prompt_tokens=0, output_tokens=0))
        except FairwayError as error:
            log.info("reservation.undo_failed", reason=error.reason)


def _class_of(generation: inference_pb2.Generation) -> Priority:
    """Return the class that the request names, before it is checked."""
    return PRIORITY_OF.get(generation.priority, Priority.STANDARD)


def _check_timeout(generation: inference_pb2.Generation, longest: RequestBound) -> None:
    """Raises InvalidInput for a requested time above the limit. Without a request the limit applies."""
    asked_s = seconds_of(generation.timeout)
    if longest.exceeded(asked_s):
        raise InvalidInput(
            f"timeout {asked_s:g} s is above {longest.name}, {longest.value:g} s",
            field="timeout",
            timeout_s=asked_s,
            limit_s=longest.value,
        )


async def _as_value(call: Awaitable[Reservation]) -> Reservation | FairwayError:
    """Return a refusal as a value: an exception that leaves a task of the supervisor is a crash."""
    try:
        return await call
    except FairwayError as error:
        return error
