"""Constraints of tests: a small tokenizer, and ``Grammars`` without a native library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from services.core.generation import Constraint, ConstraintKind
from services.ports.grammars import Bits, GrammarRefused, MaskRequest

EOS: Final = 0
TOKENS: Final = ("<end>", *(chr(code) for code in range(33, 127)), "re", "red", "en", "gre", "blue")
SIZE: Final = len(TOKENS)
IDS: Final = {text: place for place, text in enumerate(TOKENS)}


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer.json of ``TOKENS``: bytes and a few longer tokens."""
    fields = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": EOS,
                "content": TOKENS[EOS],
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "use_regex": False,
            "trim_offsets": False,
        },
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "use_regex": False,
            "trim_offsets": False,
        },
        "model": {"type": "BPE", "vocab": IDS, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(fields))


class ChoiceMatcher:
    """Implements ``Matcher`` for a list of texts."""

    def __init__(self, choices: Sequence[str], text: str = "", *, ended: bool = False) -> None:
        self._choices = choices
        self._text = text
        self._ended = ended

    def consume(self, tokens: Sequence[int]) -> None:
        """See ``Matcher``."""
        for token in tokens:
            if token not in self.allowed():
                raise GrammarRefused(f"token {token} of the output does not fit it")
            self._ended = token == EOS
            self._text += "" if self._ended else TOKENS[token]

    def fitting(self, tokens: Sequence[int]) -> int:
        """See ``Matcher``."""
        ahead = self.copy()
        for count, token in enumerate(tokens):
            if token not in ahead.allowed() or (ahead._ended and token == EOS):
                return count
            ahead.consume([token])
        return len(tokens)

    def copy(self) -> ChoiceMatcher:
        return ChoiceMatcher(self._choices, self._text, ended=self._ended)

    def allowed(self) -> set[int]:
        if self._ended:
            return {EOS}
        found = {EOS} if self._text in self._choices else set()
        for token, text in enumerate(TOKENS):
            if token != EOS and any(each.startswith(self._text + text) for each in self._choices):
                found.add(token)
        return found


class ChoiceGrammars:
    """Implements ``Grammars`` for choices alone, over ``TOKENS``."""

    row_bytes = -(-SIZE // 8)

    def exact(self, constraint: Constraint) -> Constraint:
        return constraint

    def compile(self, constraint: Constraint) -> ChoiceMatcher:
        """See ``Grammars``."""
        if constraint.kind is not ConstraintKind.CHOICE:
            raise GrammarRefused(f"{constraint.kind} is not among these grammars")
        try:
            choices = json.loads(constraint.source)
        except ValueError as error:
            raise GrammarRefused(str(error)) from error
        if not isinstance(choices, list) or not choices:
            raise GrammarRefused("it is no list of strings")
        return ChoiceMatcher(choices)

    def fill(self, requests: Sequence[MaskRequest], into: Bits) -> dict[int, str]:
        """See ``Grammars``."""
        problems: dict[int, str] = {}
        for request in requests:
            matcher = request.matcher
            assert isinstance(matcher, ChoiceMatcher)
            try:
                matcher.consume(request.produced)
            except GrammarRefused as refused:
                problems[request.row] = str(refused)
                continue
            ahead = matcher.copy()
            for offset, token in enumerate((*request.proposals, None)):
                for allowed in ahead.allowed():
                    into[request.row + offset, allowed // 8] |= 1 << allowed % 8
                if token is not None:
                    ahead.consume([token])
        return problems


def choice(*texts: str) -> Constraint:
    return Constraint(ConstraintKind.CHOICE, json.dumps(texts))
