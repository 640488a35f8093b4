"""Gateways with a bug each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fairway.v1 import inference_pb2
from services.core.errors import FairwayError
from services.core.generation import Grant, StartSpec, TokenLogprobs
from services.gateway.events import Accepted, Finished, Handle, RequestSink
from services.gateway.fallback import FallbackSettings, GatewayFallback
from services.gateway.service_types import GatewayLimits
from services.ports.placement import FallbackPlacer
from services.ports.poison.quarantine import Quarantine, Quarantined
from services.ports.store import Store
from services.ports.worker import RunningSequence, SequenceSink, WorkerClient
from simulator.fleet.nodes.gateway_node import GatewayNode
from simulator.fleet.spec import FleetSpec


class EndsTwice(GatewayNode):
    """Tells the end of a request twice."""

    def submit(
        self, tenant: str, generation: inference_pb2.Generation, sink: RequestSink, *, attempt: int = 0
    ) -> Handle:
        return super().submit(tenant, generation, _TwiceTold(sink), attempt=attempt)


class ResumesElsewhere(GatewayNode):
    """Resumes an output with another seed than it began with."""

    def make_workers(self, workers: WorkerClient) -> WorkerClient:
        return _OtherSeed(super().make_workers(workers))


class ShowsOldGrants(GatewayNode):
    """Starts one sequence in four under a grant of an earlier leader, and one under a grant used before.

    A worker in order refuses both, and the sequence is placed again.
    """

    def make_workers(self, workers: WorkerClient) -> WorkerClient:
        return _OldGrants(super().make_workers(workers))


class AsksNobody(GatewayNode):
    """Places by itself although it hears a leader. A worker in order refuses that."""

    def make_fallback(self, spec: FleetSpec) -> FallbackPlacer:
        return GatewayFallback(self.process.rng, FallbackSettings(after_s=0.0))


class RepeatsTokens(GatewayNode):
    """Hands every frame of tokens on twice."""

    def submit(
        self, tenant: str, generation: inference_pb2.Generation, sink: RequestSink, *, attempt: int = 0
    ) -> Handle:
        return super().submit(tenant, generation, _Repeated(sink), attempt=attempt)


class RunsSuspectsTogether(GatewayNode):
    """Places the suspects of a crash again as if they were none."""

    def make_workers(self, workers: WorkerClient) -> WorkerClient:
        return _NoSuspects(super().make_workers(workers))


class AdmitsTheCondemned(GatewayNode):
    """Runs what the fleet has in quarantine."""

    def make_quarantine(self, store: Store) -> Quarantine:
        return _Forgetful(super().make_quarantine(store))


class TakesAll(GatewayNode):
    """Has no limit of its own."""

    def make_limits(self, spec: FleetSpec) -> GatewayLimits:
        return replace(spec.gateway, max_requests=1_000_000)


class Fails(GatewayNode):
    """Has a task that ends with an exception."""

    def start(self) -> None:
        super().start()
        self.process.supervisor.spawn("bug", self._fail())

    async def _fail(self) -> None:
        await self.process.clock.sleep(1.0)
        raise ValueError("a planted bug")


class ForwardedSink:
    """A sink that passes everything on."""

    def __init__(self, sink: RequestSink) -> None:
        self.sink = sink

    def on_accepted(self, accepted: Accepted) -> None:
        self.sink.on_accepted(accepted)

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        self.sink.on_tokens(choice, offset, ids, text, logprobs)

    def on_finished(self, finished: Finished) -> None:
        self.sink.on_finished(finished)

    def on_failed(self, error: FairwayError) -> None:
        self.sink.on_failed(error)


class _TwiceTold(ForwardedSink):
    def on_finished(self, finished: Finished) -> None:
        self.sink.on_finished(finished)
        self.sink.on_finished(finished)


class _Repeated(ForwardedSink):
    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        self.sink.on_tokens(choice, offset, ids, text, logprobs)
        self.sink.on_tokens(choice, offset, ids, text, logprobs)


class _OtherSeed:
    def __init__(self, workers: WorkerClient) -> None:
        self._workers = workers

    def start(self, spec: StartSpec, sink: SequenceSink) -> RunningSequence:
        if spec.produced_ids:
            sampling = spec.generation.sampling
            other = replace(sampling, seed=sampling.seed ^ 1 << 40)
            spec = replace(spec, generation=replace(spec.generation, sampling=other))
        return self._workers.start(spec, sink)


class _NoSuspects:
    def __init__(self, workers: WorkerClient) -> None:
        self._workers = workers

    def start(self, spec: StartSpec, sink: SequenceSink) -> RunningSequence:
        return self._workers.start(replace(spec, apart_tokens=0), sink)


class _Forgetful:
    def __init__(self, quarantine: Quarantine) -> None:
        self.add, self.count = quarantine.add, quarantine.count

    def find(self, version_digest: str, fingerprint: str) -> Quarantined | None:
        return None

    def holds(self, version_digest: str) -> bool:
        return False


class _OldGrants:
    def __init__(self, workers: WorkerClient) -> None:
        self._workers = workers
        self._used: dict[str, Grant] = {}
        self._starts = 0

    def start(self, spec: StartSpec, sink: SequenceSink) -> RunningSequence:
        grant = spec.grant
        if not isinstance(grant, Grant):
            return self._workers.start(spec, sink)
        self._starts += 1
        if self._starts % 4 == 0:
            spec = replace(spec, grant=replace(grant, epoch=grant.epoch - 1))
        elif self._starts % 4 == 2:
            spec = replace(spec, grant=self._used.get(grant.worker_id, grant))
        self._used[grant.worker_id] = grant
        return self._workers.start(spec, sink)
