"""The form in which a model version writes calls and reasoning, as its files show it.

A version declares its form by a Hugging Face response template (``response_template`` in
tokenizer_config.json, transformers 5.13). Only texts are read from it: its patterns come from the publisher,
and a regular expression may take any time. Without one the text of the chat template decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from services.core.outputs.families import CALL_FORMS, REASONING_FORMS, in_json
from services.core.outputs.forms import CallForm, OutputForm, ReasoningForm

_MAX_LITERAL: Final = 64
_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class MarkToken:
    """A text of a form that is one token. ``special``: without a request for it, its text is left out."""

    text: str
    id: int
    special: bool


def form_of(settings: Mapping[str, Any], template: str) -> OutputForm:
    """Return the form of a version, by its tokenizer_config.json and the text of its chat template."""
    fields = settings.get("response_template")
    fields = fields.get("fields") if isinstance(fields, dict) else None
    fields = fields if isinstance(fields, dict) else {}
    return OutputForm(
        _declared_reasoning(fields) or _reasoning_in(template),
        _declared_calls(fields.get("tool_calls"), template) or _calls_in(template),
    )


def _declared_reasoning(fields: Mapping[str, Any]) -> ReasoningForm | None:
    for name in _REASONING_FIELDS:
        opened, closed = _literal(fields.get(name), "open"), _literal(fields.get(name), "close")
        if opened and closed:
            return ReasoningForm(opened, closed)
    return None


def _declared_calls(field: Any, template: str) -> CallForm | None:
    opened, closed = _literal(field, "open"), _literal(field, "close")
    if not opened:
        return None
    for known in (_calls_in(template), _calls_in(opened)):
        if known is not None and known.mark == opened:
            return known
    if field.get("content") != "json":
        return None
    broken = any(opened + line in template for line in ("\n", "\\n"))
    key = "parameters" if b"parameters" in msgspec.json.encode(field.get("transform")) else "arguments"
    return in_json(opened, closed, blank="\n" if broken else "", key=key)


def _literal(field: Any, name: str) -> str:
    """Return a text of a field; of several the first; empty for a pattern."""
    found = field.get(name) if isinstance(field, dict) else None
    if isinstance(found, list):
        found = found[0] if found else None
    return found.strip() if isinstance(found, str) and len(found) <= _MAX_LITERAL else ""


def _calls_in(template: str) -> CallForm | None:
    if "[TOOL_CALLS]" in template:
        if "[ARGS]" in template:
            return CALL_FORMS["mistral-args"]
        return CALL_FORMS["mistral-blank" if "[TOOL_CALLS] [" in template else "mistral"]
    if "<｜tool▁calls▁begin｜>" in template:
        return CALL_FORMS["deepseek-v3" if "```json" in template else "deepseek-v31"]
    if "<tool_call>" in template and "<function=" not in template:
        return CALL_FORMS["hermes"]
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return CALL_FORMS["llama3"]
    return None


def _reasoning_in(template: str) -> ReasoningForm | None:
    return next((form for form in REASONING_FORMS.values() if form.close in template), None)


def texts_of(form: OutputForm) -> tuple[str, ...]:
    """Return the literal texts of a form."""
    calls, reasoning = form.calls, form.reasoning
    found = [] if calls is None else [calls.begin, calls.middle, calls.close, calls.again, calls.last]
    return (*found, *(() if reasoning is None else (reasoning.open, reasoning.close)))


def reasoning_openings(
    form: OutputForm, encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the ends of a prompt that open the reasoning of a form of the version or of the table."""
    forms = {*REASONING_FORMS.values(), *([form.reasoning] if form.reasoning else [])}
    texts = sorted(reasoning.open for reasoning in forms)
    return tuple((text, tuple(encode(text + blank))) for text in texts for blank in ("", "\n", "\n\n"))


def mark_tokens(form: OutputForm, added: Iterable[MarkToken]) -> tuple[MarkToken, ...]:
    """Return the added tokens whose text is in a form of the version or of the table."""
    texts = [*texts_of(form)]
    for calls in CALL_FORMS.values():
        texts += texts_of(OutputForm(calls=calls))
    for reasoning in REASONING_FORMS.values():
        texts += texts_of(OutputForm(reasoning))
    return tuple(token for token in added if token.text and any(token.text in text for text in texts))
