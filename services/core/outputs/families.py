"""The forms in which families of models write calls and reasoning, by the names that deployments use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from services.core.outputs.forms import CallForm, OutputForm, ReasoningForm

_THINK: Final = ReasoningForm("<think>", "</think>")
_BRACKET_THINK: Final = ReasoningForm("[THINK]", "[/THINK]")


def in_json(mark: str, end: str, *, blank: str = "\n", key: str = "arguments") -> CallForm:
    """Return the form of JSON objects with a name and arguments, each between two marks."""
    begin = f'{mark}{blank}{{"name": "'
    return CallForm(mark, begin, f'", "{key}": ', f"}}{blank}{end}", f"\n{begin}")


def _in_list(mark: str) -> CallForm:
    """Return the form of a mark and a JSON list of calls."""
    return CallForm(mark.strip(), f'{mark}[{{"name": "', '", "arguments": ', "}", ', {"name": "', "]", 9)


def _deepseek(kind: str, middle: str, end: str, between: str) -> CallForm:
    """Return a form of DeepSeek: each call between tokens, and all of them between two more."""
    call, mark = f"<｜tool▁call▁begin｜>{kind}", "<｜tool▁calls▁begin｜>"
    close = f"{end}<｜tool▁call▁end｜>"
    return CallForm(mark, mark + call, middle, close, between + call, "<｜tool▁calls▁end｜>")


# What a deployment may name: of the calls.
CALL_FORMS: Final[Mapping[str, CallForm]] = {
    "hermes": in_json("<tool_call>", "</tool_call>"),
    "llama3": CallForm("", '{"name": "', '", "parameters": ', "}", '; {"name": "'),
    "mistral": _in_list("[TOOL_CALLS]"),
    "mistral-blank": _in_list("[TOOL_CALLS] "),
    "mistral-args": CallForm("[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]", "", "[TOOL_CALLS]", id_chars=9),
    "deepseek-v3": _deepseek("function<｜tool▁sep｜>", "\n```json\n", "\n```", "\n"),
    "deepseek-v31": _deepseek("", "<｜tool▁sep｜>", "", ""),
}
# The forms of reasoning by name.
REASONING_FORMS: Final[Mapping[str, ReasoningForm]] = {"think": _THINK, "think-brackets": _BRACKET_THINK}
FORM_NAMES: Final = (*CALL_FORMS, *REASONING_FORMS, "none")


def named_form(names: str) -> OutputForm:
    """Return the form of a deployment: a name of calls, one of reasoning, or both with ``+`` between.

    Raises ValueError for another name.
    """
    found = OutputForm()
    for name in names.split("+"):
        if name in CALL_FORMS and found.calls is None:
            found = OutputForm(found.reasoning, CALL_FORMS[name])
        elif name in REASONING_FORMS and found.reasoning is None:
            found = OutputForm(REASONING_FORMS[name], found.calls)
        elif name != "none" or names != "none":
            raise ValueError(
                f"{names!r} is none of {', '.join(FORM_NAMES)}, nor a form of calls and one of reasoning "
                "with + between"
            )
    return found
