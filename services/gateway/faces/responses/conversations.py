"""Stored responses as a caller may read them, and the conversations that they form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec
from msgspec import UNSET, Raw, structs

from services.core.errors import InvalidInput, NotFound
from services.core.generation import Principal
from services.gateway.faces.responses.background import response_of
from services.gateway.faces.responses.types import ModelResponse, ResponsesItem
from services.gateway.responses.store import ResponseStore, StoredResponse
from services.gateway.service import ServedModel

# Responses that one conversation goes back.
MAX_CHAIN: Final = 128
_MAX_ID: Final = 128
_GOES_ON: Final = ("completed", "incomplete")
_encode: Final = msgspec.json.Encoder().encode


class ModelNames(Protocol):
    async def list_models(self, principal: Principal) -> Sequence[ServedModel]:
        """Return the models that the caller may use, by name."""


class Conversations:
    """What a key may read: the responses of its tenant, of models that the key may use."""

    def __init__(self, models: ModelNames, store: ResponseStore, max_bytes: int) -> None:
        """``max_bytes`` bounds the items that one request continues."""
        self._models = models
        self._store = store
        self._max_bytes = max_bytes

    async def find(
        self, principal: Principal, response_id: str, field: str = "response_id"
    ) -> StoredResponse:
        """Return a stored response. Raises NotFound naming the field."""
        found = None
        if len(response_id) <= _MAX_ID:
            found = await self._store.find(principal.tenant_id, response_id)
        if found is not None and principal.models and found.begun.model not in principal.models:
            served = await self._models.list_models(principal)
            if not any(found.begun.model == each.name for each in served):
                found = None
        if found is None:
            shown = response_id[:_MAX_ID]
            raise NotFound(
                f"{field}: no response {shown!r} is stored; it may have been deleted or have expired",
                field=field,
            )
        return found

    async def earlier(self, principal: Principal, previous_id: str | None) -> bytes:
        """Return the items before a request, as JSON: a list of items of each response, oldest first.

        Raises NotFound, InvalidInput.
        """
        parts: list[bytes] = []
        size, count = 0, 0
        while previous_id:
            count += 1
            if count > MAX_CHAIN:
                raise _too_long(f"more than {MAX_CHAIN} responses")
            stored = await self.find(principal, previous_id, "previous_response_id")
            if stored.answer is None or response_of(stored.answer.response).status not in _GOES_ON:
                raise InvalidInput(
                    f"previous_response_id: the response {previous_id[:_MAX_ID]!r} has no complete answer",
                    field="previous_response_id",
                )
            size += stored.size_bytes
            if size > self._max_bytes:
                raise _too_long(f"more than {self._max_bytes} bytes")
            parts += [stored.answer.output, stored.begun.items]
            previous_id = stored.begun.previous_id
        return b"[" + b",".join(reversed(parts)) + b"]"


def stored_items(request_id: str, items: Sequence[ResponsesItem]) -> bytes:
    """Return input items as they are stored and listed: each with an id, and content in parts."""
    found = []
    for number, item in enumerate(items):
        shown: dict[str, Any] = {"type": item.type, "id": item.id or f"item_{request_id}_{number}"}
        for name, value in structs.asdict(item).items():
            if value is not None and value is not UNSET and not isinstance(value, Raw):
                shown.setdefault(name, value)
        if isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            shown["content"] = [{"type": kind, "text": item.content}]
        shown.setdefault("status", "completed")
        found.append(shown)
    return _encode(found)


def current(stored: StoredResponse) -> ModelResponse:
    """Return a response as it is now."""
    if stored.answer is not None:
        return response_of(stored.answer.response)
    return structs.replace(response_of(stored.begun.response), status="in_progress")


def _too_long(what: str) -> InvalidInput:
    return InvalidInput(
        f"previous_response_id: the conversation has {what}; begin a new one with its items as input",
        field="previous_response_id",
    )
