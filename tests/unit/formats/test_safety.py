"""Safety packs: what is refused, with its path; of two packs, the stricter."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.formats import safety
from fairway.formats.expressions import parse
from fairway.formats.safety import SafetyPack, check_policy, stricter

CATEGORIES = {"bad": {"action": "block"}, "own": {"action": "redact"}}
MODEL = {"model": "guard", "labels": {"toxic": "bad"}}


LABELS = st.sampled_from(["S1", "S2", "S3"])
GUIDELINES = st.sampled_from(["No insults.", "No riddles."])


def pack_of(**fields: Any) -> SafetyPack:
    return check_policy(json.dumps({"categories": CATEGORIES, **fields}).encode())


def test_a_pack_without_rules_is_one() -> None:
    assert check_policy(b"{}") == SafetyPack()


def test_every_field_is_read() -> None:
    pack = pack_of(
        lists=[
            {
                "category": "bad",
                "phrases": ["x"],
                "patterns": [r"\bx{1,9}\b"],
                "scopes": ["input"],
                "decode": ["base64"],
                "whole_words": True,
            }
        ],
        personal_data=[{"category": "own", "kinds": ["email", "card", "iban", "phone", "ip", "ssn"]}],
        probe={"category": "bad", "threshold": 0.5},
        classifiers=[MODEL | {"thresholds": {"toxic": 0.9}, "every_tokens": 8, "fail": "open"}],
        judges=[MODEL | {"template": "llama-guard", "labels": {"S1": "bad"}}],
        window_tokens=256,
        fail="hold",
        hold_s=2.5,
    )
    assert pack.lists[0].patterns == (r"\bx{1,9}\b",)
    assert pack.classifiers[0].thresholds == {"toxic": 0.9}
    assert (pack.window_tokens, pack.fail, pack.hold_s) == (256, "hold", 2.5)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"rules": []}, r"unknown field `rules`"),
        ({"categories": {"Bad": {"action": "block"}}}, r"in `\$\.categories`"),
        ({"categories": {"a" * 65: {"action": "block"}}}, r"in `\$\.categories`"),
        ({"categories": {"a\n": {"action": "block"}}}, r"in `\$\.categories`"),
        ({"categories": {f"c{i}": {"action": "flag"} for i in range(65)}}, r"<= 64 - at `\$\.cat"),
        ({"categories": {"bad": {"action": "warn"}}}, r"Invalid enum value 'warn' - at `\$\.categories"),
        ({"lists": [{"category": "new"}]}, r"^lists\[0\]\.category: 'new' is no category; add it"),
        ({"personal_data": [{"category": "new", "kinds": ["ip"]}]}, r"^personal_data\[0\]\.category: 'new'"),
        ({"personal_data": [{"category": "own", "kinds": ["name"]}]}, r"\$\.personal_data\[0\]\.kinds\[0\]"),
        ({"probe": {"category": "new", "threshold": 0.5}}, r"^probe\.category: 'new'"),
        ({"probe": {"category": "bad", "threshold": 1.5}}, r"<= 1\.0 - at `\$\.probe\.threshold`"),
        ({"probe": {"category": "own", "threshold": 0.5}}, r"^probe\.category: 'own' redacts"),
        ({"classifiers": [MODEL | {"labels": {"x": "new"}}]}, r"^classifiers\[0\]\.labels\['x'\]: 'new'"),
        ({"classifiers": [MODEL | {"labels": {"x": "own"}}]}, r"\[0\]\.labels\['x'\]: 'own' redacts"),
        ({"classifiers": [MODEL, MODEL]}, r"^classifiers: 'guard' is there twice; join"),
        ({"classifiers": [MODEL | {"thresholds": {"x": 0.1}}]}, r"\[0\]\.thresholds: 'x' is not in labels"),
        ({"classifiers": [MODEL | {"every_tokens": 64}]}, r"\[0\]\.every_tokens: .*raise the window"),
        ({"judges": [MODEL | {"template": "mine"}]}, r"\$\.judges\[0\]\.template"),
        (
            {"judges": [MODEL | {"template": "shieldgemma"}]},
            r"^judges\[0\]\.guidelines: shieldgemma judges each label by one, and 'toxic' has none; add it",
        ),
        (
            {"judges": [MODEL | {"template": "qwen3guard-stream"}]},
            r"^judges\[0\]\.template: 'qwen3guard-stream' is not served: .* neither engine runs",
        ),
        ({"judges": [MODEL]}, r"missing required field `template` - at `\$\.judges\[0\]`"),
        ({"window_tokens": 257}, r"<= 256 - at `\$\.window_tokens`"),
        ({"fail": "never"}, r"\$\.fail"),
    ],
)
def test_a_bad_pack_is_refused_with_the_path_and_the_mend(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        pack_of(**fields)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"phrases": ["x", "\u200b"]}, r"^lists\[0\]\.phrases\[1\]: .*remove it"),
        ({"phrases": ["!"], "fold_spaces": True}, r"^lists\[0\]\.phrases\[0\]: .*no visible"),
        ({"phrases": ["x" * 257]}, r"<= 256 - at `\$\.lists\[0\]\.phrases\[0\]`"),
        ({"phrases": ["ß" * 200]}, r"^lists\[0\]\.phrases\[0\]: .*400 characters"),
        ({"patterns": ["a", "b+"]}, r"^lists\[0\]\.patterns\[1\]: .*write \{1,64\}"),
        ({"patterns": ["a"], "fold_spaces": True}, r"^lists\[0\]\.fold_spaces"),
        ({"decode": ["rot13"]}, r"\$\.lists\[0\]\.decode\[0\]"),
        ({"patterns": ["a"] * 257}, r"at most 256 patterns, not 257; remove"),
        ({"patterns": ["[ab]{250}"] * 40}, r"^lists\[0\]\.patterns\[32\]: .*8250 positions"),
    ],
)
def test_a_bad_list_is_refused_with_the_path_and_the_mend(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        pack_of(lists=[{"category": "bad", **fields}])


def test_phrases_and_bytes_are_bounded() -> None:
    with pytest.raises(ValueError, match="at most 20000 phrases, not 20001; remove some"):
        pack_of(lists=[{"category": "bad", "phrases": [str(i) for i in range(20_001)]}])
    with pytest.raises(ValueError, match="at most 1048576 bytes"):
        check_policy(b" " * (safety.MAX_PACK_BYTES + 1))
    with pytest.raises(ValueError, match="JSON object"):
        check_policy(b'{"a":' * 100_000)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("a*", r"write \{0,64\}"),
        ("a{2,}", r"write \{2,64\}"),
        ("a{257}", "at most 256"),
        ("(a{16}){17}", "up to 272 characters"),
        ("(ab|cd|ef|gh|ij|kl|mn|op|qr){120}", "2160 positions"),
        ("a?", "matches the empty text"),
        ("", "matches the empty text"),
        (r"\b", "matches the empty text"),
        (r"a|", "matches the empty text"),
        (r"(a)\1", "groupref is not supported"),
        (r"(?=a)b", "assert is not supported"),
        (r"(?<!a)b", "assert_not is not supported"),
        (r"(?>a)b", "atomic_group is not supported"),
        (r"a?+b", "possessive_repeat is not supported"),
        (r"^ab$", "at is not supported"),
        (r"a\bb", "stands inside"),
        (r"(?i)a", "flags"),
        (r"(?i:a)", "subpattern is not supported"),
        (r"a(", "no expression"),
        (r"[[a]b]", "ambiguous"),
        (r"[a--b]", "ambiguous"),
        ("a  b", "one space"),
        ("[\u200b-\u200c]", "no single form"),
        ("a" * 513, "longer than 512"),
    ],
)
def test_an_expression_beyond_the_subset_is_refused_with_the_mend(source: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse(source)


@pytest.mark.parametrize(
    "source", ["---begin [a-z ]{1,20}key---", "a{256}", r"\b\w{1,256}\b", "(" * 200 + "a" + ")" * 200]
)
def test_a_bounded_expression_is_taken(source: str) -> None:
    parse(source)


# Of two packs, the stricter.

ACTIONS = ["flag", "redact", "stop", "block"]
FAILS = ["open", "hold", "closed"]
NAMES = st.sampled_from(["a", "b", "c"])


@st.composite
def packs(draw: st.DrawFn) -> SafetyPack:
    actions = draw(st.fixed_dictionaries({name: st.sampled_from(ACTIONS) for name in "abc"}))
    judged = [name for name in "abc" if actions[name] != "redact"]
    fields: dict[str, Any] = {
        "categories": {name: {"action": action} for name, action in actions.items()},
        "lists": [
            {"category": draw(NAMES), "phrases": [phrase]}
            for phrase in draw(st.lists(st.sampled_from(["x", "y"]), max_size=2))
        ],
        "personal_data": [{"category": draw(NAMES), "kinds": ["ip"]}] if draw(st.booleans()) else [],
        "window_tokens": draw(st.integers(16, 256)),
        "fail": draw(st.sampled_from(FAILS)),
        "hold_s": draw(st.sampled_from([0.5, 1.0])),
    }
    if judged:
        category = st.sampled_from(judged)
        if draw(st.booleans()):
            fields["probe"] = {"category": draw(category), "threshold": draw(st.floats(0, 1))}
        rules: list[dict[str, Any]] = [
            {
                "model": model,
                "labels": {label: draw(category) for label in draw(st.sets(LABELS, min_size=1))},
                "threshold": draw(st.floats(0, 1)),
                "scopes": draw(st.sampled_from([["input"], ["output"], ["input", "output"]])),
                "every_tokens": draw(st.integers(1, 16)),
                "context_tokens": draw(st.integers(1, 512)),
                "fail": draw(st.sampled_from([None, *FAILS])),
            }
            for model in draw(st.sets(st.sampled_from(["m", "n"])))
        ]
        for rule in rules:
            rule["thresholds"] = {
                label: draw(st.floats(0, 1)) for label in rule["labels"] if draw(st.booleans())
            }
        fields["classifiers"] = rules
        guided = draw(st.booleans())
        fields["judges"] = [
            rule
            | {
                "template": "shieldgemma" if guided else "llama-guard",
                "guidelines": {label: draw(GUIDELINES) for label in rule["labels"]} if guided else {},
            }
            for rule in rules
        ]
    return check_policy(json.dumps(fields).encode())


def asked(rule: Any) -> tuple[Any, ...]:
    return rule.model, getattr(rule, "template", ""), getattr(rule, "guidelines", {})


def at_least_as_strict(one: SafetyPack, other: SafetyPack) -> bool:
    """Return whether the first finds whatever the other finds, and acts and fails as strictly."""

    def action(name: str) -> int:
        return ACTIONS.index(one.categories[name].action)

    acts = all(action(name) >= ACTIONS.index(rule.action) for name, rule in other.categories.items())
    found = set(map(str, other.lists)) <= set(map(str, one.lists))
    found &= set(map(str, other.personal_data)) <= set(map(str, one.personal_data))
    if other.probe is not None:
        assert one.probe is not None
        acts &= action(one.probe.category) >= action(other.probe.category)
        found &= one.probe.threshold <= other.probe.threshold
    for mine, theirs in ((one.classifiers, other.classifiers), (one.judges, other.judges)):
        for rule in theirs:
            (same,) = [each for each in mine if asked(each) == asked(rule)]
            for label, category in rule.labels.items():
                acts &= action(same.labels[label]) >= action(category)
                limit = same.thresholds.get(label, same.threshold)
                found &= limit <= rule.thresholds.get(label, rule.threshold)
            found &= set(rule.scopes) <= set(same.scopes) and same.every_tokens <= rule.every_tokens
            found &= same.context_tokens >= rule.context_tokens
            acts &= FAILS.index(same.fail or one.fail) >= FAILS.index(rule.fail or other.fail)
    bounds = one.window_tokens >= other.window_tokens and one.hold_s >= other.hold_s
    return acts and found and bounds and FAILS.index(one.fail) >= FAILS.index(other.fail)


@given(packs(), packs())
def test_the_joined_pack_is_as_strict_as_either(default: SafetyPack, tenant: SafetyPack) -> None:
    joined = stricter(default, tenant)
    assert at_least_as_strict(joined, default)
    assert at_least_as_strict(joined, tenant)


@given(packs())
def test_a_pack_joined_to_itself_or_to_none_is_as_strict_as_it(pack: SafetyPack) -> None:
    for joined in (stricter(pack, pack), stricter(pack, SafetyPack(window_tokens=0, fail="open", hold_s=0))):
        assert at_least_as_strict(joined, pack)
        assert at_least_as_strict(pack, joined)


def test_what_would_redact_a_models_finding_stops() -> None:
    default = pack_of(categories={"x": {"action": "flag"}}, classifiers=[MODEL | {"labels": {"toxic": "x"}}])
    tenant = pack_of(categories={"x": {"action": "redact"}}, lists=[{"category": "x", "phrases": ["y"]}])
    assert stricter(default, tenant).categories["x"].action == "stop"
