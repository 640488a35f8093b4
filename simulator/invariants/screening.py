"""Screening: no client receives a token that no verdict covers, whatever befalls its gateway and worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Final

from fairway.formats.guards import JudgedTurn
from fairway.formats.safety import ClassifierRule, SafetyCategory, SafetyPack
from fairway.v1 import inference_pb2
from services.core.errors import Unavailable
from services.core.generation import TokenLogprobs
from services.core.records import Tenant
from services.core.safety import SafetyPins
from services.gateway.events import Accepted, Handle, RequestSink
from services.gateway.safety.packs import SafetyTerms, compiled
from services.gateway.safety.record import SafetyRecord
from services.gateway.safety.requests import Asker, ModelRule, RequestSafety, SafetyDesk
from services.gateway.service_types import Ports
from services.gateway.slis import SliRecorder
from services.ports.clock import Clock
from services.runtime.telemetry.metrics import Metrics
from simulator.fleet.invariant import Invariant
from simulator.fleet.nodes.gateway_node import GatewayNode

UNJUDGED: Final = "unjudged-token"
# The whole output is the context, so that a text's length is the position up to which it is judged.
_RULE: Final = ClassifierRule(
    model="guard",
    labels={"unsafe": "judged"},
    scopes=("output",),
    every_tokens=8,
    context_tokens=32_768,
    fail="hold",
)
_PACK: Final = SafetyPack(
    categories={"judged": SafetyCategory(action="block")},
    classifiers=(_RULE,),
    window_tokens=8,
    hold_s=600.0,
)
_VERDICT_S: Final = 0.05  # the mean time of a verdict
_LOST_RATIO: Final = 0.05  # verdicts that fail and are asked for again


class Screening(Invariant):
    """``verdicts`` and ``tokens``: what was judged and received, so that a test can check that it is much."""

    def __init__(self) -> None:
        self.verdicts = self.tokens = 0
        self.judged: defaultdict[str, int] = defaultdict(int)  # characters, by request

    def covered(self, request_id: str, chars: int) -> None:
        """A verdict covers the first ``chars`` characters of a request's output."""
        self.verdicts += 1
        self.judged[request_id] = max(self.judged[request_id], chars)

    def received(self, request_id: str, chars: int, tokens: int) -> None:
        """A client has so many characters of a request's output, ``tokens`` more than before."""
        self.tokens += tokens
        judged = self.judged[request_id]
        text = f"{request_id}: {chars} characters are sent, {judged} judged"
        self._fleet.violations.expect(chars <= judged, UNJUDGED, lambda: text)


class _Packs:
    """In place of ``SafetyPacks``: every request obeys one pack."""

    def __init__(self) -> None:
        self._terms = SafetyTerms(SafetyPins("sha256:own"), compiled(_PACK, None))

    async def terms(self, model: str, version_digest: str, tenant: Tenant, session_key: str) -> SafetyTerms:
        return self._terms

    async def pinned(self, model: str, version_digest: str, pins: SafetyPins) -> SafetyTerms:
        return self._terms


class _Judges:
    """Implements ``Classifiers``: finds nothing, after a while, and fails now and then."""

    def __init__(self, screening: Screening, clock: Clock, rng: Random) -> None:
        self._screening = screening
        self._clock = clock
        self._rng = rng

    async def scores(self, asker: Asker, rule: ModelRule, turns: Sequence[JudgedTurn]) -> Mapping[str, float]:
        await self._clock.sleep(self._rng.expovariate(1 / _VERDICT_S))
        if self._rng.random() < _LOST_RATIO:
            raise Unavailable("the classifier's worker was lost")
        self._screening.covered(asker.request_id, len(turns[-1].text))
        return dict.fromkeys(rule.labels, 0.0)

    def settle(self, asker: Asker) -> None: ...


class _WatchedOutput:
    """The sink of a client, with what it has received."""

    def __init__(self, sink: RequestSink, screening: Screening) -> None:
        self._sink = sink
        self._screening = screening
        self._request_id = ""
        self._chars = 0
        self.on_finished, self.on_failed = sink.on_finished, sink.on_failed

    def on_accepted(self, accepted: Accepted) -> None:
        self._request_id = accepted.request_id
        self._sink.on_accepted(accepted)

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        self._chars += len(text)
        self._screening.received(self._request_id, self._chars, len(ids))
        self._sink.on_tokens(choice, offset, ids, text, logprobs)


class ScreenedDesk(SafetyDesk):
    """Opens requests as the one kind of the fleet."""

    def __init__(self, judges: _Judges, ports: Ports, kind: type[RequestSafety]) -> None:
        record = SafetyRecord(Metrics(), SliRecorder())
        super().__init__(judges, record, ports.clock, ports.supervisor)
        self._kind = kind

    def open(self, terms: SafetyTerms, asker: Asker) -> RequestSafety:
        return self._kind(terms, terms.compiled, asker, self)


def screened_gateways(screening: Screening, kind: type[RequestSafety] = RequestSafety) -> type[GatewayNode]:
    """Return gateways whose requests all obey a pack with a classifier."""

    class ScreenedGateway(GatewayNode):
        def make_judged(self, ports: Ports) -> Ports:
            judges = _Judges(screening, ports.clock, self.process.rng)
            packs = _Packs()
            return replace(
                ports,
                packs=packs,  # type: ignore[arg-type]
                safety=ScreenedDesk(judges, ports, kind),
            )

        def submit(
            self, tenant: str, generation: inference_pb2.Generation, sink: RequestSink, *, attempt: int = 0
        ) -> Handle:
            return super().submit(tenant, generation, _WatchedOutput(sink, screening), attempt=attempt)

    return ScreenedGateway
