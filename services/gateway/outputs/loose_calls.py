"""Calls in a text that nothing held to their form."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Final

import msgspec

from services.core.outputs.forms import CallForm


class _Call(msgspec.Struct):
    """A call in JSON. Its arguments stay as they are written, under either name."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def loose_calls(text: str, form: CallForm, names: Collection[str] = ()) -> list[tuple[str, str]]:
    """Return name and arguments of each call in a text that begins with the first; empty unless all of the
    text is calls that are valid, of ``names`` where there are some."""
    try:
        if form.middle.startswith('"'):
            found = [_call(call.name, call.arguments or call.parameters) for call in _values(text, form)]
        else:
            found = _named_calls(text, form)
    except (ValueError, RecursionError):
        return []
    return found if not names or all(name in names for name, _ in found) else []


def _values(text: str, form: CallForm) -> list[_Call]:
    """Return the JSON objects between the marks, those of a list one by one."""
    marks = {piece.strip() for piece in (form.mark, form.close.strip(' \n}"'), form.again.split("{")[0])}
    skipped = sorted(marks - {""}, key=len, reverse=True)
    found: list[_Call] = []
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
        start, (_, position) = position, _decoder.raw_decode(text, position)
        value = msgspec.json.decode(text[start:position], type=list[_Call] | _Call)
        found += value if isinstance(value, list) else [value]


def _named_calls(text: str, form: CallForm) -> list[tuple[str, str]]:
    """Return the calls of a form whose names stand before the JSON. Raises ValueError for another text."""
    opening = form.again.strip()
    before, *calls = text.strip().removesuffix(form.last).split(opening)
    if before.strip() != form.begin.removesuffix(opening).strip():
        raise ValueError("something stands before the first call")
    return [_named(call, form) for call in calls]


def _named(text: str, form: CallForm) -> tuple[str, str]:
    end = text.find("{")
    name = text[:end].strip().removesuffix(form.middle.strip()).strip()
    return _call(name, text[end:].strip().removesuffix(form.close.strip()).strip().encode())


def _call(name: str, arguments: msgspec.Raw | bytes) -> tuple[str, str]:
    """Return a call. Raises ValueError for one that is none: what Python's decoder takes and JSON is not."""
    if not name:
        raise ValueError("no name")
    written = bytes(arguments) or b"{}"
    msgspec.json.decode(written, type=dict[str, Any])
    return name, written.decode()


_decoder: Final = json.JSONDecoder()
