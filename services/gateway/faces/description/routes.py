"""The route of the OpenAPI document, which describes every route, itself among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from services.gateway.faces.description.document import document_of
from services.gateway.faces.openai.endpoint import Access, ApiEndpoint, Exchange
from services.runtime.process.product import product_version


def with_description(endpoints: Sequence[ApiEndpoint], headers: Mapping[str, str]) -> tuple[ApiEndpoint, ...]:
    """Return the endpoints and that of their document. It is built once."""
    data = b""

    async def answer(exchange: Exchange) -> None:
        await exchange.reply.json(200, data)

    own = ApiEndpoint(
        "GET", "/openapi.json", Access.TENANT, answer, "no body; the OpenAPI document of this API"
    )
    described = (*endpoints, own)
    data = msgspec.json.encode(document_of(described, headers, version=product_version()))
    return described
