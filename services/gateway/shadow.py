"""Copies of requests for the shadow version of a rollout. Their output is dropped.

A copy is a request of its own: it has its own id, its prompt is resolved with the shadow version's tokenizer
and template, and it runs as every request does. It belongs to an internal tenant of the lowest class that
has no limits and no budgets, so that no tenant pays for it or waits behind it.

Nothing of a copy reaches the copied request. It starts after that request was accepted, in a task of its own;
its failures are counted. There is no copy while ``max_concurrency`` copies run, or while the pressure of the
copied request's pool is ``MAX_PRESSURE`` or more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Generic, TypeVar

from fairway.v1 import inference_pb2
from services.core import faults
from services.core.arms import session_hash
from services.core.errors import Draining, FairwayError
from services.core.generation import GenerationSpec, Principal, TokenLogprobs
from services.core.records import KEYS, TENANTS, ApiKey, KeyRole, Meta, Priority, Tenant
from services.core.rollouts.routes import SHADOW_TENANT
from services.gateway.catalog import ModelCatalog, PinnedVersion
from services.gateway.events import Accepted, Finished, Received
from services.gateway.policy.retry import OutsideKills, RetryBudget
from services.gateway.requests.admission import RequestAdmission
from services.gateway.requests.request import Request
from services.gateway.requests.sequences import Sequences
from services.gateway.requests.terms import Admitted, Resume, RunTerms
from services.gateway.requests.validate import Validator
from services.gateway.service_types import GatewayLimits, Ports
from services.gateway.splits import ShadowArm
from services.gateway.telemetry import GatewayTelemetry
from services.ports.clock import Clock
from services.runtime.fleet_state.informer import Versioned
from services.runtime.identity import KeyDirectory

# Ratio of the predicted wait to its target: 0.2 s for a standard request. Above it no capacity is spare.
MAX_PRESSURE: Final = 0.02
SKIPPED_FULL: Final = "SKIPPED_FULL"
SKIPPED_PRESSURE: Final = "SKIPPED_PRESSURE"
Record = TypeVar("Record")
_OWNER: Final = Principal(SHADOW_TENANT, KeyRole.TENANT, SHADOW_TENANT)


class ShadowCopies:
    """Starts the copies of one gateway, and counts how they ended. Event loop only."""

    def __init__(
        self, validator: Validator, catalog: ModelCatalog, ports: Ports, limits: GatewayLimits
    ) -> None:
        identity = _directory(ports.clock)
        self._catalog = catalog
        self._ports = _copies_ports(ports)
        self._admission = RequestAdmission(validator.of(identity), identity, catalog, self._ports, limits)
        self._running: dict[Copy, None] = {}
        self._stopped = False
        self._metrics = metrics = ports.telemetry.metrics
        self._copies = metrics.counter(
            "fairway_gateway_shadow_copies_total",
            "Copies for a shadow version, by FINISHED, the reason of their error, or why none was made: "
            "SKIPPED_FULL, SKIPPED_PRESSURE",
            ("model", "version", "outcome"),
        )
        self._device_s = metrics.counter(
            "fairway_gateway_shadow_device_seconds_total",
            "Metered device time of copies for a shadow version, which no tenant is charged",
            ("model", "version"),
        )

    @property
    def running(self) -> int:
        """Copies that have not ended."""
        return len(self._running)

    def beside(self, admitted: Admitted, generation: inference_pb2.Generation) -> Admitted:
        """Return the request; if it is to be copied, its copy starts when it is accepted.

        A resumed run has no step and is not copied again.
        """
        arm = self._catalog.shadow_of(admitted.tenant.meta.name, admitted.spec)
        if arm is None:
            return admitted
        return replace(admitted, accepted=partial(self._start_soon, admitted, generation, arm))

    def stop(self) -> None:
        """End every copy and start no other: the gateway drains."""
        self._stopped = True
        for copy in list(self._running):
            copy.request.cancel(Draining("this gateway is shutting down"))

    def _start_soon(self, admitted: Admitted, generation: inference_pb2.Generation, arm: ShadowArm) -> None:
        """Start the copy after the request has been handed on: neither its cost nor its errors reach it."""
        asyncio.get_running_loop().call_soon(self._start, admitted, generation, arm)

    def _start(self, admitted: Admitted, generation: inference_pb2.Generation, arm: ShadowArm) -> None:
        spec = admitted.spec
        if self._stopped:
            return
        if self._ports.pressure(spec.version_digest) >= MAX_PRESSURE:
            self._count(spec.model, arm, SKIPPED_PRESSURE)
            return
        if len(self._running) >= arm.max_concurrency:
            self._count(spec.model, arm, SKIPPED_FULL)
            return
        copy = Copy(admitted, arm, self._ports)
        admit = partial(self._admit, admitted, generation, copy)
        name = f"shadow {copy.request.request_id}"
        task = self._ports.supervisor.spawn(name, copy.request.deliver(admit, copy))
        self._running[copy] = None
        task.add_done_callback(partial(self._ended, spec.model, copy))

    async def _admit(self, copied: Admitted, generation: inference_pb2.Generation, copy: Copy) -> Sequences:
        """Return the copy, ready to run on the shadow version and on no other."""
        request = copy.request
        own = generation_of_copy(copied, generation)
        try:
            found = await self._admission.admit(_OWNER, own, request)
        except FairwayError:
            request.telemetry.compared_in(copied.spec.step, own.session_key)
            raise
        own_terms = replace(found, spec=_as_copied(found.spec, copied.spec), reroute=None)
        return Sequences(own_terms, copy, request)

    def _ended(self, model: str, copy: Copy, _: asyncio.Task[None]) -> None:
        self._running.pop(copy, None)
        self._count(model, copy.arm, copy.outcome)
        if (device_s := copy.request.usage.device_s) > 0:
            self._device_s.add(*self._labels(model, copy.arm), amount=device_s)

    def _count(self, model: str, arm: ShadowArm, outcome: str) -> None:
        self._copies.add(*self._labels(model, arm), outcome)

    def _labels(self, model: str, arm: ShadowArm) -> tuple[str, str]:
        return self._metrics.models.of(model), self._metrics.versions.of(arm.version_digest)


class Copy:
    """One copy: the sink of its request, which takes all output and drops it."""

    def __init__(self, copied: Admitted, arm: ShadowArm, ports: Ports) -> None:
        self.arm = arm
        self.outcome = ""
        received = copied.terms.received
        now_s = ports.clock.monotonic_s()
        pinned = PinnedVersion(arm.version_digest, arm.route_revision)
        terms = RunTerms(
            Received(now_s, int(ports.clock.unix_s() * 1e6), received.request_id + "-shadow", received.face),
            max(0.0, copied.deadline_s - now_s),
            resume=Resume(pinned, (), ()),
        )
        self.request = Request(terms, ports)

    def on_accepted(self, accepted: Accepted) -> None: ...

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        self.request.credit(choice, len(ids))

    def on_finished(self, finished: Finished) -> None:
        self.outcome = faults.FINISHED

    def on_failed(self, error: FairwayError) -> None:
        self.outcome = error.reason


def generation_of_copy(copied: Admitted, generation: inference_pb2.Generation) -> inference_pb2.Generation:
    """Return what the client sent, without what concerns the client: its key, end user, class and choices
    of a version or a cached answer.
    """
    own = inference_pb2.Generation()
    own.CopyFrom(generation)
    for name in ("priority", "timeout", "idempotency_key", "user", "cache", "version"):
        own.ClearField(name)
    own.model = copied.spec.model
    own.session_key = f"{session_hash(copied.tenant.meta.name, copied.spec.session_key):016x}"
    return own


def _as_copied(spec: GenerationSpec, copied: GenerationSpec) -> GenerationSpec:
    """Return the copy's generation with the step, the seed and the output limit of the copied one."""
    most = min(spec.limits.max_tokens, copied.limits.max_tokens)
    return replace(
        spec,
        step=copied.step,
        sampling=replace(spec.sampling, seed=copied.sampling.seed),
        limits=replace(spec.limits, max_tokens=most, min_tokens=min(spec.limits.min_tokens, most)),
    )


def _copies_ports(ports: Ports) -> Ports:
    """Return the gateway's ports with others for all but placement, workers and the comparison of arms."""
    return replace(
        ports,
        limiter=None,
        telemetry=GatewayTelemetry(clock=ports.clock, slis=ports.telemetry.slis),
        report_usage=lambda _event: None,
        unrecorded=lambda: "",
        budgets_of=lambda _tenant: (),
        ttft_target_s=lambda _model, _priority: None,
        responses=None,
        packs=None,
        retries=RetryBudget(),
        kills=OutsideKills(),
        safety=None,
    )


@dataclass(frozen=True, slots=True)
class _FixedView(Generic[Record]):
    """Records that never change."""

    view: Mapping[str, Versioned[Record]]


def _directory(clock: Clock) -> KeyDirectory:
    """Return the directory of the copies' tenant alone."""
    name = SHADOW_TENANT
    key = ApiKey(Meta(name), KeyRole.TENANT, "", tenant=name)
    tenant = Tenant(Meta(name), max_priority=Priority.BATCH)
    return KeyDirectory(
        _FixedView({KEYS + name: Versioned(key, 0, 0)}),
        _FixedView({TENANTS + name: Versioned(tenant, 0, 0)}),
        clock,
    )
