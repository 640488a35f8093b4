"""The grammar of an output with calls, in Lark as llguidance reads it.

Free text goes on until a mark; what follows the mark is a call of one of the tools, and its arguments match
their schema. A mark that is a token stands in the grammar by its id, since free text cannot spell it then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.core.outputs.forms import CallForm, OutputForm
from services.core.outputs.tools import Tool
from services.gateway.outputs.forms import MarkToken

_NOTHING: Final = {"type": "object", "properties": {}, "additionalProperties": False}


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
