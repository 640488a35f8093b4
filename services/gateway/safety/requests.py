"""One request under the rules of its pack: its texts are searched and judged, and finds are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import count
from operator import add
from typing import Any, Final, Protocol

import structlog

from fairway.formats.guards import JudgedTurn
from fairway.formats.safety import ClassifierRule, JudgeRule, SafetyAction, Scope
from services.core.arms import ArmKey
from services.core.errors import ContentFiltered, FairwayError
from services.core.generation import NO_USAGE, GenerationSpec, Principal, Usage
from services.core.records import Meta, Priority
from services.core.rollouts.routes import SHADOW_TENANT, SplitCaller
from services.core.safety import REDACTED_TEXT, UNAVAILABLE, Intervention
from services.gateway.catalog import ModelCatalog, Route
from services.gateway.policy.claims import Payer
from services.gateway.safety.lists import TextMatch, TextRules, TextScan
from services.gateway.safety.packs import CompiledPack, SafetyTerms
from services.gateway.safety.record import SafetyRecord
from services.gateway.slis import ScreenEnd
from services.ports.clock import Clock
from services.runtime.supervisor import Supervisor

log = structlog.get_logger()

ModelRule = ClassifierRule | JudgeRule
# The least time that a verdict may take, whatever ``hold_s`` is: that of a batch or two.
LEAST_HOLD_S: Final = 1.0
_RETRY_S: Final = 0.1
CHARS_PER_TOKEN: Final = 4  # assumed where a text is cut before it is tokenised
# Characters that are searched before others have a turn of the event loop.
_SLICE_CHARS: Final = 4096


@dataclass(slots=True)
class ModelUse:
    """What a request used of a model. Rows of it have ``request_id``; generations have ids of their own."""

    request_id: str
    usage: Usage = NO_USAGE
    is_reported: bool = False  # whether the usage ledger has it, so that limits alone are to be charged

    def add(self, usage: Usage) -> None:
        self.usage = Usage(*map(add, astuple(self.usage), astuple(usage)))


@dataclass(slots=True)
class Asker:
    """The tenant for which models judge: verdicts run in its turn, and it is charged for them."""

    request_id: str
    principal: Principal
    payer: Payer
    priority: Priority
    session_key: str
    # On the injected clock.
    deadline_s: float
    traceparent: str = ""
    # The use of models that is not settled yet, by model and version.
    uses: dict[tuple[str, str], ModelUse] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=partial(count, 1))  # numbers of uses and generations

    def route(self, catalog: ModelCatalog, model: str) -> Route:
        """Return the route of a model that judges for the tenant. Raises as ``require_servable``."""
        tenant = self.payer.tenant
        caller = SplitCaller(tenant.meta.name, self.session_key, tenant.max_priority)
        route = catalog.resolve(model, caller)
        catalog.require_servable(route, tenant.residency)
        return route

    def next_id(self) -> str:
        """Return a request id of what judges: workers report use by it, and the gateway settles that."""
        return f"{self.request_id}-safety-{next(self.numbers)}"

    def use_of(self, route: Route) -> ModelUse:
        """Return the use of a model, to which its use is added until it is settled."""
        key = route.model, route.version_digest
        if key not in self.uses:
            self.uses[key] = ModelUse(self.next_id())
        return self.uses[key]


class Classifiers(Protocol):
    async def scores(self, asker: Asker, rule: ModelRule, turns: Sequence[JudgedTurn]) -> Mapping[str, float]:
        """Return the probability of each label of the rule in the last turn.

        Raises the error because of which there is no verdict. Its use is added to ``asker``.
        """

    def settle(self, asker: Asker) -> None:
        """Charge what was used so far, in the background."""


class SafetyDesk:
    """What the texts of all requests of a gateway are judged through."""

    def __init__(
        self, classifiers: Classifiers, record: SafetyRecord, clock: Clock, supervisor: Supervisor
    ) -> None:
        self.classifiers = classifiers
        self.record = record
        self.clock = clock
        self.supervisor = supervisor

    def open(self, terms: SafetyTerms, asker: Asker) -> RequestSafety:
        """Return what judges a request by the packs that it obeys, and by one that only flags."""
        shadow = None
        if terms.shadow is not None:
            # No tenant is charged for what only compares: it runs as the tenant of copies, unsettled.
            owner = replace(asker.payer.tenant, meta=Meta(SHADOW_TENANT))
            payer = replace(asker.payer, tenant=owner)
            apart = replace(asker, request_id=f"{asker.request_id}-shadow", payer=payer, uses={})
            shadow = RequestSafety(terms, terms.shadow, apart, self, flag_only=True)
        return RequestSafety(terms, terms.compiled, asker, self, shadow=shadow)


class RequestSafety:
    """One request under one pack. ``shadow``: the same request under a pack that only flags."""

    def __init__(
        self,
        terms: SafetyTerms,
        compiled: CompiledPack,
        asker: Asker,
        desk: SafetyDesk,
        *,
        flag_only: bool = False,
        shadow: RequestSafety | None = None,
    ) -> None:
        self.terms = terms
        self.pack = compiled.pack
        self.shadow = shadow
        self.request_id = asker.request_id
        self._rules = compiled.rules
        self._asker = asker
        self._desk = desk
        self._flag_only = flag_only
        self._found: set[SafetyAction] = set()  # what was done, or would have been
        self._unjudged = False  # whether something ended for want of a verdict
        self._first_hold_s: float | None = None
        self._counted = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._question = ""

    def asks(self, question: str) -> None:
        """Have outputs judged as answers to ``question``, the text of the user's last turn."""
        self._question = question
        if self.shadow is not None:
            self.shadow.asks(question)

    def action_of(self, category: str) -> SafetyAction:
        """Return what a find of the category does."""
        return "flag" if self._flag_only else self._action(category)

    def _action(self, category: str) -> SafetyAction:
        return "block" if category == UNAVAILABLE else self.pack.categories[category].action

    def now_s(self) -> float:
        return self._desk.clock.monotonic_s()

    def left_s(self) -> float:
        """Return the time until the deadline of the request."""
        return max(0.0, self._asker.deadline_s - self.now_s())

    def rules(self, scope: Scope) -> TextRules:
        return self._rules[scope]

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run what judges a text of the request."""
        task = self._desk.supervisor.spawn(name, work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def held(self, arrived_s: float) -> None:
        """Count how long a piece of output was held."""
        held_s = self.now_s() - arrived_s
        if self._first_hold_s is None:
            self._first_hold_s = held_s
        if not self._flag_only:
            self._desk.record.held(held_s)

    def models(self, scope: Scope) -> tuple[ModelRule, ...]:
        rules: tuple[ModelRule, ...] = (*self.pack.classifiers, *self.pack.judges)
        return tuple(rule for rule in rules if scope in rule.scopes)

    def scans(self, spec: GenerationSpec) -> tuple[TextScan, ...]:
        """Return what searches one output: as it is, and with escapes decoded where it may be JSON."""
        rules = self._rules["output"]
        calls = spec.form is not None and spec.form.calls is not None
        is_json = calls or spec.constrained_form is not None or spec.sampling.constraint is not None
        return (TextScan(rules), TextScan(rules, arguments=True)) if is_json else (TextScan(rules),)

    async def judge(self, rule: ModelRule, text: str, scope: Scope) -> tuple[str, ...]:
        """Return the categories that a model finds in a text.

        Without a verdict the rule decides: UNAVAILABLE, or nothing with a flag. A rule that holds tries again
        until its pack's time is over.
        """
        pack, clock = self.pack, self._desk.clock
        fail = rule.fail or pack.fail
        until_s = clock.monotonic_s() + max(pack.hold_s, LEAST_HOLD_S)
        while True:
            try:
                async with asyncio.timeout(max(0.0, until_s - clock.monotonic_s())):
                    scores = await self.scores(rule, text, scope)
                return self.found(rule, scores)
            except (FairwayError, TimeoutError) as error:
                reason = error.reason if isinstance(error, FairwayError) else "LATE"
            self._desk.record.no_verdict(rule.model, reason)
            if fail == "hold" and clock.monotonic_s() + _RETRY_S < until_s:
                await clock.sleep(_RETRY_S)
                continue
            log.warning("safety.verdict_missed", request_id=self.request_id, model=rule.model, reason=reason)
            if fail == "open":
                self.note_passed(scope)
                return ()
            return (UNAVAILABLE,)

    async def scores(self, rule: ModelRule, text: str, scope: Scope) -> Mapping[str, float]:
        """Return what ``Classifiers.scores`` does; an output is judged after the end of its question."""
        question = self._question[-CHARS_PER_TOKEN * rule.context_tokens :]
        answer = (JudgedTurn("user", question), JudgedTurn("assistant", text))
        turns = answer if scope == "output" else (JudgedTurn("user", text),)
        return await self._desk.classifiers.scores(self._asker, rule, turns)

    def found(self, rule: ModelRule, scores: Mapping[str, float]) -> tuple[str, ...]:
        """Return the categories of labels at or above their thresholds."""
        least = {label: rule.thresholds.get(label, rule.threshold) for label in rule.labels}
        return tuple(dict.fromkeys(rule.labels[label] for label in least if scores[label] >= least[label]))

    def note(self, category: str, scope: Scope, choice: int, position: int, text: str) -> None:
        """Record a find."""
        self._found.add(self._action(category))
        self._unjudged |= category == UNAVAILABLE
        self._add(Intervention(self.action_of(category), category, scope, choice, position, _hash(text)))

    def note_passed(self, scope: Scope) -> None:
        """Record that text passes without a verdict."""
        self._found.add("flag")
        self._add(Intervention("flag", UNAVAILABLE, scope, 0, 0, _hash("")))

    def _add(self, found: Intervention) -> None:
        pins = self.terms.pins
        pack = pins.shadow_digest if self._flag_only else pins.pack_digest or pins.default_digest
        self._desk.record.add(self._asker.principal, self.request_id, pack, found)

    def end(self, usage: Usage) -> None:
        """Charge the use of models, and count the request for the tenant's pack. ``usage``: the request's."""
        tokens = usage.prompt_tokens + usage.output_tokens
        self._count(tokens)
        if self.shadow is not None:
            self._desk.supervisor.spawn(f"count {self.request_id}", self.shadow.count_at_rest(tokens))
        self.charge()

    def charge(self) -> None:
        """Charge the use of models so far, in the background."""
        self._desk.classifiers.settle(self._asker)

    async def count_at_rest(self, tokens: int) -> None:
        """Count the request once no verdict is awaited."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._count(tokens)

    def _count(self, tokens: int) -> None:
        """Count the request once for the version of its tenant's pack, if that is what judges it."""
        device_s = sum(use.usage.device_s for use in self._asker.uses.values())
        pins = self.terms.pins
        digest = pins.shadow_digest if self._flag_only else pins.pack_digest
        if self._counted or not digest:
            return
        self._counted = True
        found = ScreenEnd(
            bool(self._found - {"flag"}),
            "flag" in self._found,
            self._first_hold_s or 0.0,
            tokens,
            device_s,
            self._unjudged,
        )
        asker, arm = self._asker, ArmKey(pins.deployment, digest)
        tenant = asker.principal.tenant_id
        self._desk.record.count(arm, tenant, asker.priority, asker.session_key, pins.step, found)

    # --- inputs -----------------------------------------------------------------------------------

    async def inputs(self, texts: Sequence[str], field_of: Callable[[int], str], *, anew: bool) -> list[str]:
        """Return the texts of an input as the model may read them. Raises ContentFiltered.

        ``field_of`` returns the field of a text by its number. Not ``anew``: an input that passed when its
        request began; it is redacted as it was then.
        """
        if self.shadow is not None and anew:
            name = f"judge {self.request_id}"
            self.spawn(name, self.shadow.look(texts))
        passed = [await self._searched(text, field_of(at), anew=anew) for at, text in enumerate(texts)]
        whole = "\n".join(passed)
        for rule in self.models("input") if anew and whole.strip() else ():
            for category in await self.judge(rule, whole, "input"):
                self.note(category, "input", 0, 0, whole)
                if self.action_of(category) == "block":
                    raise self._refusal(category, field_of(0))
        return passed

    async def look(self, texts: Sequence[str]) -> None:
        """Record what a pack that only flags finds in an input."""
        await self.inputs(texts, lambda _: "", anew=True)

    async def _searched(self, text: str, name: str, *, anew: bool) -> str:
        """Return a text as its lists let it pass. Raises ContentFiltered."""
        rules, action_of = self._rules["input"], self.action_of
        scans = [TextScan(rules)]
        if "\\" in text:
            scans.append(TextScan(rules, arguments=True))
        for start in range(0, len(text), _SLICE_CHARS):
            for scan in scans:
                scan.feed(text[start : start + _SLICE_CHARS])
            await self._desk.clock.sleep(0.0)
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
