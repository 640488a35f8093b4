"""How a model version writes what is not content: its reasoning and its calls of tools."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """Reasoning comes first, between these texts."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls of tools are written: ``begin NAME middle ARGUMENTS close``. Arguments are a JSON object."""

    # The beginning of ``begin`` that content does not contain; empty: only a whole output is a call.
    mark: str
    begin: str
    middle: str
    close: str
    # What stands in place of ``begin`` from the second call on.
    again: str
    # What follows the last call.
    last: str = ""
    # How many letters and digits the template takes as the id of a call; 0: any.
    id_chars: int = 0


@dataclass(frozen=True, slots=True)
class OutputForm:
    """How one output is written; None: it has no such parts."""

    reasoning: ReasoningForm | None = None
    calls: CallForm | None = None
    # Whether the prompt ends within the reasoning.
    thinking: bool = False
    # Whether calls are held to their form and to JSON while they are generated.
    held: bool = False
    # Names that calls may have where nothing holds them; empty: any.
    names: tuple[str, ...] = ()
    # The token that closes the reasoning; None: it is not one token of the version.
    reasoning_end: int | None = None
    # The name in calls and the client's name of each tool whose name is too long for the model.
    renamed: tuple[tuple[str, str], ...] = ()


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


MAX_NAME_CHARS: Final = 64


def name_for_model(name: str) -> str:
    """Return the name by which a model calls a tool; a long one keeps its beginning and half of its
    SHA-256."""
    if len(name) <= MAX_NAME_CHARS:
        return name
    return f"{name[:31]}_{hashlib.sha256(name.encode()).hexdigest()[:32]}"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. ``parameters``: a JSON schema as JSON; empty: none."""

    name: str
    description: str = ""
    parameters: str = ""
    strict: bool = False


class ToolMode(StrEnum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls an output may have. ``names`` are the tools that may be called; empty: each may be.

    ``single``: at most one call.
    """

    mode: ToolMode = ToolMode.AUTO
    names: tuple[str, ...] = ()
    single: bool = False
