"""The egress rates of tenants at work: what holds back credit for workers, and answers that are complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from services.core.fixed_cost.rows import RawTensor
from services.core.generation import TokenLogprobs
from services.core.records import Tenant
from services.gateway.events import Accepted, RequestSink
from services.gateway.policy.egress import (
    EgressBucket,
    EgressRates,
    EgressWait,
    TenantEgress,
    egress_rates,
)
from services.ports.clock import Clock
from services.runtime.telemetry.metrics import Metrics

TICK_S: Final = 0.1  # interval at which output that waits is looked at
ANSWER_BYTES: Final = 256  # bytes of an answer of rows that count as a token, which in a stream is as long


class EgressGate:
    """The output of this gateway that waits, by tenant. A tenant whose bucket is full has no entry."""

    def __init__(
        self,
        tenant_of: Callable[[str], Tenant | None],
        gateways: Callable[[], int],
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """``tenant_of`` returns the present record. ``gateways`` returns how many share a tenant's rate."""
        self._tenant_of = tenant_of
        self._gateways = gateways
        self._clock = clock
        self._metrics = metrics
        self._tenants: dict[str, TenantEgress] = {}
        self._held = metrics.counter(
            "fairway_gateway_egress_held_seconds_total",
            "Time that output waited for its tenant's egress rates, from when its reader had room for it",
            ("tenant",),
        )
        metrics.level(
            "fairway_gateway_egress_waiting",
            "Choices and answers that wait for the egress rates of their tenants",
            lambda: float(self.waiting),
        )

    @property
    def waiting(self) -> int:
        """How many choices and answers wait."""
        return sum(len(egress.waits) for egress in self._tenants.values())

    def rates(self, tenant_id: str) -> EgressRates | None:
        """Return the present rates of a tenant; None without a limit."""
        tenant = self._tenant_of(tenant_id)
        return None if tenant is None else egress_rates(tenant, self._gateways())

    def add(self, tenant_id: str, wait: EgressWait) -> None:
        """Have output wait; it leaves at once if the rates permit and nothing waits already."""
        egress = self._of(tenant_id)
        if wait not in egress.waits:
            wait.since_s = self._clock.monotonic_s()
            egress.waits[wait] = None
            if len(egress.waits) == 1:
                self._give(tenant_id, egress)

    def charge(self, tenant_id: str, tokens: int) -> None:
        """Count output that has left: it delays what follows."""
        self._of(tenant_id).bucket.level -= tokens

    def leave(self, tenant_id: str, wait: EgressWait, unused: int) -> bool:
        """Return unused tokens to the buckets, and whether the output was waiting for more."""
        wait.bucket.level += unused
        egress = self._tenants.get(tenant_id)
        if egress is None:
            return False
        egress.bucket.level += unused
        return egress.waits.pop(wait, wait) is None

    def _of(self, tenant_id: str) -> TenantEgress:
        found = self._tenants.get(tenant_id)
        if found is None:
            found = self._tenants[tenant_id] = TenantEgress()
            self._give(tenant_id, found)  # fills its bucket
            asyncio.get_running_loop().call_later(TICK_S, self._tick, tenant_id)
        return found

    def _tick(self, tenant_id: str) -> None:
        egress = self._tenants[tenant_id]
        if egress.rests(self._give(tenant_id, egress)):
            del self._tenants[tenant_id]
        else:
            asyncio.get_running_loop().call_later(TICK_S, self._tick, tenant_id)

    def _give(self, tenant_id: str, egress: TenantEgress) -> EgressRates:
        """Let pass what may leave now, at the returned rates."""
        rates, held_s = self.rates(tenant_id) or EgressRates(), egress.held_s
        leaving = egress.due(rates, self._clock.monotonic_s())
        self._held.add(self._metrics.tenants.of(tenant_id), amount=egress.held_s - held_s)
        for wait, tokens in leaving.items():
            wait.give(tokens)
        return rates


class StreamEgress:
    """The egress of one request. Its choices share the rate of a stream."""

    def __init__(self, gate: EgressGate, tenant_id: str) -> None:
        self._gate = gate
        self._tenant_id = tenant_id
        self._bucket = EgressBucket()

    @property
    def limited(self) -> bool:
        """Whether the tenant has a rate at present."""
        return self._gate.rates(self._tenant_id) is not None

    def wait(self, give: Callable[[int], None]) -> EgressWait:
        """Return what the output of one choice waits with; it does not wait yet."""
        return EgressWait(self._bucket, give)

    def want(self, wait: EgressWait, tokens: int) -> None:
        """Have ``tokens``, at least one, wait in place of those before."""
        wait.wanted = tokens
        self._gate.add(self._tenant_id, wait)

    def leave(self, wait: EgressWait, unused: int) -> bool:
        """Return tokens that did not leave; return whether more were waiting."""
        return self._gate.leave(self._tenant_id, wait, unused)

    def charge(self, tokens: int) -> None:
        """Count output that left without a wait."""
        if tokens and self.limited:
            self._gate.charge(self._tenant_id, tokens)

    async def first_token(self) -> int:
        """Return 1 once a token may leave, or 0 without a limit."""
        return await self._pass(self._bucket, 1)

    async def answer(self, tokens: int) -> None:
        """Return once an answer may leave, whole. The rate of a stream does not hold it."""
        await self._pass(EgressBucket(), tokens)

    async def _pass(self, bucket: EgressBucket, tokens: int) -> int:
        if not tokens or not self.limited:
            return 0
        passed = asyncio.Event()
        wait = EgressWait(bucket, lambda _: passed.set(), whole=True)
        try:
            self.want(wait, tokens)
            await passed.wait()
        finally:
            self.leave(wait, 0)
        return tokens


class ChargedReplay:
    """A sink that passes everything on, and charges what its client receives of an earlier request's output.

    Its own request, if it runs one, pays for the output itself.
    """

    def __init__(self, sink: RequestSink, egress: StreamEgress) -> None:
        self._egress = egress
        self._sink = sink
        self._replayed = False
        self.on_finished, self.on_failed = sink.on_finished, sink.on_failed

    def on_accepted(self, accepted: Accepted) -> None:
        self._replayed = accepted.replayed
        self._sink.on_accepted(accepted)

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        if self._replayed:
            self._egress.charge(len(ids))
        self._sink.on_tokens(choice, offset, ids, text, logprobs)


def answer_tokens(outputs: Sequence[RawTensor]) -> int:
    """Return as how many tokens the outputs of rows count."""
    return -(-sum(len(tensor.data) for tensor in outputs) // ANSWER_BYTES)
