"""The request body and the answers of the Anthropic Messages API.

Fields are of the kinds of ``faces/openai/types.py``: served, hints, and those that are not offered, which are
taken at neutral values only.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from services.gateway.faces.openai.types import About, CacheControl, Schema, Short, UInt32, Unserved


class MessagesPart(Struct, forbid_unknown_fields=True, frozen=True):
    """A block of a message; ``type`` decides which fields it has."""

    # text, thinking, redacted_thinking, tool_use, tool_result or, within one, tool_reference.
    type: str
    text: str | None = None
    thinking: str | None = None
    # Signature of thinking, which has no effect.
    signature: str | None = None
    data: str | None = None
    # Fields of tool_use.
    id: str | None = None
    name: str | None = None
    input: Any = None
    # Fields of tool_result.
    tool_use_id: str | None = None
    content: str | list[MessagesPart] | None = None
    # Stated in the text of the result.
    is_error: bool | None = None
    # A tool that a search of the client's found, in a tool_reference.
    tool_name: str | None = None
    cache_control: CacheControl | None = None
    # A hint: the sources of a text that another server's search found.
    citations: Any = None
    # Fields of a document or a search_result, which is refused by its source.
    title: Any = None
    context: Any = None
    caller: Any = None
    source: Unserved = UNSET


class MessagesTurn(Struct, forbid_unknown_fields=True, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        str | list[Raw], About("A text, or a list of MessagesPart and of another server's tools' blocks.")
    ]


class MessagesMetadata(Struct, frozen=True):
    user_id: str | None = None


class MessagesTool(Struct, forbid_unknown_fields=True, frozen=True):
    """A function that the model may call; a server's tool, by its ``type``, is not offered."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    # A hint: a tool is in the prompt from the beginning.
    defer_loading: bool | None = None
    allowed_callers: Unserved = UNSET
    input_examples: Unserved = UNSET
    eager_input_streaming: bool | None = None


class MessagesToolChoice(Struct, forbid_unknown_fields=True, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, forbid_unknown_fields=True, frozen=True):
    """``enabled`` and ``adaptive`` set enable_thinking in the chat template, ``disabled`` unsets it."""

    type: Literal["enabled", "disabled", "adaptive"]
    # A hint: max_tokens bounds thinking and answer together.
    budget_tokens: UInt32 | None = None
    display: Literal["summarized", "omitted"] | None = None


class MessagesThread(Struct, forbid_unknown_fields=True, frozen=True):
    """A conversation that the server is to hold: ``continue`` finds none, and clients send all messages."""

    type: Literal["create", "continue"]
    previous_message_id: Short | None = None


class MessagesFormat(Struct, forbid_unknown_fields=True, frozen=True):
    type: Literal["json_schema"]
    schema: Schema


class OutputConfig(Struct, forbid_unknown_fields=True, frozen=True):
    format: MessagesFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    task_budget: Unserved = UNSET


class ContextEdit(Struct, frozen=True):
    """What is to be taken out of the conversation. ``keep`` of thinking that is ``all`` takes nothing."""

    type: str
    keep: Any = None


class ContextManagement(Struct, forbid_unknown_fields=True, frozen=True):
    edits: list[ContextEdit] = []


class CountBody(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The fields that decide the prompt."""

    model: str
    messages: list[MessagesTurn]
    system: str | list[MessagesPart] | None = None
    tools: Annotated[list[Raw] | None, About("MessagesTool, or a search that a server runs.")] = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    mcp_servers: Unserved = UNSET


class MessagesBody(CountBody, forbid_unknown_fields=True, frozen=True, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=0xFFFF_FFFF)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: UInt32 | None = None
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    thread: MessagesThread | None = None
    container: Unserved = UNSET
    inference_geo: Unserved = UNSET
    speed: Unserved = UNSET


class MessagesUsage(Struct, frozen=True):
    """``input_tokens`` excludes the tokens that were read from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class TextBlock(Struct, frozen=True, tag="text", tag_field="type"):
    text: str


class ThinkingBlock(Struct, frozen=True, tag="thinking", tag_field="type"):
    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, frozen=True, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: Raw


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Message(Struct, frozen=True, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class TokensCount(Struct, frozen=True):
    input_tokens: int


class MessagesErrorDetails(Struct, frozen=True):
    """``error_code`` is the reason, in lower case, as docs/reference/errors.md lists it."""

    error_code: str
    param: str | UnsetType = UNSET


class MessagesErrorDetail(Struct, frozen=True):
    type: str
    message: str
    details: MessagesErrorDetails


class MessagesErrorBody(Struct, frozen=True):
    error: MessagesErrorDetail
    type: str = "error"
