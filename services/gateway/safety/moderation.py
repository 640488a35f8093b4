"""Moderation of texts by a safety pack, without a generation: its lists, personal data and models.

A model that does not answer fails the call: a text that nobody judged is not reported as harmless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from fairway.formats.safety import SafetyAction, SafetyPack, Scope
from fairway.task_group import TaskGroup
from fairway.v1 import inference_pb2
from services.adapters.threads import in_thread
from services.core.errors import DeadlineExceeded, InvalidInput, first_failure
from services.core.generation import Principal
from services.gateway.events import Received
from services.gateway.safety.lists import TextRules, TextScan
from services.gateway.safety.requests import ModelRule, RequestSafety
from services.rpc import bounds

# The characters of all texts of a call: their search takes a thread for about a second.
MAX_CHARS: Final = 262_144
_MAX_AT_ONCE: Final = 16  # texts of a call that one model judges
_Scores = dict[str, float]


@dataclass(frozen=True, slots=True)
class ModeratedCategory:
    name: str
    flagged: bool
    # The highest probability of its labels, and 1 where a list or personal data matches.
    score: float
    action: SafetyAction


@dataclass(frozen=True, slots=True)
class Moderation:
    """The verdict on one text, with every category of the pack, by name."""

    flagged: bool
    categories: tuple[ModeratedCategory, ...]


@dataclass(frozen=True, slots=True)
class Moderated:
    request_id: str
    pack: str
    pack_digest: str
    results: tuple[Moderation, ...]
    # What judges generations alone.
    skipped: tuple[str, ...] = ()


class ModerationCalls(Protocol):
    """What moderation needs of the gateway's service; raises the tree of ``core/errors.py``."""

    def check_open(self, tenant_id: str, model: str, received: Received) -> None: ...

    def counted(self, principal: Principal) -> AbstractAsyncContextManager[None]: ...

    async def judging(
        self,
        principal: Principal,
        request: inference_pb2.ModerateRequest,
        received: Received,
        timeout_s: float | None,
    ) -> RequestSafety: ...


class Moderations:
    """Stateless. Calls count against the same bounds as calls that only tokenise."""

    def __init__(self, service: ModerationCalls) -> None:
        self._service = service

    async def moderate(
        self,
        principal: Principal,
        request: inference_pb2.ModerateRequest,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> Moderated:
        """Return the verdicts on the inputs, in order.

        Raises InvalidInput, DeadlineExceeded, and as ``ModerationCalls.judging`` and ``Classifiers.scores``.
        """
        bounds.check(request)
        if (chars := sum(map(len, request.inputs))) > MAX_CHARS:
            raise InvalidInput(
                f"the inputs have {chars} characters, more than {MAX_CHARS}: send fewer", field="inputs"
            )
        self._service.check_open(principal.tenant_id, request.pack, received)
        scope: Scope = "output" if request.outputs else "input"
        async with self._service.counted(principal):
            safety = await self._service.judging(principal, request, received, timeout_s)
            found = await in_thread(_matched, safety.rules(scope), request.inputs)
            flagged = [set(scores) for scores in found]
            try:
                async with asyncio.timeout(safety.left_s()):
                    for rule in safety.models(scope):
                        await _judge(safety, rule, request.inputs, scope, found, flagged)
            except TimeoutError:
                late = "the deadline passed before all inputs were judged; send fewer of them"
                raise DeadlineExceeded(late) from None
            finally:
                safety.charge()
        pack, pins = safety.pack, safety.terms.pins
        results = tuple(_moderation(pack, *each) for each in zip(found, flagged, strict=True))
        skipped = ("probe",) if pack.probe is not None and scope == "output" else ()
        return Moderated(received.request_id, pins.deployment, pins.pack_digest, results, skipped)


async def _judge(
    safety: RequestSafety,
    rule: ModelRule,
    texts: Sequence[str],
    scope: Scope,
    found: Sequence[_Scores],
    flagged: Sequence[set[str]],
) -> None:
    """Add a model's verdicts on the texts. Raises the error because of which there is none."""
    places = asyncio.Semaphore(_MAX_AT_ONCE)

    async def one(at: int) -> None:
        async with places:
            scores = await safety.scores(rule, texts[at], scope)
        for label, category in rule.labels.items():
            found[at][category] = max(found[at].get(category, 0.0), scores[label])
        flagged[at].update(safety.found(rule, scores))

    try:
        async with TaskGroup() as group:
            for at in range(len(texts)):
                group.create_task(one(at))
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None


def _matched(rules: TextRules, texts: Sequence[str]) -> list[_Scores]:
    """Return the categories that each text has by lists and personal data."""
    found = []
    for text in texts:
        scan = TextScan(rules)
        scan.feed(text)
        scan.finish()
        found.append({match.category: 1.0 for match in scan.matches})
    return found


def _moderation(pack: SafetyPack, scores: _Scores, flags: set[str]) -> Moderation:
    return Moderation(
        bool(flags),
        tuple(
            ModeratedCategory(name, name in flags, scores.get(name, 0.0), category.action)
            for name, category in sorted(pack.categories.items())
        ),
    )
