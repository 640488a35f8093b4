"""The request body and the answers of the Responses API.

Fields are of the kinds of ``faces/openai/types.py``: served, hints, and those that are not offered, which are
taken at neutral values only.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from services.gateway.faces.openai.types import (
    About,
    Note,
    Schema,
    Short,
    TopK,
    UInt32,
    Unserved,
)

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponsesPart(Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """A part of an item's content; only text is offered."""

    type: str
    text: str | None = None
    refusal: str | None = None
    # Hints: what another server added to a text.
    annotations: Any = None
    logprobs: Any = None
    parsed: Any = None
    detail: Unserved = UNSET
    image_url: Unserved = UNSET
    input_audio: Unserved = UNSET
    filename: Unserved = UNSET
    file_data: Unserved = UNSET
    file_id: Unserved = UNSET
    file_url: Unserved = UNSET


class ResponsesItem(Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """An item of the input; ``type`` decides which fields it has."""

    # message, function_call, custom_tool_call, their outputs, reasoning, or a ServedPart's.
    type: str = "message"
    id: Short | None = None
    status: Short | None = None
    # Fields of a message.
    role: str | None = None
    content: str | list[ResponsesPart] | None = None
    phase: Short | None = None
    # Fields of a call and its output.
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ResponsesPart] | None = None
    # Fields of reasoning.
    summary: list[ResponsesPart] | None = None
    encrypted_content: str | None = None
    # Tool namespace of a call's function.
    namespace: str | None = None
    # What a call of a server's tool does.
    action: Any = None
    # Hints of SDKs.
    parsed_arguments: Any = None
    created_by: Any = None
    caller: Any = None


class TextFormat(Struct, forbid_unknown_fields=True, frozen=True):
    """The format json_schema has a name and a schema."""

    type: str
    name: Annotated[str, Meta(min_length=1)] | None = None
    schema: Schema | None = None
    strict: bool | None = None
    description: str | None = None


class ResponsesText(Struct, forbid_unknown_fields=True, frozen=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesReasoning(Struct, forbid_unknown_fields=True, frozen=True):
    """No summaries are made: an answer has the whole reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesTool(Struct, forbid_unknown_fields=True, frozen=True):
    """A function, a custom tool or a namespace of functions, which the client runs."""

    type: str
    name: str
    description: str | None = None
    # Fields of a function.
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    # A hint: a tool is in the prompt from the beginning.
    defer_loading: bool | None = None
    # Of a custom tool, which takes one text: what the text is to look like. The model reads it; nothing holds
    # the text to it.
    format: dict[str, Any] | None = None
    # Tools of a namespace.
    tools: list[Raw] | None = None


class ResponsesToolChoice(Struct, forbid_unknown_fields=True, frozen=True):
    """``function`` with a name, or ``allowed_tools`` with a mode."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class ResponsesStreamOptions(Struct, forbid_unknown_fields=True, frozen=True):
    include_obfuscation: Unserved = UNSET


class PromptFields(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The fields that decide the prompt."""

    model: str
    input: Annotated[
        str | list[Raw], About("A text, or a list of ResponsesItem and of calls of other servers' tools.")
    ]
    instructions: str | None = None
    previous_response_id: Short | None = None
    text: ResponsesText | None = None
    reasoning: ResponsesReasoning | None = None
    tools: Annotated[list[Raw] | None, About("ResponsesTool, or a search that a server runs.")] = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Unserved = UNSET
    conversation: Unserved = UNSET
    prompt: Unserved = UNSET
    context_management: Unserved = UNSET


class ResponsesBody(PromptFields, forbid_unknown_fields=True, frozen=True, kw_only=True):
    store: Annotated[bool | None, About("Absent: true.")] = None
    background: Annotated[bool | None, About("Run without a client; needs store.")] = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: UInt32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: Note | None = None
    client_metadata: Note | None = None
    user: Annotated[str | None, About("Beyond 128 bytes its SHA-256 counts.")] = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Note | None = None
    prompt_cache_retention: Short | None = None
    max_tool_calls: Annotated[UInt32 | None, About("Of tools that a server runs: without effect.")] = None
    include: list[str] | None = None

    # This server's own, as in chat completions.
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: TopK | None = None
    min_p: float | None = None
    min_tokens: UInt32 | None = None
    ignore_eos: bool | None = None
    priority: Literal["batch", "standard", "interactive"] | None = None

    top_logprobs: Unserved = UNSET
    moderation: Unserved = UNSET
    access_programs: Unserved = UNSET
    image: Unserved = UNSET


class OutputText(Struct, frozen=True, tag="output_text", tag_field="type"):
    text: str
    annotations: list[str] = []
    logprobs: list[str] = []


class OutputRefusal(Struct, frozen=True, tag="refusal", tag_field="type"):
    refusal: str


class ReasoningPart(Struct, frozen=True, tag="reasoning_text", tag_field="type"):
    text: str


class MessageItem(Struct, frozen=True, tag="message", tag_field="type"):
    id: str
    status: str
    content: list[OutputText | OutputRefusal]
    role: str = "assistant"


class ReasoningItem(Struct, frozen=True, tag="reasoning", tag_field="type"):
    id: str
    status: str
    content: list[ReasoningPart]
    summary: list[str] = []


class FunctionCallItem(Struct, frozen=True, tag="function_call", tag_field="type"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomCallItem(Struct, frozen=True, tag="custom_tool_call", tag_field="type"):
    id: str
    status: str
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int


class OutputTokensDetails(Struct, frozen=True):
    """``reasoning_tokens``: to the end of the reasoning, its mark included; absent where several tokens spell
    the mark."""

    reasoning_tokens: int | UnsetType = UNSET


class ResponsesUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponsesFailure(Struct, frozen=True):
    """``code``: the reason, in lower case, as docs/reference/errors.md lists it."""

    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: str


class ModelResponse(Struct, frozen=True, kw_only=True):
    """A response, with the fields of its request that clients expect in it."""

    id: str
    object: str = "response"
    # Seconds of Unix time.
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool
    error: ResponsesFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: Raw
    service_tier: str
    # Whether it can be retrieved: false also where it was to be stored and could not be.
    store: bool
    temperature: float | None = None
    text: Raw
    tool_choice: Raw
    tools: Raw
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None = None


class DeletedResponse(Struct, frozen=True):
    id: str
    deleted: bool = True
    object: str = "response"


class InputItems(Struct, frozen=True):
    data: list[Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class InputTokens(Struct, frozen=True):
    input_tokens: int
    object: str = "response.input_tokens"
