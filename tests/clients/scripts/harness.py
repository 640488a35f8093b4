"""What the clients' scripts share. Runs in a client's environment: standard library only.

A script registers one function per feature and calls ``Features.run``, which prints a JSON line of their
names, then one line per feature: what came of it, and why. A function returns where the feature is served,
and raises where it is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

REFUSALS: Final = (400, 404, 405, 422)
_EVIDENCE_CHARS: Final = 600


@dataclass(frozen=True)
class Target:
    """The installation, as the driver passes it."""

    url: str
    key: str
    # The bundled model, and its weights with a chat template of tools and reasoning.
    model: str
    agent: str
    # A model that answers an agent by calls of its own tools, and then by a text.
    scripted: str
    embedder: str
    reranker: str
    # Keys of tenants with few requests a minute: one request; a request every two seconds.
    limited_key: str
    paced_key: str
    # The bundled model's files, and a folder of this script's own.
    checkpoint: str
    scratch: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


TARGET: Final = Target(**json.loads(sys.argv[1]))

# A conversation and a tool that every client uses. The values are few: the model is small.
PROMPT: Final = "def add(a, b):"
QUESTION: Final = "Write a function `add` that adds two numbers."
CITIES: Final = ["Bern", "Oslo", "Rome"]
WEATHER: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": CITIES},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": WEATHER},
}


class Wrong(AssertionError):
    """The answer is not what the feature promises."""


def check(holds: object, found: object) -> None:
    """Return if ``holds``. Raises Wrong with what was found."""
    if not holds:
        raise Wrong(repr(found))


def same(found: object, expected: object) -> None:
    check(found == expected, {"found": found, "expected": expected})


def is_weather(arguments: object) -> None:
    """Return if these are arguments of the tool, as text or as an object."""
    found: Any = json.loads(arguments) if isinstance(arguments, str) else arguments
    check(isinstance(found, dict) and set(found) == {"city", "days"}, found)
    check(found["city"] in CITIES and 1 <= found["days"] <= 7, found)


def is_text_or_calls(content: object, calls: list[tuple[str, str]], finish: str | None) -> None:
    """Return if an answer is text, or calls of the tool, by name and arguments, for which it ended."""
    for name, arguments in calls:
        same(name, "get_weather")
        is_weather(arguments)
    if calls:
        same(finish, "tool_calls")
    else:
        check(isinstance(content, str) and content.strip(), content)
        check(finish in ("stop", "length"), finish)


def raised(kind: type[BaseException], call: Callable[[], object]) -> Any:
    """Return the error that a call raises. Raises Wrong where it raises none."""
    try:
        found = call()
    except kind as error:
        return error
    raise Wrong(f"no {kind.__name__}: {found!r}")


def limited(call: Callable[[], object], kind: type[BaseException]) -> Any:
    """Return the error of a key whose rate is exceeded; its tenant may be new to the gateway."""
    for _ in range(20):
        try:
            call()
        except kind as error:
            return error
        except Exception as error:
            if status_of(error) != 401:
                raise
            time.sleep(0.5)
    raise Wrong("20 requests were served")


def status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status of an error, or of the one that it came from."""
    for _ in range(10):
        if error is None:
            return None
        for holder in (error, getattr(error, "response", None)):
            for name in ("status_code", "http_status", "status", "code"):
                value = getattr(holder, name, None)
                if isinstance(value, int):
                    return value
        error = error.__cause__ or error.__context__
    return None


def text_of(error: BaseException) -> str:
    """Return the messages of an error and of those that it came from."""
    texts, one = [], error
    for _ in range(10):
        if type(one).__name__ != "HTTPStatusError":  # it names the URL, not what is wrong
            texts.append(f"{type(one).__name__}: {one}")
        further = one.__cause__ or one.__context__
        if further is None:
            break
        one = further
    return " <- ".join(texts)


@contextlib.contextmanager
def edits() -> Iterator[str]:
    """The block edits the file of the script; yields the text with which an agent ends."""
    notes = Path("notes.txt")
    notes.write_text("The word is one.\n")
    yield "The word is two now."
    same(notes.read_text(), "The word is two.\n")


def program(command: list[str], environment: dict[str, str], *, fails: bool = False) -> str:
    """Return what a program printed. ``fails``: whether it has to."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL,
        env=os.environ | environment,
    )  # fmt: skip
    shown = f"exit code {done.returncode}: {done.stdout[-900:]} {done.stderr[-300:]}"
    check(fails == bool(done.returncode), shown)
    return done.stdout


class Features:
    """The features of one client, in the order of their definition."""

    def __init__(self) -> None:
        self._functions: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {}

    def shows(self, name: str, *fields: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        """Register a function. A refusal of the feature has to contain one of ``fields``."""

        def register(function: Callable[[], Any]) -> Callable[[], Any]:
            if name in self._functions:
                raise ValueError(f"{name} is shown twice")
            self._functions[name] = (function, fields)
            return function

        return register

    def run(self) -> None:
        print(json.dumps({"features": list(self._functions)}), flush=True)
        for name, (function, fields) in self._functions.items():
            began_s = time.monotonic()
            outcome, evidence = _outcome(function, fields)
            took_s = round(time.monotonic() - began_s, 2)
            line = {"feature": name, "outcome": outcome, "evidence": evidence, "took_s": took_s}
            print(json.dumps(line), flush=True)


def _outcome(function: Callable[[], Any], fields: tuple[str, ...]) -> tuple[str, str]:
    try:
        found = function()
        if inspect.iscoroutine(found):
            asyncio.run(found)
    except Exception as error:
        text = text_of(error).replace(TARGET.key, "KEY")[:_EVIDENCE_CHARS]
        is_refusal = not isinstance(error, Wrong) and status_of(error) in REFUSALS
        if is_refusal and any(field in text_of(error) for field in fields):
            return "refused_by_name", text
        traceback.print_exc()
        return "wrong", text
    return "served", ""
