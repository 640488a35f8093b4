"""Requests whose outputs have planted phrases for certain, and requests whose outputs have none.

The phrases are invented words. A grammar, a schema, the schema of a tool or a prompt that repeats a phrase
makes the model write it; how it is written is one of ``DISGUISES``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from random import Random
from typing import Any, Final

from tokenizers import Tokenizer

from bench.safety.checker import LOOK_ALIKES
from bench.stack import CHECKPOINT
from fairway.v1 import inference_pb2 as pb

BLOCKED: Final = 120
REDACTED: Final = 80
CLEAN_TOKENS: Final = 160  # length of a clean output
_MOST_TOKENS: Final = 500  # bound of a planted output, which ends before it
_PER_TEXT: Final = 3  # phrases of an output that is redacted and not ended
_FILLER: Final = "[a-z ]{6,18}"
_SYLLABLES: Final = ("bex", "ble", "dget", "dri", "fap", "gim", "hob", "kra", "lun", "mir", "nuc", "plu")
_SPECIAL: Final = re.compile(r"([\\.^$|?*+()\[\]{}])")


def invented() -> tuple[str, ...]:
    """Return phrases of two made words, of one twice at every eighth place, which a small model can repeat.

    Those that block come before those that are redacted.
    """
    rng, found = Random(0), dict[str, None]()
    while len(found) < BLOCKED + REDACTED:
        first, second = ("".join(rng.sample(_SYLLABLES, 3)) for _ in range(2))
        found[f"{first} {second if len(found) % 8 else first}"] = None
    return tuple(found)


PHRASES: Final = invented()


def _letters(change: Callable[[str, Random], str]) -> Callable[[str, Random], str]:
    return lambda phrase, rng: "".join(char if char == " " else change(char, rng) for char in phrase)


DISGUISES: Final[dict[str, Callable[[str, Random], str]]] = {
    "plain": lambda phrase, _: phrase,
    "case": _letters(lambda char, rng: rng.choice((char, char.upper()))),
    "full_width": _letters(lambda char, _: chr(ord(char) + 0xFEE0)),
    "look_alike": _letters(lambda char, rng: rng.choice(LOOK_ALIKES.get(char, char))),
    "zero_width": _letters(lambda char, rng: char + rng.choice(("", "\u200b", "\u2060"))),
    "combining": _letters(lambda char, rng: char + rng.choice(("", "\u0301", "\u0336"))),
    "spaces": lambda phrase, _: phrase.replace(" ", " \u00a0 "),
    "escaped": _letters(lambda char, rng: rng.choice((char, f"\\u{ord(char):04x}"))),
}


@dataclass(frozen=True, slots=True)
class Planned:
    """A request. ``form``: what makes the model write phrases; ``ends``: the first ends the output."""

    form: str
    generation: pb.Generation
    ends: bool = False


def planted(model: str, count: int) -> tuple[Planned, ...]:
    """Return requests of all forms by turns; a third has phrases that are redacted."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    forms = cycle((*(f"regex/{name}" for name in DISGUISES), "schema", "tool", "copied"))
    return tuple(
        _planted(model, tokenizer, number, form) for number, form in zip(range(count), forms, strict=False)
    )


def _planted(model: str, tokenizer: Tokenizer, number: int, form: str) -> Planned:
    rng, ends = Random(number), number % 3 != 0
    words = PHRASES[:BLOCKED] if ends else PHRASES[BLOCKED:]
    phrases = [rng.choice(words) for _ in range(1 if ends else _PER_TEXT)]
    generation = pb.Generation(model=model, prompt="note = ", max_output_tokens=_MOST_TOKENS)
    generation.sampling.seed = number
    kind, _, disguise = form.partition("/")
    if kind == "regex":
        texts = [DISGUISES[disguise](phrase, rng) for phrase in phrases]
        generation.sampling.constraint.regex = _regex(texts)
    elif kind == "schema":
        generation.sampling.constraint.json_schema = json.dumps(_schema(phrases))
    elif kind == "tool":
        generation.chat.messages.add(role="user", content="Take a note.")
        generation.chat.tools.add(name="note", parameters=json.dumps(_schema(phrases)), strict=True)
        generation.tool_choice.mode = pb.TOOL_MODE_REQUIRED
        generation.tool_choice.single = True
    else:
        line = rng.choice(words[::8]).split()[0] + "\n"
        generation.prompt, generation.max_output_tokens = line * 16, 64
        generation.sampling.temperature = 0.0
        generation.sampling.logit_bias.update(dict.fromkeys(tokenizer.encode(line).ids, 100.0))
    return Planned(form, generation, ends)


def _regex(texts: list[str]) -> str:
    literals = [_SPECIAL.sub(r"\\\1", text) for text in texts]
    return f'\\{{"note": "{_FILLER} {f" {_FILLER} ".join(literals)} {_FILLER}"\\}}'


def _schema(phrases: list[str]) -> dict[str, Any]:
    words = {f"word{place}": {"type": "string", "enum": [phrase]} for place, phrase in enumerate(phrases)}
    properties = {"note": {"type": "string", "pattern": "^[a-z ]{4,12}$"}, **words}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def clean(model: str, first: int, count: int) -> tuple[Planned, ...]:
    """Return free completions of Python, each with a phrase's first word in its prompt."""
    return tuple(Planned("clean", _free(model, number)) for number in range(first, first + count))


def _free(model: str, number: int) -> pb.Generation:
    word = PHRASES[number % len(PHRASES)].split()[number % 2]
    generation = pb.Generation(
        model=model,
        prompt=f"class Queue{number}:\n    def push_{word}(self, item):\n",
        max_output_tokens=CLEAN_TOKENS,
        ignore_eos=True,
    )
    generation.sampling.seed = number
    generation.sampling.temperature = 0.7
    return generation


def near_misses(model: str, count: int) -> Iterator[Planned]:
    """Yield outputs that begin like a phrase and go on otherwise, disguised as phrases are."""
    for number in range(count):
        rng = Random(number)
        first, second = rng.choice(PHRASES).split()
        disguise = DISGUISES[rng.choice(list(DISGUISES))]
        generation = pb.Generation(model=model, prompt="note = ", max_output_tokens=_MOST_TOKENS)
        generation.sampling.seed = number
        generation.sampling.constraint.regex = _regex([disguise(f"{first} {second[:-1]}", rng) + "!"])
        yield Planned("clean", generation)


def long_redacted(model: str, count: int) -> Iterator[Planned]:
    """Yield long outputs with a redacted phrase in every line."""
    for number in range(count):
        rng = Random(number)
        lines = [f"{{}} {rng.choice(PHRASES[BLOCKED:])}" for _ in range(8)]
        generation = pb.Generation(model=model, prompt="notes = ", max_output_tokens=_MOST_TOKENS)
        generation.sampling.seed = number
        generation.sampling.constraint.regex = " ".join(lines).replace("{}", "[a-z ]{20,40}")
        yield Planned("redacted", generation)
