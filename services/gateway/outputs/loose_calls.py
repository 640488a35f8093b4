"""Calls in a text that nothing held to their form."""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

from services.core.outputs.forms import CallForm

_ARGUMENTS: Final = ("arguments", "parameters")


def loose_calls(text: str, form: CallForm) -> list[tuple[str, str]]:
    """Return name and arguments of each call in a text that begins with the first; empty unless all of the
    text is calls that are valid."""
    try:
        if form.middle.startswith('"'):
            return [_call(value) for value in _values(text, form)]
        return [_named(part, form) for part in text.split(form.mark)[1:]]
    except (ValueError, RecursionError):
        return []


def _values(text: str, form: CallForm) -> list[Any]:
    """Return the JSON values between the marks, those of a list one by one."""
    marks = {piece.strip() for piece in (form.mark, form.close.strip(' \n}"'), form.again.split("{")[0])}
    skipped = sorted(marks - {""}, key=len, reverse=True)
    found: list[Any] = []
    position = 0
    while True:
        while text[position : position + 1].isspace():
            position += 1
        if position == len(text):
            return found
        mark = next((mark for mark in skipped if text.startswith(mark, position)), "")
        if mark:
            position += len(mark)
            continue
        value, position = _decoder.raw_decode(text, position)
        found += value if isinstance(value, list) else [value]


def _named(text: str, form: CallForm) -> tuple[str, str]:
    """Return the call of a form whose name stands before the JSON."""
    end = text.find("{")
    name = text[:end].removesuffix(form.middle).strip()
    return _call({"name": name, "arguments": _decoder.decode(text[end:])})


def _call(value: Any) -> tuple[str, str]:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError("no call")
    arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
    if not isinstance(arguments, dict):
        raise ValueError("no object")
    return value["name"], json.dumps(arguments, ensure_ascii=False)


def _no_number(text: str) -> NoReturn:
    raise ValueError(text)


_decoder: Final = json.JSONDecoder(parse_constant=_no_number)
