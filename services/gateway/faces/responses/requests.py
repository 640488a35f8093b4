"""Converts the Responses dialect to a request of chat completions, whose translation and checks it shares."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Raw, structs

from fairway.v1 import inference_pb2
from services.core.errors import InvalidInput, UnsupportedFeature
from services.gateway.faces.openai.requests import chat_of
from services.gateway.faces.openai.types import (
    ChatBody,
    ChatTurn,
    JsonSchemaFormat,
    ResponseFormat,
    parse_body,
    require_neutral,
)
from services.gateway.faces.responses.items import items_of, turns_of
from services.gateway.faces.responses.tools import tool_fields
from services.gateway.faces.responses.types import (
    ModelResponse,
    PromptFields,
    ResponsesBody,
    ResponsesItem,
    TextFormat,
)
from services.gateway.requests.tool_use import MAX_SCHEMA_DEPTH, depth_of

# Parts of an answer that only tools of a server have, or that the answer has in clear.
_INCLUDED: Final = (
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
)
_encode: Final = msgspec.json.Encoder().encode
_items: Final = msgspec.json.Decoder(list[list[ResponsesItem]]).decode


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request whose conversation is complete.

    ``head``: the response as it begins, without id, time and served model. ``items``: its own input items.
    """

    generation: inference_pb2.Generation
    head: ModelResponse
    items: tuple[ResponsesItem, ...]

    def digest(self) -> bytes:
        """Return a hash of everything that a repetition under the same idempotency key must have too."""
        generation = inference_pb2.Generation()
        generation.CopyFrom(self.generation)
        generation.ClearField("idempotency_key")
        found = hashlib.sha256(generation.SerializeToString(deterministic=True))
        found.update(_encode((self.head, self.items)))
        return found.digest()


def responses_body(data: bytes) -> ResponsesBody:
    """Return a body of /v1/responses. Raises InvalidInput, UnsupportedFeature."""
    body = parse_body(data, ResponsesBody)
    if body.stream_options is not None:
        require_neutral(body.stream_options, "stream_options.")
    for number, included in enumerate(body.include or ()):
        if included not in _INCLUDED:
            raise UnsupportedFeature(
                f"include: {included[:64]!r} is not offered by this server", field=f"include[{number}]"
            )
    if depth_of(body.metadata) > MAX_SCHEMA_DEPTH:  # every answer repeats it
        raise InvalidInput(
            f"metadata is nested more than {MAX_SCHEMA_DEPTH} levels deep: send it as a text",
            field="metadata",
        )
    if body.background and body.store is False:
        raise InvalidInput("background needs store: its answer is retrieved", field="background")
    return body


def responses_request(body: ResponsesBody, earlier: bytes) -> ResponsesRequest:
    """Return the request. ``earlier``: JSON of the lists of items that it continues.

    Raises InvalidInput, UnsupportedFeature.
    """
    items = items_of(body.input)
    own = structs.replace(
        _chat(body, items, earlier),
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        user=body.user,
        safety_identifier=body.safety_identifier,
        service_tier=body.service_tier,
        seed=body.seed,
        stop=body.stop,
        top_k=body.top_k,
        min_p=body.min_p,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        priority=body.priority,
    )
    return ResponsesRequest(chat_of(own).generations[0], _head(body), tuple(items))


def prompt_fields(data: bytes) -> PromptFields:
    """Return a body of /v1/responses/input_tokens. Raises InvalidInput, UnsupportedFeature."""
    return parse_body(data, PromptFields)


def tokens_request(body: PromptFields, earlier: bytes) -> inference_pb2.CountTokensRequest:
    """Return the request that counts the tokens of a prompt. ``earlier`` as in ``responses_request``."""
    generation = chat_of(_chat(body, items_of(body.input), earlier)).generations[0]
    return inference_pb2.CountTokensRequest(model=generation.model, chat=generation.chat)


def _chat(body: PromptFields, own: Sequence[ResponsesItem], earlier: bytes) -> ChatBody:
    if not own:
        raise InvalidInput("input is empty", field="input")
    turns: list[ChatTurn] = []
    if body.instructions:
        turns.append(ChatTurn("system", body.instructions))
    before = [item for items in _items(earlier) for item in items]
    # Together, so that a call and what goes with it are one turn; the paths are those of the own items.
    turns += turns_of(before, "previous_response_id") + turns_of(own, "input")
    found = tool_fields(body)
    if body.text is not None and body.text.format is not None:
        found["response_format"] = _format(body.text.format)
    if body.reasoning is not None:
        found["reasoning_effort"] = body.reasoning.effort
    kwargs = body.chat_template_kwargs
    return ChatBody(model=body.model, messages=turns, chat_template_kwargs=kwargs, **found)


def _format(requested: TextFormat) -> ResponseFormat:
    if requested.type != "json_schema":
        return ResponseFormat(requested.type)
    if requested.schema is None or requested.name is None:
        missing = "text.format.name" if requested.name is None else "text.format.schema"
        raise InvalidInput(f"{missing} is required", field=missing)
    return ResponseFormat("json_schema", JsonSchemaFormat(requested.name, requested.schema, requested.strict))


def _head(body: ResponsesBody) -> ModelResponse:
    """Return the response as it begins. Its id, time and served model are set when they are decided."""
    requested = body.text.format if body.text is not None else None
    text: dict[str, Any] = {"format": requested if requested is not None else {"type": "text"}}
    if body.text is not None and body.text.verbosity is not None:
        text["verbosity"] = body.text.verbosity
    reasoning = {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None}
    return ModelResponse(
        id="",
        created_at=0,
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=body.model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=Raw(_encode(reasoning)),
        service_tier=body.service_tier if body.service_tier not in (None, "auto") else "default",
        store=body.store is not False,
        temperature=body.temperature,
        text=Raw(_encode(text)),
        tool_choice=Raw(_encode(body.tool_choice if body.tool_choice is not None else "auto")),
        tools=Raw(_encode(body.tools or [])),
        top_p=body.top_p,
        user=body.user,
    )
