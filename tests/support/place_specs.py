"""A placement as a gateway requests it; a test changes fields by ``replace``."""

from __future__ import annotations

from typing import Final

from services.core.generation import PlaceSpec
from services.core.records import Priority

PLACE_SPEC: Final = PlaceSpec(
    request_id="req_1",
    choice=0,
    tenant_id="acme",
    priority=Priority.STANDARD,
    model="tiny",
    version_digest="d",
    route_revision=1,
    prompt_tokens=40,
    max_output_tokens=100,
    arrival_unix_us=1,
    queue_ttl_s=5.0,
    ticket=b"t",
)
