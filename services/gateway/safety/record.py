"""The record of what packs did: counts by tenant and category, a log line and an audit entry for each find.

None has a text; an entry has the SHA-256 of it.
"""

from __future__ import annotations

from typing import Final

import structlog

from services.core.arms import ArmKey, SliKey, session_hash
from services.core.audit import Actor, AuditEntry
from services.core.generation import Principal
from services.core.records import Priority
from services.core.safety import Intervention
from services.gateway.slis import ScreenEnd, SliRecorder, SliSubject
from services.runtime.audit import AuditRecorder
from services.runtime.telemetry.metrics import GAP_S, Metrics

log = structlog.get_logger()

AUDITED: Final = "SafetyPack/Intervene"
_OUTCOMES: Final = {
    "block": "CONTENT_FILTERED",
    "stop": "CONTENT_FILTERED",
    "redact": "CONTENT_REDACTED",
    "flag": "CONTENT_FLAGGED",
}


class SafetyRecord:
    def __init__(self, metrics: Metrics, slis: SliRecorder, audit: AuditRecorder | None = None) -> None:
        self._metrics = metrics
        self._slis = slis
        self._audit = audit
        self._found = metrics.counter(
            "fairway_gateway_safety_interventions_total",
            "Finds of safety packs in inputs and outputs, by what was done: block, stop, redact, flag",
            ("tenant", "category", "scope", "action"),
        )
        self._missed = metrics.counter(
            "fairway_gateway_safety_verdicts_missed_total",
            "Verdicts that a model of a pack did not give, by the reason; LATE: within the pack's time",
            ("model", "reason"),
        )
        self._held = metrics.histogram(
            "fairway_gateway_safety_hold_seconds",
            "From the arrival of output at the gateway until its last verdict",
            bounds=GAP_S,
        ).cell()

    def held(self, seconds: float) -> None:
        self._held.observe(seconds)

    def no_verdict(self, model: str, reason: str) -> None:
        self._missed.add(self._metrics.models.of(model), reason)

    def count(
        self, arm: ArmKey, tenant: str, priority: Priority, session_key: str, step: str, found: ScreenEnd
    ) -> None:
        """Count a request that ended for a version of a pack, which ``step`` of its rollout drew."""
        key = SliKey(arm, tenant, priority, self._slis.zone)
        self._slis.screened(SliSubject(key, session_hash(tenant, session_key), step), found)

    def add(self, caller: Principal, request_id: str, pack_digest: str, found: Intervention) -> None:
        """Record a find of a pack in a request."""
        metrics = self._metrics
        category = metrics.categories.of(found.category)
        self._found.add(metrics.tenants.of(caller.tenant_id), category, found.scope, found.action)
        log.info(
            "safety.intervened",
            request_id=request_id,
            tenant=caller.tenant_id,
            category=found.category,
            action=found.action,
            scope=found.scope,
            choice=found.choice,
            position=found.position,
            text_sha256=found.text_digest,
            pack_digest=pack_digest,
        )
        if self._audit is not None:
            actor = Actor(caller.key_id, caller.role, caller.tenant_id, caller.subject)
            place = f"{found.scope}/{found.choice}/{found.position}"
            pack = pack_digest.removeprefix("sha256:")
            resource = f"{found.category}/{pack}/{place}/{found.text_digest}"
            entry = AuditEntry(
                AUDITED, actor, resource, outcome=_OUTCOMES[found.action], request_id=request_id
            )
            self._audit.add(entry, request_id, resource)
