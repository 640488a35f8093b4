"""Inputs of a generation that must do no harm, in OpenAI's names, which each face translates to its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Input:
    group: str
    name: str
    fields: Mapping[str, Any]
    served: bool = False


def _deep(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"]}
    return found


def _user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def _tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


# What a name could break out of: a Lua script, a key of etcd, SQL, a path, a line of a log or of a header.
NAMES: Final = {
    "lua": "'); redis.call('FLUSHALL') --",
    "etcd key": "/fairway/v1/keys/",
    "sql": "x'; DROP TABLE tenants; --",
    "path": "../../../../etc/passwd",
    "encoded path": "..%2f..%2fetc%2fpasswd",
    "nul": "a\0b",
    "line": "a\r\nx-role: admin",
    "template": "{{ cycler.__init__.__globals__ }}",
    "long": "m" * 100_000,
    "wildcard": "*",
}
_TEMPLATE: Final = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
_SIZES: Final[dict[str, dict[str, Any]]] = {
    "n of a billion": {"n": 10**9},
    "n of zero": {"n": 0},
    "128 outputs of a whole context": {"n": 128, "max_tokens": 10**6},
    "max_tokens beyond 32 bits": {"max_tokens": 2**40},
    "max_tokens of 2 billion": {"max_tokens": 2**31},
    "max_tokens below zero": {"max_tokens": -1},
    "min_tokens above the room": {"min_tokens": 10**6, "max_tokens": None},
    "min_tokens above max_tokens": {"min_tokens": 5, "max_tokens": 4},
    "temperature below zero": {"temperature": -0.1},
    "temperature NaN": {"temperature": math.nan},
    "temperature infinite": {"temperature": math.inf},
    "temperature tiny": {"temperature": 1e-45},
    "top_p above one": {"top_p": 1.5},
    "top_p NaN": {"top_p": math.nan},
    "min_p below zero": {"min_p": -1.0},
    "top_k of 4 billion": {"top_k": 2**32 - 1},
    "presence_penalty out of range": {"presence_penalty": 3.0},
    "frequency_penalty NaN": {"frequency_penalty": math.nan},
    "repetition_penalty zero": {"repetition_penalty": 0.0},
    "repetition_penalty infinite": {"repetition_penalty": math.inf},
    "repetition_penalty below zero": {"repetition_penalty": -1.0},
    "logprobs of a million": {"logprobs": 10**6},
    "prompt_logprobs of a million": {"prompt_logprobs": 10**6},
    "10,000 stop strings": {"stop": ["a"] * 10_000},
    "stop of a megabyte": {"stop": ["a" * 2**20]},
    "100,000 stop tokens": {"stop_token_ids": [1] * 100_000},
    "100,000 biases": {"logit_bias": {f"{number}": 1.0 for number in range(100_000)}},
    "bias NaN": {"logit_bias": {"1": math.nan}},
    "bias of a thousand": {"logit_bias": {"1": 1000.0}},
    "a million prompts": {"prompt": ["a"] * 10**6},
    "prompts inside prompts": {"prompt": [[[1]]]},
    "empty prompt": {"prompt": ""},
    "no prompts": {"prompt": []},
    "prompt above the context": {"prompt": "def f(n):\n" * 20_000},
    "seed beyond 64 bits": {"seed": 2**64},
    "priority unknown": {"priority": "root"},
    "user of a megabyte": {"user": "u" * 2**20},
}
# Each alone is served; together, the like of it ended an engine somewhere.
_COMBINATIONS: Final[dict[str, dict[str, Any]]] = {
    "grammar past its end": {"guided_choice": ["a"], "ignore_eos": True, "min_tokens": 4},
    "grammar with a masked token": {"guided_regex": "[ab]+", "logit_bias": {"64": -100.0, "65": -100.0}},
    "two grammars": {"guided_regex": "a", "guided_json": {"type": "object"}},
    "every penalty at its end": {
        "presence_penalty": 2.0,
        "frequency_penalty": -2.0,
        "repetition_penalty": 10.0,
        "temperature": 2.0,
        "top_p": 0.0,
        "min_p": 1.0,
    },
    "bias against every stop token": {
        "stop_token_ids": [0, 1, 2, 3],
        "logit_bias": {"0": 100.0, "1": -100.0},
    },
    "logprobs with grammar and outputs": {"logprobs": 5, "n": 4, "guided_regex": "[a-z]{1,3}"},
    "no output with outputs": {"max_tokens": 0, "n": 3},
    "prompt_logprobs with outputs": {"prompt_logprobs": 3, "n": 2},
}
_GRAMMARS: Final[dict[str, tuple[dict[str, Any], bool]]] = {
    "(a+)+b": ({"guided_regex": "(a+)+b"}, True),
    "repetition of a million": ({"guided_regex": "(((a{1,1000}){1,1000}){1,1000}){1,1000}"}, True),
    "unclosed": ({"guided_regex": "(((("}, False),
    "look-behind": ({"guided_regex": "(?<=a)b"}, False),
    "back-reference": ({"guided_regex": r"(a)\1"}, False),
    "regex of 100 kB": ({"guided_regex": "a?" * 50_000}, False),
    "schema of no type": ({"guided_json": {"type": "nonsense"}}, False),
    "schema of 200 levels": ({"guided_json": _deep(200)}, True),
    "schema that refers to itself": ({"guided_json": {"$ref": "#"}}, True),
    "schema from the network": ({"guided_json": {"$ref": "http://169.254.169.254/latest"}}, False),
    "schema from a file": ({"guided_json": {"$ref": "file:///etc/passwd"}}, False),
    "enum of 50,000": ({"guided_json": {"enum": [f"value {number}" for number in range(50_000)]}}, False),
    "10,000 choices": ({"guided_choice": [f"{number}" for number in range(10_000)]}, False),
    "no choices": ({"guided_choice": []}, False),
    "grammar without an end": ({"guided_grammar": "start: start"}, True),
    "grammar of an unknown rule": ({"guided_grammar": "start: nowhere"}, False),
}
_PARTS: Final = {
    "picture of a private address": {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
    "picture of a file": {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    "picture of 4 billion pixels": {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAA//8AAP//CAYAAAA="},
    },
    "sound": {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    "file": {"type": "file", "file": {"file_id": "../../etc/passwd"}},
    "part of no type": {"type": "shell", "text": "id"},
}
_TEMPLATES: Final[dict[str, tuple[dict[str, Any], bool]]] = {
    "chat template of the client": ({"chat_template": _TEMPLATE}, False),
    "template in a variable": ({"chat_template_kwargs": {"chat_template": _TEMPLATE}}, False),
    "messages in a variable": ({"chat_template_kwargs": {"messages": [_TEMPLATE]}}, False),
    "tools in a variable": ({"chat_template_kwargs": {"tools": [_TEMPLATE]}}, False),
    "tokenize in a variable": ({"chat_template_kwargs": {"tokenize": False}}, True),
    "variable of 1 MB": ({"chat_template_kwargs": {"x": "a" * 2**20}}, False),
    "template as a value": ({"chat_template_kwargs": {"x": _TEMPLATE}}, True),
    "template as a turn": ({"messages": [{"role": "user", "content": _TEMPLATE}]}, True),
    "turn of no role": ({"messages": [{"role": "root", "content": "hi"}]}, False),
    "3,000 turns": ({"messages": [{"role": "user", "content": "a"}] * 3_000}, False),
}
_TENANTS: Final[dict[str, tuple[dict[str, Any], bool]]] = {
    "token beyond the vocabulary": ({"prompt": [2**31]}, False),
    "bias beyond the vocabulary": ({"logit_bias": {f"{2**31}": 1.0}}, False),
    "bias that is no number": ({"logit_bias": {"a": 1.0}}, False),
    "stop token beyond the vocabulary": ({"stop_token_ids": [2**32 - 1]}, True),
    "cache salt": ({"cache_salt": "of another"}, False),
    "bad_words": ({"bad_words": ["x"]}, False),
    "allowed tokens": ({"allowed_token_ids": [2**31]}, False),
    "user of another": ({"user": "canary/../root"}, True),
}
_TOOLS: Final[dict[str, tuple[dict[str, Any], bool]]] = {
    "1,000 tools": ({"tools": [_tool(f"t{number}") for number in range(1000)]}, False),
    "tool named by code": ({"tools": [_tool("x'); os.system('id")]}, False),
    "tool of a deep schema": ({"tools": [_tool("t", _deep(200))]}, True),
    "tool of a wrong schema": (
        {"tools": [_tool("t", {"type": "nonsense"})], "tool_choice": "required"},
        False,
    ),
    "tool of the server": ({"tools": [{"type": "code_interpreter"}]}, False),
}


def _each(group: str, found: Mapping[str, tuple[dict[str, Any], bool]]) -> tuple[Input, ...]:
    return tuple(Input(group, name, fields, served) for name, (fields, served) in found.items())


MAY_BE_SERVED: Final = frozenset({"temperature tiny", "user of a megabyte", "empty prompt"})
INPUTS: Final = (
    *(Input("size and fan-out", name, fields, name in MAY_BE_SERVED) for name, fields in _SIZES.items()),
    *(Input("parameters together", name, fields, True) for name, fields in _COMBINATIONS.items()),
    *_each("grammars", _GRAMMARS),
    *_each("templates", _TEMPLATES),
    *_each("across tenants", _TENANTS),
    *_each("tools", _TOOLS),
    *(Input("pictures and fetches", name, {"messages": _user(part)}) for name, part in _PARTS.items()),
    *(Input("names", f"model: {name}", {"model": text}) for name, text in NAMES.items()),
)
