"""The form of a version: what it declares, else what its chat template shows."""

from __future__ import annotations

from typing import Any

import pytest

from services.core.outputs.forms import (
    CALL_FORMS,
    REASONING_FORMS,
    CallForm,
    OutputForm,
    ReasoningForm,
    named_form,
)
from services.gateway.outputs.forms import MarkToken, form_of, mark_tokens, reasoning_openings

THINK = REASONING_FORMS["think"]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ messages[0].content }}", OutputForm()),
        ("within <tool_call></tool_call> XML tags", OutputForm(calls=CALL_FORMS["hermes"])),
        ("<tool_call> </tool_call> '</think>' in content", OutputForm(THINK, CALL_FORMS["hermes"])),
        ("<tool_call>\n<function=name>", OutputForm()),
        ("{{- '[TOOL_CALLS] [' }}", OutputForm(calls=CALL_FORMS["mistral-blank"])),
        ("{{- '[TOOL_CALLS][' }}", OutputForm(calls=CALL_FORMS["mistral"])),
        (
            "[THINK]x[/THINK] [TOOL_CALLS]f[ARGS]{}",
            OutputForm(REASONING_FORMS["think-brackets"], CALL_FORMS["mistral-args"]),
        ),
        (
            "{{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' "
            "+ tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments'] }}",
            OutputForm(calls=CALL_FORMS["deepseek-v3"]),
        ),
        (
            "{{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name'] "
            "+ '<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}",
            OutputForm(calls=CALL_FORMS["deepseek-v31"]),
        ),
        ("<tool_call>\n<function=f>\n<parameter=a>", OutputForm()),
        (
            '<|start_header_id|> {"name": function name, "parameters": dictionary} \'"parameters": \'',
            OutputForm(calls=CALL_FORMS["llama3"]),
        ),
    ],
)
def test_the_template_shows_the_form(template: str, form: OutputForm) -> None:
    assert form_of({}, template) == form


def declared(**fields: Any) -> dict[str, Any]:
    return {"response_template": {"version": 1, "start_anchor": "<a>", "fields": fields}}


def test_a_response_template_declares_the_form() -> None:
    fields = {
        "thinking": {"open": ["<|think|>"], "close": "<|/think|>"},
        "tool_calls": {"open": "<|call|>", "close": "<|/call|>", "content": "json", "repeats": True},
    }
    wanted = CallForm(
        "<|call|>", '<|call|>{"name": "', '", "arguments": ', "}<|/call|>", '\n<|call|>{"name": "'
    )
    assert form_of(declared(**fields), "<think></think>") == OutputForm(
        ReasoningForm("<|think|>", "<|/think|>"), wanted
    )
    of_template = form_of(declared(tool_calls={"open": "<tool_call>", "close": "</tool_call>"}), "")
    assert of_template.calls == CALL_FORMS["hermes"]


@pytest.mark.parametrize(
    "settings",
    [
        {"response_template": "x"},
        {"response_template": {"fields": []}},
        declared(tool_calls="x", thinking=7),
        declared(tool_calls={"open_pattern": "(a+)+b", "close": "x"}),
        declared(tool_calls={"open": "x" * 100_000, "close": "y", "content": "json"}),
        declared(tool_calls={"open": [1], "close": "y", "content": "json"}),
    ],
)
def test_a_declaration_that_cannot_be_read_leaves_the_template(settings: dict[str, Any]) -> None:
    assert form_of(settings, "<tool_call>").calls == CALL_FORMS["hermes"]


def test_a_deployment_names_a_form() -> None:
    assert named_form("hermes") == OutputForm(calls=CALL_FORMS["hermes"])
    assert named_form("think+mistral") == OutputForm(THINK, CALL_FORMS["mistral"])
    assert named_form("none") == OutputForm()
    for wrong in ("x", "hermes+llama3", "none+think", "", "hermes+"):
        with pytest.raises(ValueError, match="none of hermes"):
            named_form(wrong)


def test_the_tokens_of_marks_and_the_openings_of_reasoning() -> None:
    tokens = [MarkToken("<tool_call>", 7, False), MarkToken("<|end|>", 8, True), MarkToken("", 9, True)]
    assert mark_tokens(OutputForm(), tokens) == (tokens[0],)
    openings = reasoning_openings(OutputForm(ReasoningForm("<a>", "</a>")), lambda text: [len(text)])
    assert openings[0] == ("<a>", (3,))
    assert {text for text, _ in openings} == {"<a>", "<think>", "[THINK]"}
