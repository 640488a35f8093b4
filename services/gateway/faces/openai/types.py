"""The request bodies of the OpenAI dialects, parsed strictly.

Fields are of four kinds. Served fields have their type. Hints cannot change the answer: they are checked and
have no effect. Fields that this server does not offer are accepted at a neutral value (``tools: []``),
because some clients always send them, and rejected by name otherwise. Any other field is rejected by name: a
silently dropped option is a wrong answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from services.core.errors import InvalidInput, UnsupportedFeature

_UINT32: Final = 0xFFFF_FFFF
UInt32 = Annotated[int, Meta(ge=0, le=_UINT32)]
TopK = Annotated[int, Meta(ge=-1, le=_UINT32)]
Short = Annotated[str, Meta(max_length=4096)]


def About(text: str) -> Meta:
    """Return the meaning of a field, for the OpenAPI document."""
    return Meta(description=text)


# Not offered, except at a neutral value.
Unserved = Raw | UnsetType
# OpenAI's bounds of metadata.
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


# A client's notes to itself, to another server or about its session: an object of any content, and no effect.
Note = Annotated[dict[str, Any], Meta(max_length=256)]


class CacheControl(Struct, frozen=True):
    """A hint of Anthropic's and LiteLLM's clients: prompts are cached here without one."""

    type: Literal["ephemeral"]


class StreamOptions(Struct, forbid_unknown_fields=True, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[
        bool | None, About("With include_usage: each frame has the usage of its choice so far.")
    ] = None
    include_obfuscation: Unserved = UNSET


class TypedTool(Struct, frozen=True):
    """What a part of any type may have, a tool or a piece of a conversation."""

    type: str | None = None
    name: str | None = None


class ContentPart(Struct, forbid_unknown_fields=True, frozen=True):
    type: str
    text: str | None = None
    cache_control: CacheControl | None = None
    refusal: str | None = None
    image_url: Unserved = UNSET
    input_audio: Unserved = UNSET
    file: Unserved = UNSET


class CalledFunction(Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    arguments: str = ""


class MadeCall(Struct, forbid_unknown_fields=True, frozen=True):
    """A call of an earlier turn. ``index`` is of streamed deltas that a client put together."""

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"
    index: UInt32 | None = None
    provider_specific_fields: Note | None = None
    extra_content: Note | None = None  # Gemini's


class OfferedFunction(Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class OfferedTool(Struct, forbid_unknown_fields=True, frozen=True):
    type: str
    function: OfferedFunction | None = None
    cache_control: CacheControl | None = None
    defer_loading: bool | None = None
    custom: Unserved = UNSET


class ChosenFunction(Struct, forbid_unknown_fields=True, frozen=True):
    name: str


class ChosenTool(Struct, forbid_unknown_fields=True, frozen=True):
    type: str
    function: ChosenFunction | None = None


class AllowedTools(Struct, forbid_unknown_fields=True, frozen=True):
    mode: Literal["auto", "required"]
    tools: list[ChosenTool]


class ToolSelection(Struct, forbid_unknown_fields=True, frozen=True):
    """One function, or OpenAI's ``allowed_tools``."""

    type: str
    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None
    custom: Unserved = UNSET


class ChatTurn(Struct, forbid_unknown_fields=True, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name of reasoning_content
    cache_control: CacheControl | None = None
    provider_specific_fields: Note | None = None  # LiteLLM's note of what another server added
    reasoning_details: list[Note] | None = None  # OpenRouter's
    thinking_blocks: list[Note] | None = None  # LiteLLM's field next to reasoning_content
    extra_content: Note | None = None  # Gemini's
    annotations: list[Note] | None = None
    refusal: Annotated[str | None, About("The content, where there is none.")] = None
    audio: Unserved = UNSET
    function_call: Unserved = UNSET


# A JSON schema: an object, or a boolean for everything or nothing. It is checked where it is compiled.
Schema = dict[str, Any] | bool


class JsonSchemaFormat(Struct, forbid_unknown_fields=True, frozen=True):
    """``strict`` false is served as true: an answer that matches is also one that may match."""

    name: Annotated[str, Meta(min_length=1)]
    schema: Schema | None = None
    strict: bool | None = None
    description: str | None = None


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
    structural_tag: Unserved = UNSET
    whitespace_pattern: Unserved = UNSET
    disable_fallback: Unserved = UNSET
    disable_any_whitespace: Unserved = UNSET
    disable_additional_properties: Unserved = UNSET


class Options(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The fields of both dialects: OpenAI's, this server's own with vLLM's names, hints, and the rest."""

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
    user: Annotated[str | None, About("Beyond 128 bytes its SHA-256 counts.")] = None
    safety_identifier: Annotated[str | None, About("The end user, where user is absent.")] = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "priority"] | None,
        About("flex is the class batch, priority the class interactive."),
    ] = None

    top_k: Annotated[TopK | None, About("0 and -1: off.")] = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Annotated[UInt32 | None, About("No end before so many output tokens.")] = None
    stop_token_ids: list[UInt32] | None = None
    prompt_logprobs: Annotated[UInt32 | None, About("vLLM's; not in a stream.")] = None
    ignore_eos: Annotated[bool | None, About("Go on past the end of sequence.")] = None
    cache: Annotated[bool | None, About("The answer of an equal earlier request serves too.")] = None
    priority: Annotated[
        Literal["batch", "standard", "interactive"] | int | None, About("A class; of numbers only 0.")
    ] = None

    response_format: ResponseFormat | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    metadata: Note | None = None
    client_metadata: Note | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Note | None = None
    prompt_cache_retention: Short | None = None

    store: Annotated[
        bool | None, About("Taken and without effect: an answer of this API is never stored.")
    ] = None
    guided_decoding_backend: Unserved = UNSET
    guided_whitespace_pattern: Unserved = UNSET
    chat_template: Unserved = UNSET
    best_of: Unserved = UNSET
    use_beam_search: Unserved = UNSET
    length_penalty: Unserved = UNSET
    early_stopping: Unserved = UNSET
    skip_special_tokens: Unserved = UNSET
    spaces_between_special_tokens: Unserved = UNSET
    add_special_tokens: Unserved = UNSET
    include_stop_str_in_output: Unserved = UNSET
    truncate_prompt_tokens: Unserved = UNSET
    return_tokens_as_token_ids: Unserved = UNSET
    return_token_ids: Unserved = UNSET
    allowed_token_ids: Unserved = UNSET
    bad_words: Unserved = UNSET
    logits_processors: Unserved = UNSET
    cache_salt: Unserved = UNSET


class ChatBody(Options, forbid_unknown_fields=True, frozen=True, kw_only=True):
    messages: list[ChatTurn]
    max_completion_tokens: UInt32 | None = None
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None,
        About("A variable of the chat template; without effect where the template does not use it."),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, About("Variables of the chat template, such as enable_thinking.")
    ] = None
    verbosity: Literal["low", "medium", "high"] | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolSelection | None = None
    parallel_tool_calls: bool | None = None

    functions: Unserved = UNSET
    function_call: Unserved = UNSET
    echo: Unserved = UNSET
    audio: Unserved = UNSET
    modalities: Unserved = UNSET
    prediction: Unserved = UNSET
    web_search_options: Unserved = UNSET
    add_generation_prompt: Unserved = UNSET
    continue_final_message: Unserved = UNSET
    documents: Unserved = UNSET
    mm_processor_kwargs: Unserved = UNSET


class CompletionBody(Options, forbid_unknown_fields=True, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[UInt32]]
    logprobs: UInt32 | None = None
    echo: Annotated[bool | None, About("Begin with the prompt.")] = None

    suffix: Unserved = UNSET
    chat_template_kwargs: Unserved = UNSET


# Tools that a server runs and that a model need not call, which are left out; others are refused by type.
SEARCHES: Final = ("web_search", "web_fetch", "tool_search")

# Served fields that cannot change the answer.
HINTS: Final = (
    "annotations",
    "cache_control",
    "caller",
    "citations",
    "client_metadata",
    "defer_loading",
    "extra_content",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "provider_specific_fields",
    "reasoning_details",
    "thinking_blocks",
    "verbosity",
)
# The neutral values, besides absence and null. Of a field whose meaning differs, by its class.
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "add_generation_prompt": (True,),
    "allowed_callers": ([], ["direct"]),
    "add_special_tokens": (True,),
    # A chat template writes the special tokens itself.
    "ChatBody.add_special_tokens": (True, False),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "context_management": ([],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "disable_fallback": (True, False),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_decoding_backend": ("auto", "guidance"),
    "include_obfuscation": (False,),
    "include_stop_str_in_output": (False,),
    "input_examples": ([],),
    "length_penalty": (1, 1.0),
    "mcp_servers": ([],),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "return_token_ids": (False,),
    "return_token_strs": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "speed": ("standard",),
    "suffix": ("",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
}
_MAX_NEUTRAL_BYTES: Final = 64
_PATH: Final = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
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

    Escaped quotes are removed first, so that every second piece between quotes is outside of strings. Commas
    and openings are not counted when there are too many strings.
    """
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    quotes = plain.count(b'"')
    if quotes > 2 * _MAX_STRINGS:
        return (quotes + 1) // 2, 0, 0
    outside = b"".join(plain.split(b'"')[::2])
    return quotes // 2, outside.count(b"{") + outside.count(b"["), outside.count(b",")


def parse_body(
    data: bytes, kind: type[Body], *, waived: Callable[[Body], Collection[str]] = lambda _: ()
) -> Body:
    """Return the body of a request. Raises InvalidInput or UnsupportedFeature naming the field.

    ``waived`` returns the fields that have no effect in a body, so that they may have any value.

    Rejects what the standard library accepts: NaN and infinities, numbers out of range, duplicate keys,
    invalid UTF-8, lone surrogates, nesting beyond the parser's depth.
    """
    if len(data) > _CHEAP_BYTES:
        check_json_cost(data)
    try:
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as exc:
        raise invalid_fields(str(exc)) from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidInput("the body is not valid JSON in UTF-8") from exc
    except RecursionError:
        raise InvalidInput("the body is nested too deeply") from None
    require_neutral(body, "", waived=waived(body))
    # This pass is cheap, because the type checks bound the objects of the body.
    try:
        json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise InvalidInput("the body is not valid JSON") from None
    return body


def parse_part(data: Raw, kind: type[Body], path: str) -> Body:
    """Return a part of a body whose type decides its fields. Raises InvalidInput, UnsupportedFeature.

    ``path``: where it is.
    """
    try:
        part = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as exc:
        raise invalid_fields(str(exc), path) from exc
    except RecursionError:
        raise InvalidInput(f"{path} is nested too deeply", field=path) from None
    require_neutral(part, f"{path}.")
    return part


def left_out(kind: str, field: str) -> UnsupportedFeature:
    """Return the error for a choice of a tool that is left out of those that the model may call."""
    return UnsupportedFeature(
        f"{field}: tools of the type {kind[:64]!r} are not offered by this server, and are left out: choose "
        "another tool, or send auto",
        field=field,
    )


def require_neutral(found: Struct, path: str, *, waived: Collection[str] = ()) -> None:
    """Return if every unsupported option has a neutral value. Raises UnsupportedFeature."""
    for name in found.__struct_fields__:
        value = getattr(found, name)
        if name in waived or not isinstance(value, Raw):
            continue
        if not is_neutral(value, neutral_values(type(found), name)):
            raise UnsupportedFeature(f"{path}{name} is not offered by this server", field=path + name)


def neutral_values(kind: type[Struct], name: str) -> tuple[object, ...]:
    """Return the values of a field that is not offered which request nothing, besides null."""
    return _NEUTRAL.get(f"{kind.__name__}.{name}", _NEUTRAL.get(name, ()))


def is_neutral(value: Raw, neutral: tuple[object, ...]) -> bool:
    """Return whether a value is null or one of the neutral ones."""
    raw = bytes(value).strip()
    if raw in (b"", b"null"):
        return True
    if len(raw) > _MAX_NEUTRAL_BYTES:
        return False
    try:
        decoded = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    return any(type(decoded) is type(each) and decoded == each for each in neutral)


def _unique(pairs: list[tuple[str, Any]]) -> None:
    names = {name for name, _ in pairs}
    if len(names) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                shown = name[:64]
                raise InvalidInput(f"the body has {shown!r} twice in one object", field=shown)
            seen.add(name)


def invalid_fields(text: str, within: str = "") -> InvalidInput:
    """Return the error for fields of a request that are not as declared; ``text`` is msgspec's.

    ``within``: the path of the part that was read; empty: the body.
    """
    path = _PATH.search(text)
    field = ".".join(filter(None, (within, path[1] if path is not None else "")))
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
