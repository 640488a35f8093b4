"""A template writes here what it writes in transformers, whatever the messages hold."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import pytest

from services.core.errors import FailedPrecondition, InvalidInput
from services.gateway.text.encoder import ChatTemplate, ControlTokens, Rendered
from services.gateway.text.text_model import ChatMessage
from tests.support import chat_cases
from tests.support.chat_cases import EXPRESSIONS, FAMILIES, HARMLESS, HOSTILE, STATEMENTS, TOKENS, Refused
from tests.unit.gateway.conftest import SPECIAL, FakeClock

CONTROL = ControlTokens(SPECIAL)


@functools.lru_cache(maxsize=8)
def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, control=CONTROL, tokens=TOKENS, clock=FakeClock())


def render(source: str, messages: Sequence[ChatMessage]) -> Rendered:
    return compiled(source).render(messages, max_chars=10**6)


def same_as_transformers(source: str, messages: Sequence[ChatMessage]) -> Rendered | None:
    """Return what was rendered, None where the template refuses or fails, after a comparison of it."""
    wanted: str | Exception
    try:
        wanted = chat_cases.expected(source, messages)
    except Exception as exc:
        wanted = exc
    if isinstance(wanted, Exception):
        kind = InvalidInput if isinstance(wanted, Refused) else FailedPrecondition
        with pytest.raises(
            kind, match="refuses the messages" if kind is InvalidInput else "chat template fails"
        ):
            render(source, messages)
        return None
    found = render(source, messages)
    assert found.text == wanted
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_families_write_what_they_write_in_transformers(name: str) -> None:
    rng = random.Random(name)
    rendered = 0
    for hostile in (False, True):
        for _ in range(40):
            messages = chat_cases.drawn_messages(rng, hostile=hostile)
            found = same_as_transformers(FAMILIES[name], messages)
            rendered += found is not None
            if found is not None and not hostile:
                assert not found.cuts
    assert rendered > 10


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_write_what_they_write_in_transformers(expression: str) -> None:
    source = "{% set ms = messages %}{% set c = ms[0].content %}a{{ " + expression + " }}b"
    for content in HARMLESS + HOSTILE:
        messages = [ChatMessage("user", content), ChatMessage("assistant", "b < a", "bob")]
        found = same_as_transformers(source, messages)
        if found is not None and content in HARMLESS:
            assert not found.cuts


@pytest.mark.parametrize("statement", STATEMENTS)
def test_statements_write_what_they_write_in_transformers(statement: str) -> None:
    source = "{% set ms = messages %}{% set c = ms[0].content %}a" + statement + "b"
    for content in HARMLESS + HOSTILE:
        same_as_transformers(source, [ChatMessage("user", content), ChatMessage("tool", "b < a")])


@pytest.mark.parametrize("seed", range(150))
def test_drawn_templates_write_what_they_write_in_transformers(seed: int) -> None:
    rng = random.Random(seed)
    source = chat_cases.drawn_template(rng)
    for hostile in (False, True, True):
        same_as_transformers(source, chat_cases.drawn_messages(rng, hostile=hostile))
