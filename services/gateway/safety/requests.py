"""One request under the rules of its pack: its texts are searched and judged, and finds are recorded."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, Protocol

import structlog

from fairway.formats.safety import ClassifierRule, JudgeRule, SafetyPack, Scope
from services.core.errors import ContentFiltered, FairwayError
from services.core.generation import GenerationSpec, Principal, Usage
from services.core.records import Priority
from services.core.safety import REDACTED_TEXT, UNAVAILABLE, Intervention, SafetyTerms
from services.gateway.policy.claims import Payer
from services.gateway.safety.lists import TextMatch, TextRules, TextScan
from services.gateway.safety.record import SafetyRecord
from services.ports.clock import Clock
from services.runtime.supervisor import Supervisor

log = structlog.get_logger()

ModelRule = ClassifierRule | JudgeRule
# The least time that a verdict may take, whatever ``hold_s`` is: that of a batch or two.
LEAST_HOLD_S: Final = 1.0
_RETRY_S: Final = 0.1
_MOST_RULES: Final = 64
_FEW: Final = 64  # phrases and patterns that are compiled at once
# Characters that are searched before others have a turn of the event loop.
_SLICE_CHARS: Final = 4096


@dataclass(slots=True)
class Asker:
    """For whom models judge: verdicts run in its turn, and it is charged for them."""

    request_id: str
    principal: Principal
    payer: Payer
    priority: Priority
    session_key: str
    # On the injected clock.
    deadline_s: float
    traceparent: str = ""
    # The use of models that is not settled yet, by model and version.
    uses: dict[tuple[str, str], Usage] = field(default_factory=dict)
    settled: int = 0  # settlements so far


class Classifiers(Protocol):
    async def scores(self, asker: Asker, rule: ModelRule, text: str) -> Mapping[str, float]:
        """Return the probability of each label of the rule in a text.

        Raises the error because of which there is no verdict. Its use is added to ``asker``.
        """

    def settle(self, asker: Asker) -> None:
        """Charge what was used so far, in the background."""


class PackRules:
    """The rules of a pack, compiled."""

    def __init__(self, pack: SafetyPack) -> None:
        self._text = {scope: TextRules(pack, scope) for scope in ("input", "output")}
        models: tuple[ModelRule, ...] = (*pack.classifiers, *pack.judges)
        self._models = {
            scope: tuple(rule for rule in models if scope in rule.scopes) for scope in ("input", "output")
        }

    def text(self, scope: Scope) -> TextRules:
        return self._text[scope]

    def models(self, scope: Scope) -> tuple[ModelRule, ...]:
        return self._models[scope]


# Returns the rules of a request by its tenant, the version that it runs on, and its session key; None: it has
# none. Raises Unavailable where they cannot be read: no request runs without its rules.
ResolveSafety = Callable[[str, str, str], Awaitable[SafetyTerms | None]]


class SafetyDesk:
    """What the texts of all requests of a gateway are judged through."""

    def __init__(
        self,
        resolve: ResolveSafety,
        classifiers: Classifiers,
        record: SafetyRecord,
        clock: Clock,
        supervisor: Supervisor,
    ) -> None:
        self.resolve = resolve
        self.classifiers = classifiers
        self.record = record
        self.clock = clock
        self.supervisor = supervisor
        self._rules: OrderedDict[str, PackRules] = OrderedDict()

    async def open(self, asker: Asker, version_digest: str) -> RequestSafety | None:
        """Return a request under its rules for a version; None without any. Raises Unavailable.

        The rules of a pack are compiled once, many of them in a thread.
        """
        terms = await self.resolve(asker.principal.tenant_id, version_digest, asker.session_key)
        if terms is None:
            return None
        rules = self._rules.get(terms.digests)
        if rules is None:
            is_small = sum(len(rule.phrases) + len(rule.patterns) for rule in terms.pack.lists) <= _FEW
            rules = PackRules(terms.pack) if is_small else await asyncio.to_thread(PackRules, terms.pack)
            self._rules[terms.digests] = rules
            while len(self._rules) > _MOST_RULES:
                self._rules.popitem(last=False)
        self._rules.move_to_end(terms.digests)
        return RequestSafety(terms, rules, asker, self)


class RequestSafety:
    """The rules of one request."""

    def __init__(self, terms: SafetyTerms, rules: PackRules, asker: Asker, desk: SafetyDesk) -> None:
        self.terms = terms
        self.request_id = asker.request_id
        self._rules = rules
        self._asker = asker
        self._desk = desk

    def now_s(self) -> float:
        return self._desk.clock.monotonic_s()

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._desk.supervisor.spawn(name, work)

    def held(self, arrived_s: float) -> None:
        """Count how long a piece of output was held."""
        self._desk.record.held(self.now_s() - arrived_s)

    def models(self, scope: Scope) -> tuple[ModelRule, ...]:
        return self._rules.models(scope)

    def scans(self, spec: GenerationSpec) -> tuple[TextScan, ...]:
        """Return what searches one output: as it is, and with escapes decoded where it may be JSON."""
        rules = self._rules.text("output")
        calls = spec.form is not None and spec.form.calls is not None
        is_json = calls or spec.constrained_form is not None or spec.sampling.constraint is not None
        return (TextScan(rules), TextScan(rules, arguments=True)) if is_json else (TextScan(rules),)

    async def judge(self, rule: ModelRule, text: str) -> tuple[str, ...]:
        """Return the categories that a model finds in a text.

        Without a verdict the rule decides: UNAVAILABLE, or nothing with a flag. A rule that holds asks again
        until its pack's time is over.
        """
        pack, clock = self.terms.pack, self._desk.clock
        fail = rule.fail or pack.fail
        until_s = clock.monotonic_s() + max(pack.hold_s, LEAST_HOLD_S)
        while True:
            try:
                async with asyncio.timeout(max(0.0, until_s - clock.monotonic_s())):
                    scores = await self._desk.classifiers.scores(self._asker, rule, text)
                return tuple(dict.fromkeys(self._above(rule, scores)))
            except (FairwayError, TimeoutError) as error:
                reason = error.reason if isinstance(error, FairwayError) else "LATE"
            self._desk.record.no_verdict(rule.model, reason)
            if fail == "hold" and clock.monotonic_s() + _RETRY_S < until_s:
                await clock.sleep(_RETRY_S)
                continue
            log.warning("safety.verdict_missed", request_id=self.request_id, model=rule.model, reason=reason)
            if fail == "open":
                self.note_passed(0, 0)
                return ()
            return (UNAVAILABLE,)

    def _above(self, rule: ModelRule, scores: Mapping[str, float]) -> Iterator[str]:
        """Yield the categories of labels at or above their thresholds."""
        for label, category in rule.labels.items():
            if scores[label] >= rule.thresholds.get(label, rule.threshold):
                yield category

    def note(self, category: str, scope: Scope, choice: int, position: int, text: str) -> None:
        """Record a find."""
        self._add(
            Intervention(self.terms.action_of(category), category, scope, choice, position, _hash(text))
        )

    def note_passed(self, choice: int, position: int) -> None:
        """Record that text passes without a verdict."""
        self._add(Intervention("flag", UNAVAILABLE, "output", choice, position, _hash("")))

    def _add(self, found: Intervention) -> None:
        self._desk.record.add(self._asker.principal, self.request_id, self.terms, found)

    def settle(self) -> None:
        """Charge the use of models so far."""
        self._desk.classifiers.settle(self._asker)

    # --- inputs -----------------------------------------------------------------------------------

    async def inputs(self, texts: Sequence[str], field_of: Callable[[int], str], *, anew: bool) -> list[str]:
        """Return the texts of an input as the model may read them. Raises ContentFiltered.

        ``field_of`` returns the field of a text by its number. Not ``anew``: an input that passed when its
        request began; it is redacted as it was then.
        """
        passed = [await self._searched(text, field_of(at), anew=anew) for at, text in enumerate(texts)]
        whole = "\n".join(passed)
        for rule in self.models("input") if anew and whole.strip() else ():
            for category in await self.judge(rule, whole):
                self.note(category, "input", 0, 0, whole)
                if self.terms.action_of(category) == "block":
                    raise self._refusal(category, field_of(0))
        return passed

    async def _searched(self, text: str, name: str, *, anew: bool) -> str:
        """Return a text as its lists let it pass. Raises ContentFiltered."""
        rules, action_of = self._rules.text("input"), self.terms.action_of
        scans = [TextScan(rules)]
        if "\\" in text:
            scans.append(TextScan(rules, arguments=True))
        for start in range(0, len(text), _SLICE_CHARS):
            for scan in scans:
                scan.feed(text[start : start + _SLICE_CHARS])
            await asyncio.sleep(0)
        for scan in scans:
            scan.finish()
        matches = {(one.rule, one.start): one for scan in scans for one in scan.matches}
        ordered = sorted(matches.values(), key=lambda one: (one.start, one.end))
        for match in ordered if anew else ():
            self.note(match.category, "input", 0, match.start, text[match.start : match.end])
        for match in ordered:
            if action_of(match.category) == "block":
                raise self._refusal(match.category, name)
        return redacted(text, [one for one in ordered if action_of(one.category) == "redact"])

    def _refusal(self, category: str, name: str) -> ContentFiltered:
        if category == UNAVAILABLE:
            text = f"{name}: the safety pack's model gave no verdict, and without one nothing passes"
        else:
            text = f"{name} has what the safety pack blocks: {category}"
        return ContentFiltered(text, field=name, category=category)


def redacted(text: str, matches: Sequence[TextMatch]) -> str:
    """Return a text without its matches, which are in order."""
    found, end = [], 0
    for match in matches:
        if match.start >= end:
            found += [text[end : match.start], REDACTED_TEXT]
        end = max(end, match.end)
    return "".join([*found, text[end:]])


def _hash(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
