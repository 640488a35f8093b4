"""Safety packs: ``safety_policy.json``, the rules by which inputs and outputs are judged.

A pack names categories with an action each, and the lists, recognisers of personal data, probe, classifiers
and judges that find them. A version's own pack is the least strict one: ``stricter`` joins a tenant's to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from fairway.formats import expressions
from fairway.formats.folding import fold
from fairway.formats.guards import JudgeTemplate, guard_problem

MAX_PACK_BYTES: Final = 1024 * 1024
MAX_PHRASE_CHARS: Final = 256
MAX_PHRASES: Final = 20_000
MAX_PATTERNS: Final = 256
# Most character positions of all expressions of a pack, repeats written out.
MAX_PACK_POSITIONS: Final = 8_192
MAX_WINDOW_TOKENS: Final = 256
MAX_GUIDELINE_CHARS: Final = 4_096

# The strictest first. block: refuse an input, end an output; stop: end an output; redact: replace the text;
# flag: count and record.
SafetyAction = Literal["block", "stop", "redact", "flag"]
Scope = Literal["input", "output"]
# What happens without a verdict: nothing passes, all waits for at most ``hold_s``, or all passes with a flag.
FailMode = Literal["closed", "hold", "open"]
DataKind = Literal["email", "card", "iban", "phone", "ip", "ssn"]

_ACTIONS: Final[tuple[SafetyAction, ...]] = ("block", "stop", "redact", "flag")
_FAIL_MODES: Final[tuple[FailMode, ...]] = ("closed", "hold", "open")
_SCOPES: Final[tuple[Scope, ...]] = ("input", "output")

CATEGORY_PATTERN: Final = r"^[a-z0-9_/-]{1,64}\Z"
_CategoryName = Annotated[str, msgspec.Meta(pattern=CATEGORY_PATTERN)]
_Threshold = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Label = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Scopes = Annotated[tuple[Scope, ...], msgspec.Meta(min_length=1, max_length=2)]


class SafetyCategory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    action: SafetyAction


class TextList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Phrases and patterns of one category. They are compared with folded text (``folding``)."""

    category: _CategoryName
    phrases: tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PHRASE_CHARS)], ...] = ()
    patterns: tuple[str, ...] = ()
    scopes: _Scopes = _SCOPES
    decode: Annotated[tuple[Literal["base64"], ...], msgspec.Meta(max_length=1)] = ()
    # Whether no character of a word may be next to a match.
    whole_words: bool = False
    # Whether phrases are found with spaces and signs between their letters.
    fold_spaces: bool = False


class PersonalData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    category: _CategoryName
    kinds: Annotated[tuple[DataKind, ...], msgspec.Meta(min_length=1, max_length=6)]
    scopes: _Scopes = _SCOPES


class ProbeRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The linear probe on activations, whose weights come with the version; it judges outputs."""

    category: _CategoryName
    threshold: _Threshold


class _ModelRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    labels: Annotated[dict[_Label, _CategoryName], msgspec.Meta(min_length=1, max_length=64)]
    threshold: _Threshold = 0.5
    # The thresholds of single labels, in place of ``threshold``.
    thresholds: dict[_Label, _Threshold] = {}
    scopes: _Scopes = _SCOPES
    every_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_WINDOW_TOKENS)] = 16
    context_tokens: Annotated[int, msgspec.Meta(ge=1, le=32_768)] = 512
    # The pack's ``fail`` where it is not set.
    fail: FailMode | None = None


class ClassifierRule(_ModelRule, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fixed-cost model that judges a text of the last ``context_tokens`` tokens."""


class JudgeRule(_ModelRule, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A guard model that answers in text, prompted by its template."""

    template: JudgeTemplate
    # What shieldgemma judges by, for each label; none for other templates.
    guidelines: dict[_Label, Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_GUIDELINE_CHARS)]] = {}


class SafetyPack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A pack without rules lets everything pass."""

    categories: Annotated[dict[_CategoryName, SafetyCategory], msgspec.Meta(max_length=64)] = {}
    lists: Annotated[tuple[TextList, ...], msgspec.Meta(max_length=256)] = ()
    personal_data: Annotated[tuple[PersonalData, ...], msgspec.Meta(max_length=16)] = ()
    probe: ProbeRule | None = None
    classifiers: Annotated[tuple[ClassifierRule, ...], msgspec.Meta(max_length=8)] = ()
    judges: Annotated[tuple[JudgeRule, ...], msgspec.Meta(max_length=8)] = ()
    # The tokens that a stream is held back at most beyond what the rules themselves hold.
    window_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_WINDOW_TOKENS)] = 32
    fail: FailMode = "closed"
    hold_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 5.0


def check_policy(data: bytes) -> SafetyPack:
    """Return the pack of a ``safety_policy.json``. Raises ValueError with the field's path and the mend."""
    if len(data) > MAX_PACK_BYTES:
        raise ValueError(
            f"a safety policy has at most {MAX_PACK_BYTES} bytes, not {len(data)}; split its lists"
        )
    try:
        pack = msgspec.json.decode(data, type=SafetyPack)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ValueError(f"a safety policy is a JSON object of its fields: {exc}") from exc
    _check_categories(pack)
    _check_lists(pack)
    _check_models(pack)
    return pack


def _check_categories(pack: SafetyPack) -> None:
    used = [(f"lists[{i}].category", rule.category) for i, rule in enumerate(pack.lists)]
    used += [(f"personal_data[{i}].category", rule.category) for i, rule in enumerate(pack.personal_data)]
    by_model: list[tuple[str, str]] = []
    if pack.probe is not None:
        by_model.append(("probe.category", pack.probe.category))
    for path, rule in _model_rules(pack):
        by_model += [(f"{path}.labels[{label!r}]", category) for label, category in rule.labels.items()]
    for path, category in used + by_model:
        if category not in pack.categories:
            raise ValueError(f"{path}: {category!r} is no category; add it to categories")
    for path, category in by_model:
        if pack.categories[category].action == "redact":
            raise ValueError(
                f"{path}: {category!r} redacts, and a model's verdict has no place in the text; "
                "use a category of block, stop or flag"
            )


def _check_lists(pack: SafetyPack) -> None:
    phrases = sum(len(rule.phrases) for rule in pack.lists)
    if phrases > MAX_PHRASES:
        raise ValueError(f"lists: a pack has at most {MAX_PHRASES} phrases, not {phrases}; remove some")
    if (patterns := sum(len(rule.patterns) for rule in pack.lists)) > MAX_PATTERNS:
        raise ValueError(f"lists: a pack has at most {MAX_PATTERNS} patterns, not {patterns}; remove some")
    positions = 0
    for i, rule in enumerate(pack.lists):
        if rule.fold_spaces and (rule.patterns or rule.whole_words):
            raise ValueError(
                f"lists[{i}].fold_spaces: it is for phrases, in which words have no edges; "
                "put patterns and whole_words into another list"
            )
        for j, phrase in enumerate(rule.phrases):
            folded = fold(phrase)
            if not folded.strip() or (rule.fold_spaces and not any(map(str.isalnum, folded))):
                raise ValueError(f"lists[{i}].phrases[{j}]: it has no visible character; remove it")
            if len(folded) > MAX_PHRASE_CHARS:
                raise ValueError(
                    f"lists[{i}].phrases[{j}]: it has {len(folded)} characters once folded, more than "
                    f"{MAX_PHRASE_CHARS}; shorten it"
                )
        for j, pattern in enumerate(rule.patterns):
            try:
                positions += expressions.positions_of(expressions.parse(pattern))
            except ValueError as exc:
                raise ValueError(f"lists[{i}].patterns[{j}]: {exc}") from exc
            if positions > MAX_PACK_POSITIONS:
                raise ValueError(
                    f"lists[{i}].patterns[{j}]: with it, the patterns have {positions} positions, more than "
                    f"{MAX_PACK_POSITIONS}; bound their repeats lower"
                )


def _check_models(pack: SafetyPack) -> None:
    for path, rule in _model_rules(pack):
        if unknown := sorted(rule.thresholds.keys() - rule.labels.keys()):
            raise ValueError(f"{path}.thresholds: {unknown[0]!r} is not in labels; add it there or remove it")
        if "output" in rule.scopes and rule.every_tokens > max(pack.window_tokens, 1):
            raise ValueError(
                f"{path}.every_tokens: verdicts every {rule.every_tokens} tokens hold more than "
                f"window_tokens ({pack.window_tokens}); lower it or raise the window"
            )
    for i, judge in enumerate(pack.judges):
        if problem := guard_problem(judge.template, judge.labels, judge.guidelines):
            raise ValueError(f"judges[{i}].{problem}")
    for field, rules in (("classifiers", pack.classifiers), ("judges", pack.judges)):
        models = [rule.model for rule in rules]
        if double := [model for model in models if models.count(model) > 1]:
            raise ValueError(f"{field}: {double[0]!r} is there twice; join its labels")


def _model_rules(pack: SafetyPack) -> list[tuple[str, _ModelRule]]:
    classifiers = [(f"classifiers[{i}]", rule) for i, rule in enumerate(pack.classifiers)]
    return [*classifiers, *((f"judges[{i}]", rule) for i, rule in enumerate(pack.judges))]


def stricter(default: SafetyPack, tenant: SafetyPack) -> SafetyPack:
    """Return the pack that finds whatever either finds, and acts on it as the stricter of the two.

    A category that would redact what a model or the probe finds stops instead: that has no place in the text.
    """
    categories = dict(default.categories)
    for name, category in tenant.categories.items():
        mine = categories.get(name, category)
        categories[name] = min(mine, category, key=lambda each: _ACTIONS.index(each.action))
    fail = _stricter_fail(default.fail, tenant.fail)
    classifiers = _joined_models(
        _resolved(default, default.classifiers), _resolved(tenant, tenant.classifiers), categories
    )
    judges = _joined_models(_resolved(default, default.judges), _resolved(tenant, tenant.judges), categories)
    probe = _joined_probes(default.probe, tenant.probe, categories)
    without_place = {category for rule in (*classifiers, *judges) for category in rule.labels.values()}
    if probe is not None:
        without_place.add(probe.category)
    for name in sorted(without_place):
        if categories[name].action == "redact":
            categories[name] = SafetyCategory(action="stop")
    return msgspec.structs.replace(
        default,
        categories=categories,
        lists=default.lists + tuple(rule for rule in tenant.lists if rule not in default.lists),
        personal_data=default.personal_data
        + tuple(rule for rule in tenant.personal_data if rule not in default.personal_data),
        probe=probe,
        classifiers=classifiers,
        judges=judges,
        window_tokens=max(default.window_tokens, tenant.window_tokens),
        fail=fail,
        hold_s=max(default.hold_s, tenant.hold_s),
    )


_AnyModelRule = TypeVar("_AnyModelRule", bound=_ModelRule)


def _resolved(pack: SafetyPack, rules: tuple[_AnyModelRule, ...]) -> tuple[_AnyModelRule, ...]:
    """Return the rules, each with a ``fail`` of its own: its pack's may not be the joined pack's."""
    return tuple(msgspec.structs.replace(rule, fail=rule.fail or pack.fail) for rule in rules)


def _joined_models(
    default: tuple[_AnyModelRule, ...],
    tenant: tuple[_AnyModelRule, ...],
    categories: Mapping[str, SafetyCategory],
) -> tuple[_AnyModelRule, ...]:
    """Return the rules of both, those of one model, template and guidelines as one."""
    joined = {_identity(rule): rule for rule in default}
    for rule in tenant:
        known = joined.get(_identity(rule))
        joined[_identity(rule)] = rule if known is None else _joined_model(known, rule, categories)
    return tuple(joined.values())


def _identity(rule: _ModelRule) -> tuple[object, ...]:
    if not isinstance(rule, JudgeRule):
        return (rule.model,)
    return rule.model, rule.template, *sorted(rule.guidelines.items())


def _joined_model(
    one: _AnyModelRule, other: _AnyModelRule, categories: Mapping[str, SafetyCategory]
) -> _AnyModelRule:
    labels = dict(one.labels)
    for label, category in other.labels.items():
        labels[label] = _stricter_category(labels.get(label, category), category, categories)
    thresholds = {
        label: min(
            rule.thresholds.get(label, rule.threshold) for rule in (one, other) if label in rule.labels
        )
        for label in labels
    }
    return msgspec.structs.replace(
        one,
        labels=labels,
        threshold=min(one.threshold, other.threshold),
        thresholds=thresholds,
        scopes=tuple(scope for scope in _SCOPES if scope in one.scopes + other.scopes),
        every_tokens=min(one.every_tokens, other.every_tokens),
        context_tokens=max(one.context_tokens, other.context_tokens),
        fail=_stricter_fail(one.fail, other.fail),
    )


def _joined_probes(
    one: ProbeRule | None, other: ProbeRule | None, categories: Mapping[str, SafetyCategory]
) -> ProbeRule | None:
    if one is None or other is None:
        return one or other
    return ProbeRule(
        category=_stricter_category(one.category, other.category, categories),
        threshold=min(one.threshold, other.threshold),
    )


def _stricter_category(one: str, other: str, categories: Mapping[str, SafetyCategory]) -> str:
    return min(one, other, key=lambda name: _ACTIONS.index(categories[name].action))


def _stricter_fail(one: FailMode | None, other: FailMode | None) -> FailMode:
    found = [mode for mode in (one, other) if mode is not None]
    return min(found, key=_FAIL_MODES.index)
