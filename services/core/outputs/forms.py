"""How a model version writes what is not content: its reasoning and its calls of tools."""

from __future__ import annotations

from dataclasses import dataclass


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
