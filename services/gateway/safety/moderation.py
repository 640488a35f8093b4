"""Moderation of texts by a safety pack, without a generation: its lists, personal data and classifiers.

A classifier that does not answer fails the call: a text that nobody judged is not reported as harmless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from msgspec import structs

from fairway.formats.safety import ClassifierRule, SafetyAction, SafetyPack, Scope
from fairway.v1 import inference_pb2
from services.adapters.threads import in_thread
from services.core.errors import FailedPrecondition, InvalidInput
from services.core.generation import Principal
from services.gateway.events import Received
from services.gateway.rows.results import PROBABILITIES
from services.gateway.rows.service import RowsService
from services.gateway.safety.lists import TextRules, TextScan
from services.gateway.safety.packs import SafetyTerms
from services.rpc import bounds

# The characters of all texts of a call: their search takes a thread for about a second.
MAX_CHARS: Final = 262_144
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
    # The rules that judge generations alone.
    skipped: tuple[str, ...] = ()


class ModerationCalls(Protocol):
    """What moderation needs of the gateway's service; raises the tree of ``core/errors.py``."""

    def check_open(self, tenant_id: str, model: str, received: Received) -> None: ...

    def counted(self, principal: Principal) -> AbstractAsyncContextManager[None]: ...

    async def pack(self, principal: Principal, name: str, session_key: str) -> SafetyTerms: ...


class Moderations:
    """Stateless. Calls count against the same bounds as calls that only tokenise."""

    def __init__(self, service: ModerationCalls, rows: RowsService) -> None:
        self._service = service
        self._rows = rows

    async def moderate(
        self,
        principal: Principal,
        request: inference_pb2.ModerateRequest,
        *,
        received: Received,
        timeout_s: float | None = None,
    ) -> Moderated:
        """Return the verdicts on the inputs, in order.

        Raises InvalidInput, and as ``ModerationCalls.pack`` and ``RowsService.infer``.
        """
        bounds.check(request)
        if (chars := sum(map(len, request.inputs))) > MAX_CHARS:
            raise InvalidInput(
                f"the inputs have {chars} characters, more than {MAX_CHARS}: send fewer", field="inputs"
            )
        self._service.check_open(principal.tenant_id, request.pack, received)
        scope: Scope = "output" if request.outputs else "input"
        async with self._service.counted(principal):
            terms = await self._service.pack(principal, request.pack, request.session_key)
            found = await in_thread(_matched, terms.compiled.rules[scope], request.inputs)
            flagged = [set(scores) for scores in found]
            for number, rule in enumerate(terms.pack.classifiers):
                if scope in rule.scopes:
                    # A request id is charged once, and each classifier is.
                    apart = structs.replace(received, request_id=f"{received.request_id}-{number}")
                    probabilities = await self._classified(principal, rule, request, apart, timeout_s)
                    for scores, flags, row in zip(found, flagged, probabilities, strict=True):
                        _add(rule, row, scores, flags)
        results = tuple(_moderation(terms.pack, *each) for each in zip(found, flagged, strict=True))
        return Moderated(
            received.request_id,
            terms.pins.deployment,
            terms.pins.pack_digest,
            results,
            _skipped(terms.pack, scope),
        )

    async def _classified(
        self,
        principal: Principal,
        rule: ClassifierRule,
        request: inference_pb2.ModerateRequest,
        received: Received,
        timeout_s: float | None,
    ) -> list[Mapping[str, float]]:
        """Return the probability of each label of the rule, for each input."""
        caller = replace(principal, models=())  # the pack names the model, whatever the key may use
        asked = inference_pb2.InferRequest(
            model=rule.model, texts=request.inputs, session_key=request.session_key
        )
        _, signature = await self._rows.describe(caller, inference_pb2.InferRequest(model=rule.model))
        names = signature.classes.names
        if unknown := sorted(rule.labels.keys() - set(names)):
            raise FailedPrecondition(
                f"the classifier {rule.model} has no label {unknown[0]!r}: roll out a pack that fits it",
                model=rule.model,
            )
        answer = await self._rows.infer(caller, asked, received=received, timeout_s=timeout_s, filtered=False)
        output = next(tensor for tensor in answer.outputs if tensor.name == PROBABILITIES)
        if output.shape != (len(request.inputs), len(names)):
            raise FailedPrecondition(
                f"the classifier {rule.model} answers in another shape", model=rule.model
            )
        rows = np.frombuffer(output.data, np.float64).reshape(output.shape).tolist()
        places = {label: names.index(label) for label in rule.labels}
        return [{label: row[place] for label, place in places.items()} for row in rows]


def _matched(rules: TextRules, texts: Sequence[str]) -> list[_Scores]:
    """Return the categories that each text has by lists and personal data."""
    found = []
    for text in texts:
        scan = TextScan(rules)
        scan.feed(text)
        scan.finish()
        found.append({match.category: 1.0 for match in scan.matches})
    return found


def _add(rule: ClassifierRule, row: Mapping[str, float], scores: _Scores, flags: set[str]) -> None:
    """Add a classifier's verdict on one text. What is no number counts as found."""
    for label, category in rule.labels.items():
        score = row[label] if row[label] == row[label] else 1.0
        scores[category] = max(scores.get(category, 0.0), score)
        if score >= rule.thresholds.get(label, rule.threshold):
            flags.add(category)


def _moderation(pack: SafetyPack, scores: _Scores, flags: set[str]) -> Moderation:
    return Moderation(
        bool(flags),
        tuple(
            ModeratedCategory(name, name in flags, scores.get(name, 0.0), category.action)
            for name, category in sorted(pack.categories.items())
        ),
    )


def _skipped(pack: SafetyPack, scope: Scope) -> tuple[str, ...]:
    judges = tuple(rule.model for rule in pack.judges if scope in rule.scopes)
    return ("probe", *judges) if pack.probe is not None and scope == "output" else judges
