"""OpenAI's /v1/moderations: texts judged by a safety pack, which ``model`` names."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Struct

from fairway.v1 import inference_pb2
from services.core.errors import InvalidInput, UnsupportedFeature
from services.gateway.faces.openai.errors import named
from services.gateway.faces.openai.exchange import (
    JSON,
    Access,
    ApiEndpoint,
    BodyReader,
    Exchange,
    HttpLimits,
    unless_disconnected,
)
from services.gateway.faces.openai.types import Unserved, parse_body
from services.gateway.safety.moderation import Moderated, Moderation, Moderations

# OpenAI's own models, which SDKs name: the tenant's pack stands for them.
_OWN_MODELS: Final = ("omni-moderation", "text-moderation")
_NAMES: Final = (("inputs", "input"), ("pack", "model"))
_encode: Final = msgspec.json.Encoder().encode


class ModeratedPart(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    type: str
    text: str | None = None

    image_url: Unserved = UNSET


class ModerationsBody(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    input: str | Annotated[list[str | ModeratedPart], Meta(min_length=1, max_length=128)]
    model: str | None = None


class ModerationsFace:
    """The handler of the route."""

    def __init__(self, moderations: Moderations, limits: HttpLimits, bodies: BodyReader) -> None:
        self._moderations = moderations
        self._limits = limits
        self._bodies = bodies

    def endpoints(self) -> tuple[ApiEndpoint, ...]:
        return (
            ApiEndpoint(
                "POST",
                "/v1/moderations",
                Access.TENANT,
                self.moderations,
                "texts to judge by a safety pack; `model` names it, by default the tenant's",
                takes=(JSON,),
                body=ModerationsBody,
                headers=("x-request-timeout-s", "x-session-key"),
            ),
        )

    async def moderations(self, exchange: Exchange) -> None:
        request = await self._bodies.read(exchange, self._limits, moderations_request)
        request.session_key = exchange.headers.session_key() or ""
        call = self._moderations.moderate(
            exchange.caller, request, received=exchange.received, timeout_s=exchange.headers.timeout_s()
        )
        found = await named(_NAMES, unless_disconnected(exchange.receive, exchange.reply, call))
        await exchange.reply.json(200, moderations_answer(found))


def moderations_request(data: bytes) -> inference_pb2.ModerateRequest:
    """Return the request of a /v1/moderations body. Raises InvalidInput, UnsupportedFeature."""
    body = parse_body(data, ModerationsBody)
    model = body.model or ""
    request = inference_pb2.ModerateRequest(pack="" if model.startswith(_OWN_MODELS) else model)
    given = [body.input] if isinstance(body.input, str) else body.input
    parts = [_text(part, f"input[{at}]") for at, part in enumerate(given) if not isinstance(part, str)]
    if parts and len(parts) < len(given):
        raise InvalidInput("input mixes texts and parts of one text", field="input")
    # Parts are of one input, as in a message.
    request.inputs.extend(["\n".join(parts)] if parts else [text for text in given if isinstance(text, str)])
    return request


def _text(part: ModeratedPart, field: str) -> str:
    if part.type != "text" or part.text is None:
        raise UnsupportedFeature(f"{field} is no text, and only texts are judged", field=field)
    return part.text


def moderations_answer(found: Moderated) -> bytes:
    """Return the answer of /v1/moderations, in the order of the inputs."""
    return _encode(
        {
            "id": f"modr-{found.request_id}",
            "model": found.pack,
            "results": [_result(one) for one in found.results],
            "skipped": found.skipped,  # what judges generations alone
        }
    )


def _result(one: Moderation) -> dict[str, Any]:
    return {
        "flagged": one.flagged,
        "categories": {category.name: category.flagged for category in one.categories},
        "category_scores": {category.name: category.score for category in one.categories},
        "category_applied_input_types": {category.name: ["text"] for category in one.categories},
    }
