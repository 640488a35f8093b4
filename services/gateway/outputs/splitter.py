"""Splits the text of an output into content, reasoning and calls, as it arrives.

It is a state machine over the text: the same parts come out however the text is cut. Whitespace next to the
marks belongs to no part. Calls that are held to their form stream their arguments. Others may be malformed:
they wait for the end, and become content unless they are valid.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Any, Final

import msgspec

from fairway.formats.answers import CallDelta, ContentText, OutputPart, ReasoningText
from services.core.outputs.forms import MAX_NAME_CHARS, CallForm, OutputForm

# Most whitespace that is held back until it is clear whether a mark follows; more of it is content.
_MAX_BLANKS: Final = 64


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


class _At(StrEnum):
    START = "start"
    REASONING = "reasoning"
    AFTER = "after"  # reasoning or a call
    CONTENT = "content"
    PLAIN = "plain"  # content, and no call can follow
    BEGIN = "begin"
    NAME = "name"
    ARGUMENTS = "arguments"
    CLOSE = "close"
    BEHIND = "behind"  # a call
    LOOSE = "loose"


class OutputSplitter:
    """Splits the output of one choice. ``call_id`` returns the id of a call by its index."""

    def __init__(self, form: OutputForm, call_id: Callable[[int], str]) -> None:
        self.calls = 0  # calls that have begun
        self._form = form
        self._call_id = call_id
        self._names = dict(form.renamed)
        self._held = ""
        self._loose: list[str] = []
        self._opened = ""  # what stood before the name
        self._parts: list[OutputPart] = []
        self._scan = _ObjectScan()
        self._at = _At.REASONING if form.thinking and form.reasoning is not None else _At.START
        self.reasons = self._at is _At.REASONING  # whether the output has reasoning
        self._fresh = True  # nothing of the part has been sent
        self._steps: Final = {
            _At.START: self._start,
            _At.REASONING: self._reasoning,
            _At.AFTER: self._after,
            _At.CONTENT: self._content,
            _At.PLAIN: self._plain,
            _At.BEGIN: self._begin,
            _At.NAME: self._name,
            _At.ARGUMENTS: self._arguments,
            _At.CLOSE: self._close,
            _At.BEHIND: self._behind,
            _At.LOOSE: self._collect,
        }

    def feed(self, text: str) -> list[OutputPart]:
        """Return what became final with this text, in order."""
        self._held += text
        while self._steps[self._at]():
            pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> tuple[OutputPart, ...]:
        """Return the rest: the output has ended."""
        held, self._held = self._held, ""
        if self._form.held and self._at in (_At.BEGIN, _At.NAME, _At.BEHIND):
            held = self._opened = ""  # The text belongs to a call that is cut short.
        match self._at:
            case _At.REASONING:
                self._emit(ReasoningText(held.rstrip()))
            case _At.START | _At.CONTENT | _At.PLAIN:
                self._emit(ContentText(held))
            case _At.BEGIN | _At.BEHIND | _At.AFTER:
                self._emit(ContentText(held.strip()))
            case _At.NAME:
                self._emit(ContentText((self._opened + held).strip()))
            case _At.LOOSE:
                self._finish_loose("".join(self._loose))
        parts, self._parts = tuple(self._parts), []
        return parts

    @property
    def is_reasoning(self) -> bool:
        """Whether the output so far ends within its reasoning."""
        return self._at is _At.REASONING

    # Each step returns whether another one can follow with what is held.

    def _start(self) -> bool:
        text, reasoning = self._held.lstrip(), self._form.reasoning
        if len(self._held) - len(text) > _MAX_BLANKS:
            marked = self._form.calls is not None and self._form.calls.mark
            return self._go(_At.CONTENT if marked else _At.PLAIN, self._held)
        if reasoning is not None:
            if text.startswith(reasoning.open):
                self.reasons = True
                return self._go(_At.REASONING, text[len(reasoning.open) :])
            if reasoning.open.startswith(text):
                return False
        if self._form.calls is None:
            return self._go(_At.PLAIN, self._held)
        if self._form.calls.mark:
            return self._go(_At.CONTENT, self._held)
        return bool(text) and self._go(_At.AFTER, text)

    def _reasoning(self) -> bool:
        assert self._form.reasoning is not None, "reasoning without a form"
        close = self._form.reasoning.close
        if self._fresh:
            self._held = self._held.lstrip()
        end = self._held.find(close)
        if end >= 0:
            self._emit(ReasoningText(_before_blanks(self._held[:end])))
            return self._go(_At.AFTER, self._held[end + len(close) :])
        ready = _before_tail(self._held, close)
        if ready:
            self._emit(ReasoningText(self._held[:ready]))
            self._held, self._fresh = self._held[ready:], False
        return False

    def _after(self) -> bool:
        text, calls = self._held.lstrip(), self._form.calls
        self._held = text
        if not text:
            return False
        if calls is None:
            return self._go(_At.PLAIN, text)
        if calls.mark:
            return self._go(_At.CONTENT, text)
        if not self._form.held:
            return self._go(_At.LOOSE if text.startswith("{") else _At.PLAIN, text)
        if text.startswith(calls.begin):
            return self._go(_At.BEGIN, text)
        return False if calls.begin.startswith(text) else self._go(_At.PLAIN, text)

    def _content(self) -> bool:
        mark = self._calls.mark
        start = self._held.find(mark)
        if start >= 0:
            self._emit(ContentText(_before_blanks(self._held[:start])))
            return self._go(_At.BEGIN if self._form.held else _At.LOOSE, self._held[start:])
        ready = _before_tail(self._held, mark)
        self._emit(ContentText(self._held[:ready]))
        self._held = self._held[ready:]
        return False

    def _plain(self) -> bool:
        self._emit(ContentText(self._held))
        self._held = ""
        return False

    def _begin(self) -> bool:
        calls = self._calls
        if self._held.startswith(calls.begin):
            self._opened = calls.begin
            return self._go(_At.NAME, self._held[len(calls.begin) :])
        return False if calls.begin.startswith(self._held) else self._go(_At.LOOSE, self._held)

    def _name(self) -> bool:
        calls = self._calls
        end = self._held.find(calls.middle)
        if 0 < end <= MAX_NAME_CHARS:
            name = self._held[:end]
            self._emit(CallDelta(self.calls, self._call_id(self.calls), self._names.get(name, name)))
            self.calls += 1
            self._scan = _ObjectScan()
            return self._go(_At.ARGUMENTS, self._held[end + len(calls.middle) :])
        if end < 0 and len(self._held) < MAX_NAME_CHARS + len(calls.middle):
            return False
        return self._go(_At.LOOSE, self._opened + self._held)

    def _arguments(self) -> bool:
        taken = self._scan.take(self._held)
        if taken:
            self._emit(CallDelta(self.calls - 1, arguments=self._held[:taken]))
        self._held = self._held[taken:]
        if not self._scan.ended:
            return False
        return self._go(_At.CLOSE, self._held)

    def _close(self) -> bool:
        close = self._calls.close
        if self._held.startswith(close):
            return self._go(_At.BEHIND, self._held[len(close) :])
        return False if close.startswith(self._held) else self._go(_At.BEHIND, self._held)

    def _behind(self) -> bool:
        again, last = self._calls.again, self._calls.last
        if self._held.startswith(again):
            self._opened = again
            return self._go(_At.NAME, self._held[len(again) :])
        if last and self._held.startswith(last):
            return self._go(_At.AFTER if self._calls.mark else _At.PLAIN, self._held[len(last) :])
        if again.startswith(self._held) or (last and last.startswith(self._held)):
            return False
        return self._go(_At.AFTER if self._calls.mark else _At.PLAIN, self._held)

    def _collect(self) -> bool:
        self._loose.append(self._held)
        self._held = ""
        return False

    def _finish_loose(self, text: str) -> None:
        found = loose_calls(text, self._calls, self._form.names)
        if not found:
            self._emit(ContentText(text))
        for name, arguments in found:
            name = self._names.get(name, name)
            self._emit(CallDelta(self.calls, self._call_id(self.calls), name, arguments))
            self.calls += 1

    @property
    def _calls(self) -> CallForm:
        assert self._form.calls is not None, "a call without a form"
        return self._form.calls

    def _go(self, at: _At, held: str) -> bool:
        self._at, self._held, self._fresh = at, held, True
        return True

    def _emit(self, part: OutputPart) -> None:
        """Add a part, to the last one where both are of the same kind."""
        last = self._parts[-1] if self._parts else None
        match last, part:
            case (_, ContentText("") | ReasoningText("")):
                return
            case ContentText(before), ContentText(text):
                self._parts[-1] = ContentText(before + text)
            case ReasoningText(before), ReasoningText(text):
                self._parts[-1] = ReasoningText(before + text)
            case CallDelta(index, call_id, name, before), CallDelta(number, "", "", text) if index == number:
                self._parts[-1] = CallDelta(index, call_id, name, before + text)
            case _:
                self._parts.append(part)


class _ObjectScan:
    """Finds the end of a JSON object, in text that is one."""

    __slots__ = ("_depth", "_escaped", "_quoted", "ended")

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def take(self, text: str) -> int:
        """Return how many characters of the text belong to the object."""
        for index, char in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self.ended = True
                    return index + 1
        return len(text)


def _before_tail(text: str, mark: str) -> int:
    """Return the length of the text without the end that may begin ``mark``, and blanks before that."""
    kept = next(
        (size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0
    )
    return len(_before_blanks(text[: len(text) - kept]))


def _before_blanks(text: str) -> str:
    """Return the text without the blanks at its end, as far as these are held back."""
    size = max(len(text.rstrip()), len(text) - _MAX_BLANKS)
    return text[:size]
