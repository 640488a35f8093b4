"""Guard models that answer in text: the prompt of each for a conversation, and what its answer means.

All have their instructions in the chat template of their version, so a prompt is the judged turns. Those of
ShieldGemma are about one guideline, which the template takes as a variable: there is a prompt for each label.
An answer is bounded by an expression, which a constraint of the generation enforces, so that it can be read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

JudgeTemplate = Literal["llama-guard", "shieldgemma", "qwen3guard", "qwen3guard-stream"]
CONTROVERSIAL: Final = 0.5  # score of a label that Qwen3Guard calls controversial
_YES, _NO = "Yes", "No"
# What ends a turn in the templates of these families: a judged text must not spell it.
_MARKS: Final = re.compile(r"<(?=\||/?start_of_turn|/?end_of_turn|bos>|eos>|pad>)")


class UnreadableVerdict(ValueError):
    """A guard's answer is none of those that its template permits."""


@dataclass(frozen=True, slots=True)
class JudgedTurn:
    role: Literal["user", "assistant"]
    text: str


@dataclass(frozen=True, slots=True)
class GuardPrompt:
    """One generation of a guard model: greedy, of at most ``max_tokens``, its output matches ``pattern``.

    The prompt is what the version's chat template makes of ``turns``.
    """

    pattern: str
    max_tokens: int
    turns: tuple[JudgedTurn, ...]
    label: str = ""  # the only label that it is about; empty: all of its template
    guideline: str = ""  # variable ``guideline`` of the template; empty: it has none
    logprobs: int = 0  # alternatives of the first token that ``GuardTemplate.read`` needs


class GuardTemplate(Protocol):
    """How one family of guard models is used. Pure."""

    @property
    def labels(self) -> Collection[str]:
        """The labels that a verdict may have; none: those of the rule's guidelines."""

    def prompts(self, turns: Sequence[JudgedTurn], guidelines: Mapping[str, str]) -> tuple[GuardPrompt, ...]:
        """Return what to generate so that the last of ``turns`` is judged, by guidelines if it has none."""

    def read(self, prompt: GuardPrompt, answer: str, first: Mapping[str, float]) -> dict[str, float]:
        """Return the labels that the answer names with their scores, 0 to 1; none where it is safe.

        ``first``: log-probabilities of the first token's alternatives by their text. Raises
        UnreadableVerdict.
        """


@dataclass(frozen=True, slots=True)
class LlamaGuard:
    """Llama Guard 2 and 3: ``safe``, or ``unsafe`` and the codes of its hazards on a second line."""

    labels: tuple[str, ...] = tuple(f"S{number}" for number in range(1, 15))

    def prompts(self, turns: Sequence[JudgedTurn], guidelines: Mapping[str, str]) -> tuple[GuardPrompt, ...]:
        """See ``GuardTemplate``."""
        code = "S(1[0-4]|[1-9])"
        return (GuardPrompt(rf"\s{{0,2}}(safe|unsafe\n{code}(, ?{code}){{0,13}})", 64, _plain_turns(turns)),)

    def read(self, prompt: GuardPrompt, answer: str, first: Mapping[str, float]) -> dict[str, float]:
        """See ``GuardTemplate``."""
        verdict, _, codes = answer.strip().partition("\n")
        if verdict.strip() == "safe" and not codes.strip():
            return {}
        found = [code.strip() for code in codes.split(",")]
        if verdict.strip() != "unsafe" or not set(found) <= set(self.labels):
            raise UnreadableVerdict(f"no verdict of Llama Guard: {answer[:80]!r}")
        return dict.fromkeys(found, 1.0)


@dataclass(frozen=True, slots=True)
class Qwen3Guard:
    """Qwen3Guard-Gen: lines of the severity, the categories and, of a response, whether it refuses."""

    labels: tuple[str, ...] = (
        "Violent",
        "Non-violent Illegal Acts",
        "Sexual Content or Sexual Acts",
        "PII",
        "Suicide & Self-Harm",
        "Unethical Acts",
        "Politically Sensitive Topics",
        "Copyright Violation",
        "Jailbreak",
    )

    def prompts(self, turns: Sequence[JudgedTurn], guidelines: Mapping[str, str]) -> tuple[GuardPrompt, ...]:
        """See ``GuardTemplate``."""
        names = "|".join(self.labels)
        refusal = r"\nRefusal: (Yes|No)" if turns[-1].role == "assistant" else ""
        unsafe = f"(Unsafe|Controversial)\nCategories: ({names})(, ({names})){{0,8}}"
        pattern = f"Safety: (Safe\nCategories: None|{unsafe}){refusal}"
        return (GuardPrompt(pattern, 128, _plain_turns(turns)),)

    def read(self, prompt: GuardPrompt, answer: str, first: Mapping[str, float]) -> dict[str, float]:
        """See ``GuardTemplate``."""
        lines = dict(line.split(": ", 1) for line in answer.strip().splitlines() if ": " in line)
        severity = lines.get("Safety", "").strip()
        named = [name.strip() for name in lines.get("Categories", "").split(",") if name.strip()]
        if severity == "Safe":
            return {}
        score = {"Unsafe": 1.0, "Controversial": CONTROVERSIAL}.get(severity)
        if score is None or not named or not set(named) <= set(self.labels):
            raise UnreadableVerdict(f"no verdict of Qwen3Guard: {answer[:80]!r}")
        return dict.fromkeys(named, score)


@dataclass(frozen=True, slots=True)
class ShieldGemma:
    """ShieldGemma: the probability that the answer about one guideline begins with Yes, against No.

    It has no labels of its own: they are those of the guidelines.
    """

    labels: tuple[str, ...] = ()

    def prompts(self, turns: Sequence[JudgedTurn], guidelines: Mapping[str, str]) -> tuple[GuardPrompt, ...]:
        """See ``GuardTemplate``."""
        judged = _plain_turns(turns)
        return tuple(
            GuardPrompt(f"{_YES}|{_NO}", 1, judged, label=label, guideline=guideline, logprobs=20)
            for label, guideline in guidelines.items()
        )

    def read(self, prompt: GuardPrompt, answer: str, first: Mapping[str, float]) -> dict[str, float]:
        """See ``GuardTemplate``."""
        yes, no = first.get(_YES), first.get(_NO)
        if yes is None and no is None:
            raise UnreadableVerdict(f"no verdict of ShieldGemma: {answer[:80]!r}")
        least = min(first.values())  # what is not among the alternatives is at most that
        difference = (least if yes is None else yes) - (least if no is None else no)
        return {prompt.label: 0.5 + 0.5 * math.tanh(0.5 * difference)}


def _plain_turns(turns: Sequence[JudgedTurn]) -> tuple[JudgedTurn, ...]:
    """Return the turns without a spelling of what ends a turn: a text must not write its own verdict."""
    return tuple(JudgedTurn(turn.role, _MARKS.sub("< ", turn.text)) for turn in turns)


GUARDS: Final[Mapping[str, GuardTemplate]] = {
    "llama-guard": LlamaGuard(),
    "shieldgemma": ShieldGemma(),
    "qwen3guard": Qwen3Guard(),
}
_REFUSED: Final[Mapping[str, str]] = {
    "qwen3guard-stream": "its class Qwen3ForGuardModel, with heads on every token, is program code of its "
    "checkpoint (auto_map), which neither engine runs; use qwen3guard with Qwen3Guard-Gen",
}


def guard_problem(template: str, labels: Collection[str], guidelines: Mapping[str, str]) -> str:
    """Return why no guard has this template with these labels and guidelines, or an empty text."""
    if template in _REFUSED:
        return f"template: {template!r} is not served: {_REFUSED[template]}"
    known = GUARDS[template].labels
    if known and guidelines:
        return f"guidelines: {template} has its own; remove them"
    if not known and (bare := sorted(set(labels) - guidelines.keys())):
        return f"guidelines: {template} judges each label by one, and {bare[0]!r} has none; add it"
    if unused := sorted(guidelines.keys() - set(labels)):
        return f"guidelines: {unused[0]!r} is not in labels; add it there or remove it"
    if known and (unknown := next((label for label in labels if label not in known), "")):
        return f"labels: {unknown!r} is no label of {template}, which has {', '.join(known)}"
    return ""
