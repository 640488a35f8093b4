"""Text layers of safety: what is found, however it is written and cut; what is held back, and no more."""

from __future__ import annotations

import base64
import json
import random
import re
import time
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import product
from re import _parser as re_parser
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fairway.formats.expressions import MAX_WIDTH, is_word
from fairway.formats.safety import SafetyPack, check_policy
from services.gateway.safety import automaton
from services.gateway.safety.lists import TextMatch, TextRules, TextScan


def pack_of(*lists: dict[str, Any], **fields: Any) -> SafetyPack:
    rules = [{"category": "bad", **each} for each in lists]
    categories = {"bad": {"action": "block"}, "data": {"action": "redact"}}
    return check_policy(json.dumps({"categories": categories, "lists": rules, **fields}).encode())


def scanned(pack: SafetyPack, pieces: list[str], *, arguments: bool = False) -> TextScan:
    scan = TextScan(TextRules(pack, "output"), arguments=arguments)
    for piece in pieces:
        scan.feed(piece)
    scan.finish()
    return scan


def found_in(pack: SafetyPack, text: str, *, arguments: bool = False) -> list[str]:
    """Return the matches of a text: the same by single characters, and none of it safe before."""
    whole = scanned(pack, [text], arguments=arguments)
    scan = TextScan(TextRules(pack, "output"), arguments=arguments)
    for char in text:
        scan.feed(char)
        assert covered(whole, scan.safe_chars) <= covered(scan, scan.chars)
    scan.finish()
    assert scan.matches == whole.matches
    return [text[match.start : match.end] for match in whole.matches]


def covered(scan: TextScan, end: int) -> set[tuple[int, int]]:
    """Return the places that each rule matches before an end. No two matches of a rule overlap."""
    spans = [(match.rule, match.start, min(match.end, end)) for match in scan.matches]
    places = [(rule, place) for rule, start, stop in spans for place in range(start, stop)]
    assert len(set(places)) == len(places)
    return set(places)


BOMB = pack_of({"phrases": ["build a bomb"]})


@pytest.mark.parametrize(
    "text",
    [
        "build a bomb",
        "BUILD A Bomb",
        "build  \n\t a bomb",
        "build a\u00a0bomb",
        "buіld а bоmb",  # Cyrillic
        "βuild α βomb",  # Greek
        "ｂｕｉｌｄ　ａ　ｂｏｍｂ",
        "𝓫𝓾𝓲𝓵𝓭 𝐚 𝕓𝕠𝕞𝕓",
        "ⓑⓤⓘⓛⓓ ⓐ ⓑⓞⓜⓑ",
        "bu\u200bild a bo\u200d\ufeffmb",
        "b\u0336u\u0301ild a\u0308 bömb",
        "bu\u00adild a bo\U000e0001mb\ufe0f"[:-1],
        "ʙuɪʟᴅ ᴀ ʙᴏᴍʙ",
        "bu\u2062ild\u2028a bomb",
        "buil\u0000d a bomb",
    ],
)
def test_a_phrase_is_found_however_it_is_written(text: str) -> None:
    assert found_in(BOMB, f"how to {text}, quickly") == [text]


@pytest.mark.parametrize(("char", "plain"), [*zip("ϲϹᏼᏴꭵᎥ", "ccbbii", strict=True), ("´", "'")])
def test_a_look_alike_whose_normal_form_resembles_another_is_found(char: str, plain: str) -> None:
    assert found_in(pack_of({"phrases": [f"a{plain}d"]}), f"a{char}d") == [f"a{char}d"]


def test_letters_of_other_scripts_are_found_in_either_form() -> None:
    pack = pack_of({"phrases": ["한국", "ばか", "किताब", "ガス"]})
    for phrase in ("한국", "ばか", "किताब", "ガス"):
        assert found_in(pack, f"x{phrase}y") == [phrase]
        apart = unicodedata.normalize("NFD", phrase)
        assert found_in(pack, f"x{apart}y") == [apart]
    assert found_in(pack, "ﾁｶﾞｽ") == ["ｶﾞｽ"]
    # A mark that makes another letter of it makes another word.
    assert found_in(pack, "ばが") == found_in(pack, "は\u3099か\u3099") == []


def test_a_letter_that_stands_for_several_is_within_the_match() -> None:
    assert found_in(pack_of({"phrases": ["ink", "strasse"]}), "pﬁnk Straße") == ["ﬁnk", "Straße"]


def test_whole_words_have_no_word_next_to_them() -> None:
    pack = pack_of({"phrases": ["cop", "c++"], "patterns": ["gr[ae]y"], "whole_words": True})
    assert found_in(pack, "cop, copper scop cop_ c++ c++x grey greyish") == ["cop", "c++", "grey"]
    assert found_in(pack, "cop") == ["cop"]
    scan = TextScan(TextRules(pack_of({"phrases": ["cop"], "whole_words": True}), "output"))
    scan.feed("say cop")
    assert scan.safe_chars == 4


def test_spaces_and_signs_between_letters_are_folded_where_a_list_asks() -> None:
    text = "m-a-k-e  p.o*i_s o\nn now"
    assert found_in(pack_of({"phrases": ["make poison"], "fold_spaces": True}), text) == [text[:-4]]
    assert found_in(pack_of({"phrases": ["make poison"]}), text) == []


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "text",
    [
        encoded("a secret plan for you"),
        encoded("ein größerer secret plan"),
        "q" + encoded("secret plan"),
        "qq" + encoded("a secret plan"),
        "qqq" + encoded("secret plan!!"),
        encoded("xx secret plan").rstrip("="),
        encoded("what follows is our secret plan"),
        encoded("ÿþ~~ secret plan ÿÿ").replace("+", "-").replace("/", "_"),
        encoded("now the secret plan is")[:20] + "\n" + encoded("now the secret plan is")[20:],
        base64.b64encode("secret plan".encode("utf-16-le")).decode(),
    ],
)
def test_base64_is_decoded_where_a_list_asks(text: str) -> None:
    asked = pack_of({"phrases": ["secret plan"], "decode": ["base64"]})
    (found,) = found_in(asked, f"data: {text}.")
    assert found in text
    assert found_in(pack_of({"phrases": ["secret plan"]}), f"data: {text}.") == []


def test_escapes_of_tool_arguments_are_decoded() -> None:
    pack = pack_of({"phrases": ["bomb 💣", "a/b", 'say "x"']})
    text = r'{"a": "b\u006fmb \ud83d\udca3", "c": ["a\/b", "say \"x\""], "d": "\ud83d", "e": "\\u0062"}'
    assert found_in(pack, text, arguments=True) == [r"b\u006fmb \ud83d\udca3", r"a\/b", r"say \"x\""]
    assert found_in(pack, text) == []


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("email", "write to John.Doe@example.com.au, or x@y", ["John.Doe@example.com.au"]),
        ("email", "ｊｏｈｎ＠ｅｘａｍｐｌｅ．ｃｏｍ", ["ｊｏｈｎ＠ｅｘａｍｐｌｅ．ｃｏｍ"]),
        (
            "card",
            "4111 1111 1111 1111. 4111111111111112 378282246310005",
            ["4111 1111 1111 1111", "378282246310005"],
        ),
        ("card", "٤١١١١١١١١١١١١١١١", ["٤١١١١١١١١١١١١١١١"]),
        ("iban", "GB82 WEST 1234 5698 7654 32, GB82 WEST 1234 5698 7654 33", ["GB82 WEST 1234 5698 7654 32"]),
        ("iban", "de89370400440532013000", ["de89370400440532013000"]),
        ("phone", "+49 (30) 1234567 or (212) 555-1234 or 12-34", ["+49 (30) 1234567", "(212) 555-1234"]),
        ("ip", "192.168.10.20 256.1.1.1 1.2.3 12:30:45 a::b", ["192.168.10.20"]),
        ("ip", "at 2001:db8::ff00:42:8329", ["2001:db8::ff00:42:8329"]),
        ("ssn", "123-45-6789 000-12-3456 900-12-3456 123-00-6789", ["123-45-6789"]),
    ],
)
def test_personal_data_is_recognised(kind: str, text: str, expected: list[str]) -> None:
    pack = pack_of(personal_data=[{"category": "data", "kinds": [kind]}])
    assert found_in(pack, text) == expected


def test_a_scope_has_its_own_rules() -> None:
    pack = pack_of({"phrases": ["ask"], "scopes": ["input"]}, {"phrases": ["answer"], "scopes": ["output"]})
    scan = TextScan(TextRules(pack, "input"))
    scan.feed("ask, answer")
    scan.finish()
    assert [(match.category, match.start, match.end, match.rule) for match in scan.matches] == [
        ("bad", 0, 3, 0)
    ]


def test_only_what_is_undecided_is_held_back() -> None:
    scan = TextScan(
        TextRules(pack_of({"phrases": ["bomb", "bombers"], "patterns": ["x[0-9]{2,4}y"]}), "output")
    )
    safe = []
    for char in "a bombers bo x12y b":
        scan.feed(char)
        safe.append(scan.safe_chars)
    # After "bomb" it is reported, and held for "bombers"; after that nothing is.
    assert safe == [1, 2, 2, 2, 2, 2, 2, 2, 9, 10, 10, 10, 13, 13, 13, 13, 17, 18, 18]
    scan.finish()
    assert scan.safe_chars == scan.chars
    assert [(match.start, match.end) for match in scan.matches] == [(2, 9), (13, 17)]


def test_long_matches_are_placed_in_long_texts() -> None:
    phrase, pattern = "p" * 255 + "q", r"\bx[yz]{254}w\b"
    pack = pack_of(
        {"phrases": [phrase]}, {"phrases": ["r" * 255 + "s"], "whole_words": True, "patterns": [pattern]}
    )
    parts = ["p" * 128 + "\u200b" + "p" * 127 + "q", "r" * 255 + "s", "x" + "yz" * 127 + "w"]
    for part in parts:
        for before in (3_840, 3_900, 4_000):
            text = "Some words. " * (before // 12) + "é " + part + " " + part
            assert found_in(pack, text) == [part, part]


def test_overlapping_matches_of_a_rule_are_one() -> None:
    pack = pack_of({"phrases": ["abc", "efg", "ij"], "patterns": ["c.{1,3}gh"]}, {"phrases": ["b"]})
    scan = scanned(pack, ["abcdefghijk"])
    assert scan.matches == (TextMatch("bad", 0, 8, 0), TextMatch("bad", 1, 2, 1), TextMatch("bad", 8, 10, 0))


# Any text at all, cut anywhere: the same matches, and nothing safe is matched later.

RICH = pack_of(
    {"phrases": ["bomb", "omb", "bombs away", "ガス", "한국"], "decode": ["base64"]},
    {"phrases": ["bob", "mob", "b-b"], "patterns": [r"o[bm ]{1,5}b"], "whole_words": True},
    {"phrases": ["bob mob", "o"], "fold_spaces": True},
    {"patterns": [r"(?:bo|ob|b){2,6}m", r"\bm.{0,3}m", r"[^a-z]b?m"], "decode": ["base64"]},
    personal_data=[{"category": "data", "kinds": ["email", "card", "iban", "phone", "ip", "ssn"]}],
)
RICH_RULES = TextRules(RICH, "output")
FRAGMENTS = [
    *(
        "b",
        "o",
        "m",
        "bomb",
        "ob",
        " ",
        "  ",
        "\n",
        "-",
        "_",
        ".",
        "/",
        "=",
        "\u200b",
        "\u0301",
        "о",
        "Ｂ",
        "ﬁ",
        "é",
    ),
    *("か", "カ", "\u3099", "한", "\u1112", "\u1161", "\u11ab", "국", "💣"),
    *("\\", "\\u00", "\\u0062", "62", "\\ud83d", "\\udca3", '\\"'),
    *map(encoded, ("the bomb", "drop the bomb at dawn", "bombs away at dawn", "한국 is far away")),
    *("Ym9t", "YmJi", "me@", "ex.co", "m.uk", "4111", "1111 ", "+49", "(30) ", "123-45-", "6789", "1.2.3."),
    *("2001:db8::", "GB82", "WEST"),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(cut_texts(), st.booleans())
def test_matches_do_not_depend_on_cuts_and_nothing_safe_is_matched(
    cut: tuple[str, list[str]], arguments: bool
) -> None:
    text, pieces = cut
    whole = TextScan(RICH_RULES, arguments=arguments)
    whole.feed(text)
    last_safe = whole.safe_chars
    whole.finish()
    scan = TextScan(RICH_RULES, arguments=arguments)
    safe = 0
    for piece in pieces:
        scan.feed(piece)
        assert safe <= scan.safe_chars <= scan.chars
        safe = scan.safe_chars
        assert covered(whole, safe) <= covered(scan, scan.chars)
    assert safe == last_safe
    scan.finish()
    assert scan.matches == whole.matches
    assert scan.safe_chars == whole.safe_chars == len(text)


# Against a search that tries everything, on few letters. Here "-" is the only edge.

ALPHABET = "ab-"
ATOMS = st.sampled_from(["a", "b", "-", "[ab]", "[^a]", ".", r"\w"])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 1)).map(
            lambda each: f"(?:{each[0]}){{{each[1]},{each[1] + each[2]}}}"
        ),
    ),
    max_leaves=4,
)
SOURCES = st.tuples(st.sampled_from(["", r"\b"]), EXPRESSIONS, st.sampled_from(["", r"\b"])).map("".join)
PHRASES = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3, unique=True)


def every_match(pack: SafetyPack, text: str, *, ended: bool) -> Iterator[tuple[int, str, int, int]]:
    """Yield rule, phrase or pattern, start and end of each match that is complete in the text."""
    for index, rule in enumerate(pack.lists):
        for start, end in ((i, j) for i in range(len(text)) for j in range(i + 1, len(text) + 1)):
            found = []
            if text[start:end] in rule.phrases:
                found.append(("", rule.whole_words, rule.whole_words))
            for source in rule.patterns:
                plain = re.sub(r"^\\b|\\b$", "", source)
                if re.fullmatch(plain, text[start:end]):
                    edges = source.startswith(r"\b"), source.endswith(r"\b")
                    found.append((source, edges[0] or rule.whole_words, edges[1] or rule.whole_words))
            for source, before, after in found:
                fits = not (before and start and is_word(text[start - 1]))
                if after and fits:
                    fits = not is_word(text[end]) if end < len(text) else ended
                if fits:
                    yield index, source, start, end


def places_of(matches: Iterable[tuple[int, str, int, int]]) -> set[tuple[int, int]]:
    return {(rule, place) for rule, _, start, end in matches for place in range(start, end)}


@st.composite
def small_packs(draw: st.DrawFn) -> SafetyPack:
    sources = draw(st.lists(SOURCES, max_size=2))
    for source in sources:
        # What completes a match is four characters at most, so that the tests can try all.
        assume(0 < min(re_parser.parse(source).getwidth()) <= max(re_parser.parse(source).getwidth()) <= 5)
    return pack_of(
        {"phrases": draw(PHRASES)},
        {"phrases": draw(PHRASES), "whole_words": True},
        {"patterns": sources, "whole_words": draw(st.booleans())},
    )


@given(small_packs(), st.text(ALPHABET, max_size=9))
def test_every_match_is_found_and_no_other(pack: SafetyPack, text: str) -> None:
    scan = scanned(pack, list(text))
    assert covered(scan, len(text)) == places_of(every_match(pack, text, ended=True))


@given(small_packs(), st.text(ALPHABET, max_size=5))
def test_the_safe_part_is_exact(pack: SafetyPack, text: str) -> None:
    """It ends where the first match begins that some continuation completes."""
    scan = TextScan(TextRules(pack, "output"))
    scan.feed(text)
    complete = set(every_match(pack, text, ended=False))
    assert covered(scan, len(text)) == places_of(complete)
    exact = len(text)
    for size in range(5):
        for more in product(ALPHABET, repeat=size):
            for match in every_match(pack, text + "".join(more), ended=True):
                if match not in complete:
                    exact = min(exact, match[2])
    assert scan.safe_chars == exact


# Cost: linear, whatever the text and the rules are.

HOSTILE = pack_of(
    {"phrases": ["a" * 255 + "c", *("a" * size for size in range(1, 250, 10))]},
    {"phrases": ["a" * 200 + "d"], "whole_words": True},
    {"patterns": ["a[ab]{250}c", "(?:a|b|ab){1,100}c", "(?:a?b?){1,100}c", ".{1,200}zz"]},
    personal_data=[{"category": "data", "kinds": ["email", "card", "iban", "phone", "ip", "ssn"]}],
)


@pytest.mark.parametrize("letters", ["a", "ab", "1 ", "1.", "+1(", "a@.", "é\u0301", "가\u11a8", "YWFh"])
def test_no_text_costs_more_than_its_length(letters: str) -> None:
    rng = random.Random(1)
    scan = TextScan(TextRules(HOSTILE, "output"))
    costs_s = []
    for skipped in (600, 20_000):
        scan.feed("".join(rng.choices(letters, k=skipped)))
        rounds_s = []
        for _ in range(5):  # The least counts: others include a collection of garbage, or states made anew.
            began_s = time.process_time()
            for _ in range(25):
                scan.feed("".join(rng.choices(letters, k=4)))
                # White space and marks of any number are one character or none.
                assert letters != "ab" or scan.chars - scan.safe_chars <= MAX_WIDTH
            rounds_s.append(time.process_time() - began_s)
        costs_s.append(min(rounds_s))
    assert costs_s[1] < 4 * costs_s[0] + 0.1


def test_states_are_bounded_and_forgotten_ones_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automaton, "_MAX_STEPS", 50)
    rng = random.Random(1)
    pack = pack_of({"patterns": ["a[ab]{6}c", r"\b[ab]{2,9}\b"]})
    text = "".join(rng.choices("aabbc ", k=3_000))
    bounded = scanned(pack, list(text))
    monkeypatch.undo()
    assert bounded.matches == scanned(pack, [text]).matches
    assert len(bounded.matches) > 50
