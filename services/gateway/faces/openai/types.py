"""The request bodies of the OpenAI dialects, parsed strictly.

Fields are of three kinds. Supported fields have their type. OpenAI fields that this server does not support
are accepted at a neutral value (``tools: []``), because some clients always send them, and rejected by name
otherwise. Any other field is rejected by name: a silently dropped option is a wrong answer.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from services.core.errors import InvalidInput, UnsupportedFeature

_UINT32: Final = 0xFFFF_FFFF
UInt32 = Annotated[int, Meta(ge=0, le=_UINT32)]
TopK = Annotated[int, Meta(ge=-1, le=_UINT32)]
Short = Annotated[str, Meta(max_length=4096)]


class StreamOptions(Struct, forbid_unknown_fields=True, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: Raw = Raw()


class ContentPart(Struct, forbid_unknown_fields=True, frozen=True):
    type: str
    text: str | None = None
    refusal: Raw = Raw()
    image_url: Raw = Raw()
    input_audio: Raw = Raw()
    file: Raw = Raw()


class ChatTurn(Struct, forbid_unknown_fields=True, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: Raw = Raw()
    annotations: Raw = Raw()
    audio: Raw = Raw()
    function_call: Raw = Raw()
    tool_calls: Raw = Raw()
    tool_call_id: Raw = Raw()


# A JSON schema: an object, or a boolean for everything or nothing. It is checked where it is compiled.
Schema = dict[str, Any] | bool


class JsonSchemaFormat(Struct, forbid_unknown_fields=True, frozen=True):
    """``strict`` false is served as true: an answer that matches is also one that may match."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: Schema | None = None
    strict: bool | None = None
    description: Short | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True, frozen=True):
    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True, frozen=True):
    """vLLM's object; the options of its back ends are taken at their neutral values."""

    json: Schema | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Raw = Raw()
    whitespace_pattern: Raw = Raw()
    disable_fallback: Raw = Raw()
    disable_any_whitespace: Raw = Raw()
    disable_additional_properties: Raw = Raw()


class Options(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The fields of both dialects. The second block is this server's own, with vLLM's names."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: UInt32 | None = None
    max_tokens: UInt32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    user: Short | None = None

    top_k: TopK | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: UInt32 | None = None
    stop_token_ids: list[UInt32] | None = None
    ignore_eos: bool | None = None
    cache: bool | None = None
    priority: Literal["batch", "standard", "interactive"] | None = None
    response_format: ResponseFormat | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_decoding_backend: Raw = Raw()
    guided_whitespace_pattern: Raw = Raw()

    metadata: Raw = Raw()
    store: Raw = Raw()
    service_tier: Raw = Raw()
    safety_identifier: Raw = Raw()
    prompt_cache_key: Raw = Raw()
    prompt_cache_retention: Raw = Raw()
    chat_template: Raw = Raw()
    chat_template_kwargs: Raw = Raw()


class ChatBody(Options, forbid_unknown_fields=True, frozen=True, kw_only=True):
    messages: list[ChatTurn]
    max_completion_tokens: UInt32 | None = None
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None

    tools: Raw = Raw()
    tool_choice: Raw = Raw()
    parallel_tool_calls: Raw = Raw()
    functions: Raw = Raw()
    function_call: Raw = Raw()
    audio: Raw = Raw()
    modalities: Raw = Raw()
    prediction: Raw = Raw()
    reasoning_effort: Raw = Raw()
    verbosity: Raw = Raw()
    web_search_options: Raw = Raw()


class CompletionBody(Options, forbid_unknown_fields=True, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[UInt32]]
    logprobs: UInt32 | None = None

    suffix: Raw = Raw()
    echo: Raw = Raw()
    best_of: Raw = Raw()


# The neutral values, besides absence and null.
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "add_special_tokens": (True,),
    "annotations": ([],),
    "best_of": (1,),
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "disable_fallback": (True, False),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_decoding_backend": ("auto", "guidance"),
    "include_obfuscation": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
}
_MAX_NEUTRAL_BYTES: Final = 64
_PATH: Final = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `([^`]*)`")
_MISSING: Final = re.compile(r"Object missing required field `([^`]*)`")

# Bounds of a body's content. A request within the bounds of every field has less: 2,048 messages, 1,048,576
# token ids.
_MAX_STRINGS: Final = 65_536  # names of fields and values
_MAX_OPENINGS: Final = 32_768  # objects and lists
_MAX_COMMAS: Final = 1_048_576 + _MAX_STRINGS
_SMALL_BYTES: Final = 8 * 1024
_CHEAP_BYTES: Final = 64 * 1024
_CHEAP_MARKS: Final = 4096

Body = TypeVar("Body", bound=Struct)


def is_cheap(data: bytes) -> bool:
    """Whether decoding this JSON takes about a millisecond for every content."""
    if len(data) <= _SMALL_BYTES:
        return True
    return len(data) <= _CHEAP_BYTES and sum(_counts(data)) <= _CHEAP_MARKS


def check_json_cost(data: bytes) -> None:
    """Return if the JSON has no more strings, objects and values than a request needs. Raises InvalidInput.

    Decoding costs time and memory for each of these, and 8 MB contain millions.
    """
    strings, openings, commas = _counts(data)
    if strings > _MAX_STRINGS:
        raise InvalidInput("the body has too many strings")
    if openings > _MAX_OPENINGS:
        raise InvalidInput("the body has too many objects and lists")
    if commas > _MAX_COMMAS:
        raise InvalidInput("the body has too many values")


def _counts(data: bytes) -> tuple[int, int, int]:
    """Return the number of strings, openings and commas of JSON, by fast native scans.

    Without the escaped quotes, every second piece between quotes is outside of strings. Commas and openings
    are not counted when there are too many strings.
    """
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    quotes = plain.count(b'"')
    if quotes > 2 * _MAX_STRINGS:
        return (quotes + 1) // 2, 0, 0
    outside = b"".join(plain.split(b'"')[::2])
    return quotes // 2, outside.count(b"{") + outside.count(b"["), outside.count(b",")


def parse_body(data: bytes, kind: type[Body]) -> Body:
    """Return the body of a request. Raises InvalidInput or UnsupportedFeature naming the field.

    Rejects what the standard library accepts: NaN and infinities, numbers out of range, duplicate keys,
    invalid UTF-8, lone surrogates, nesting beyond the parser's depth.
    """
    if len(data) > _CHEAP_BYTES:
        check_json_cost(data)
    try:
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as exc:
        raise _invalid(str(exc)) from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidInput("the body is not valid JSON in UTF-8") from exc
    except RecursionError:
        raise InvalidInput("the body is nested too deeply") from None
    require_neutral(body, "")
    # After the type checks the body has no more objects than messages, so this pass is cheap.
    try:
        json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise InvalidInput("the body is not valid JSON") from None
    return body


def require_neutral(found: Struct, path: str) -> None:
    """Return if every unsupported option has a neutral value. Raises UnsupportedFeature."""
    for name in found.__struct_fields__:
        value = getattr(found, name)
        if isinstance(value, Raw) and not _is_neutral(name, bytes(value).strip()):
            raise UnsupportedFeature(f"{path}{name} is not offered by this server", field=path + name)


def _is_neutral(name: str, raw: bytes) -> bool:
    if raw in (b"", b"null"):
        return True
    if len(raw) > _MAX_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    return any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(name, ()))


def _unique(pairs: list[tuple[str, Any]]) -> None:
    names = {name for name, _ in pairs}
    if len(names) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                shown = name[:64]
                raise InvalidInput(f"the body has {shown!r} twice in one object", field=shown)
            seen.add(name)


def _invalid(text: str) -> InvalidInput:
    path = _PATH.search(text)
    field = path[1] if path is not None else ""
    if (found := _UNKNOWN.search(text)) is not None:
        name = (f"{field}." if field else "") + found[1][:64]
        return InvalidInput(f"unrecognized request argument: {name}", field=name)
    if (found := _MISSING.search(text)) is not None:
        name = (f"{field}." if field else "") + found[1]
        return InvalidInput(f"{name} is required", field=name)
    reason = text[: path.start()] if path is not None else text
    if not field:
        return InvalidInput(f"the body is malformed: {reason[:200]}")
    return InvalidInput(f"{field}: {reason[:200]}", field=field)
