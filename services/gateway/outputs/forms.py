"""The form in which a model version writes calls and reasoning, as its files show it, and its grammar.

A version declares its form by a Hugging Face response template (``response_template`` in
tokenizer_config.json, transformers 5.13). Only texts are read from it: its patterns come from the publisher,
and a regular expression may take any time. Without one the text of the chat template decides.

The grammar of an output with calls is in Lark as llguidance reads it. Free text goes on until a mark; what
follows the mark is a call of one of the tools, and its arguments match their schema. A mark that is a token
stands in the grammar by its id, since free text cannot spell it then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from services.core.outputs.forms import (
    CALL_FORMS,
    REASONING_FORMS,
    CallForm,
    OutputForm,
    ReasoningForm,
    Tool,
    in_json,
)

_MAX_LITERAL: Final = 64
_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
_NOTHING: Final = {"type": "object", "properties": {}, "additionalProperties": False}


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


@dataclass(frozen=True, slots=True)
class CallRules:
    """What an output may have. ``content``: the JSON schema of content; None: any text."""

    required: bool = False
    single: bool = False
    # Hold the arguments of each tool to its schema, and not only those of strict ones.
    by_schema: bool = False
    content: dict[str, Any] | None = None


def call_grammar(
    form: OutputForm, tools: Sequence[Tool], rules: CallRules, marks: Sequence[MarkToken]
) -> str:
    """Return the grammar of outputs in a form with calls of the tools."""
    writer = _Writer(form, marks)
    return writer.grammar(tools, rules)


def reasoned_grammar(form: OutputForm, content: dict[str, Any], marks: Sequence[MarkToken]) -> str:
    """Return the grammar of outputs that are reasoning, if the model likes, and then content by a schema."""
    return _Writer(form, marks).reasoned(content)


class _Writer:
    def __init__(self, form: OutputForm, marks: Sequence[MarkToken]) -> None:
        self._form = form
        # Marks that free text cannot spell, because llguidance gives these tokens no bytes.
        self._marks = {mark.text: mark.id for mark in marks if mark.special or _in_angles(mark.text)}
        self._rules: list[str] = []

    @property
    def _calls(self) -> CallForm:
        assert self._form.calls is not None, "a grammar of calls needs their form"
        return self._form.calls

    def reasoned(self, content: dict[str, Any]) -> str:
        start = f"start: {self._reasoning()} {self._blank()} {self._content(content)}"
        return "\n".join((start, *self._rules)) + "\n"

    def _content(self, schema: dict[str, Any]) -> str:
        self._rules.append(f"content: %json {_json(schema)}")
        return "content"

    def grammar(self, tools: Sequence[Tool], rules: CallRules) -> str:
        calls = self._calls
        answer = self._answer(rules)
        again = "" if rules.single else f"({self._literal(calls.again)} call)*"
        last = self._literal(calls.last)
        self._rules.append(f"calls: call {again} {last}")
        self._rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
        for number, tool in enumerate(tools):
            head = self._literal(tool.name + calls.middle)
            self._rules.append(f"call_{number}: {head} args_{number} {self._literal(calls.close)}")
            self._rules.append(f"args_{number}: %json {_schema(tool, exact=rules.by_schema or tool.strict)}")
        return "\n".join((f"start: {self._reasoning()} {answer}", *self._rules)) + "\n"

    def _answer(self, rules: CallRules) -> str:
        """Return what follows the reasoning: content, calls, or both."""
        calls = self._calls
        begin = self._literal(calls.begin)
        if rules.required:
            return f"{self._blank()} {begin} calls"
        if rules.content is not None:
            return f"{self._blank()} ({self._content(rules.content)} | {begin} calls)"
        if not calls.mark:
            thought = self._form.reasoning
            unless = "" if thought is None else f" & ~/{_escaped(thought.open)}(?s:.*)/"
            self._rules.append(rf"TEXT: /[^\s{_escaped(calls.begin[0])}](?s:.*)/{unless}")
            self._rules.append(r"BLANK: /\s+/")
            return f"BLANK? (TEXT | {begin} calls)?"
        text = f"/(?s:.*)/ & ~/(?s:.*){_escaped(calls.mark)}(?s:.*)/"
        self._rules.append(f"TEXT: {text}")
        if calls.mark in self._marks:
            return f"TEXT? ({begin} calls)?"
        self._rules.append(f"head[lazy]: /(?s:.*){_escaped(calls.mark)}/")
        rest = self._literal(calls.begin.removeprefix(calls.mark))
        return f"(TEXT | head {rest} calls)?"

    def _reasoning(self) -> str:
        form = self._form.reasoning
        if form is None:
            return ""
        if form.close in self._marks:
            self._rules.append(f"THOUGHT: /(?s:.*)/ & ~/(?s:.*){_escaped(form.close)}(?s:.*)/")
            rest = f"THOUGHT? {self._literal(form.close)}"
        else:
            self._rules.append(f"thought[lazy]: /(?s:.*){_escaped(form.close)}/")
            rest = "thought"
        return rest if self._form.thinking else f"({self._literal(form.open)} {rest})?"

    def _blank(self) -> str:
        if self._form.reasoning is None:
            return ""
        self._rules.append(r"BLANK: /\n{1,2}/")
        return "BLANK?"

    def _literal(self, text: str) -> str:
        """Return a text with its marks by their ids; empty for an empty text."""
        names = sorted(self._marks, key=len, reverse=True)
        pieces = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
        return " ".join(
            f"<[{self._marks[piece]}]>" if piece in self._marks else _json(piece) for piece in pieces if piece
        )


def _schema(tool: Tool, *, exact: bool) -> str:
    schema: dict[str, Any] = {"type": "object"}
    if exact:
        schema = {"type": "object"} | json.loads(tool.parameters) if tool.parameters else dict(_NOTHING)
    return _json(schema)


def _in_angles(text: str) -> bool:
    return text.startswith("<") and text.endswith(">")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Return a text as a part of a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")
