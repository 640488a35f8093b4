"""Safety packs for tests of the gateway: their rules, and a classifier that tests control."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fairway.formats.guards import JudgedTurn
from fairway.formats.safety import SafetyPack, check_policy
from services.core.generation import Principal
from services.core.records import ApiKey, KeyRole, Meta, Priority, Tenant
from services.core.safety import SafetyPins
from services.gateway.policy.claims import Payer
from services.gateway.safety.packs import SafetyTerms, compiled
from services.gateway.safety.record import SafetyRecord
from services.gateway.safety.requests import Asker, Classifiers, ModelRule, RequestSafety, SafetyDesk
from services.gateway.slis import SliRecorder
from services.ports.clock import Clock
from services.runtime.audit import AuditRecorder
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.runtime.telemetry.metrics import Metrics


def pack_of(**fields: Any) -> SafetyPack:
    """Return a pack as its file would have it: every check applies."""
    return check_policy(msgspec.json.encode(fields))


def phrases(action: str, *texts: str, **more: Any) -> dict[str, Any]:
    """Return the fields of a pack with one list."""
    return {
        "categories": {"found": {"action": action}},
        "lists": [{"category": "found", "phrases": texts}],
        "window_tokens": 0,
    } | more


def classifier(action: str = "block", **more: Any) -> dict[str, Any]:
    """Return the fields of a pack with the classifier ``guard``, whose label is ``unsafe``."""
    rule = {"model": "guard", "labels": {"unsafe": "judged"}, "every_tokens": 1, "context_tokens": 32_768}
    rule |= {name: more.pop(name) for name in ("every_tokens", "context_tokens", "fail") if name in more}
    return {"categories": {"judged": {"action": action}}, "classifiers": [rule], "window_tokens": 8} | more


@dataclass
class ScriptedClassifiers:
    """Judges by ``score``, after ``delay``. Keeps what it judged."""

    score: Callable[[str], float] = lambda text: float("bad" in text)
    delay: Callable[[], Any] | None = None
    error: Exception | None = None
    asked: list[str] = field(default_factory=list)
    judged: list[str] = field(default_factory=list)
    settled: int = 0

    async def scores(self, asker: Asker, rule: ModelRule, turns: Sequence[JudgedTurn]) -> Mapping[str, float]:
        text = turns[-1].text
        self.asked.append(text)
        if self.delay is not None:
            await self.delay()
        else:
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.judged.append(text)
        return dict.fromkeys(rule.labels, self.score(text))

    def settle(self, asker: Asker) -> None:
        self.settled += 1


def asker_of(deadline_s: float = float("inf")) -> Asker:
    principal = Principal("key", KeyRole.TENANT, "acme")
    payer = Payer(Tenant(Meta("acme")), ApiKey(Meta("key"), KeyRole.TENANT, "h", "acme"))
    return Asker("req_1", principal, payer, Priority.STANDARD, "session", deadline_s)


@dataclass
class FixedPacks:
    """Every request obeys one pack; in place of ``SafetyPacks``. ``refusal``: it cannot be read."""

    pack: SafetyPack | None = None
    shadow: SafetyPack | None = None
    refusal: Exception | None = None
    digest: str = "sha256:pack"

    async def terms(self, *_: Any) -> SafetyTerms | None:
        if self.refusal is not None:
            raise self.refusal
        return None if self.pack is None else terms_of(self.pack, self.shadow, self.digest)

    pinned = terms


def terms_of(pack: SafetyPack, shadow: SafetyPack | None = None, digest: str = "sha256:pack") -> SafetyTerms:
    shadow_digest = "" if shadow is None else "sha256:shadow"
    pins = SafetyPins("sha256:own", "strict", "strict", digest, shadow_digest=shadow_digest)
    return SafetyTerms(pins, compiled(pack, None), None if shadow is None else compiled(shadow, None))


def desk_of(
    classifiers: Classifiers | None = None,
    *,
    clock: Clock | None = None,
    supervisor: Supervisor | None = None,
    metrics: Metrics | None = None,
    audit: AuditRecorder | None = None,
    slis: SliRecorder | None = None,
) -> SafetyDesk:
    clock, metrics = clock or SystemClock(), metrics or Metrics()
    record = SafetyRecord(metrics, slis or SliRecorder(Metrics()), audit)
    return SafetyDesk(classifiers or ScriptedClassifiers(), record, clock, supervisor or Supervisor(clock))


def safety_of(pack: SafetyPack, desk: SafetyDesk, shadow: SafetyPack | None = None) -> RequestSafety:
    return desk.open(terms_of(pack, shadow), asker_of())


def counted(metrics: Metrics, name: str, **labels: str) -> float:
    """Return the sum of a counter's children that have these labels."""
    return sum(
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
