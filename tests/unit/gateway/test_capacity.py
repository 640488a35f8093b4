"""No tenant takes more than its share of a gateway, and all tenants together no more than the whole."""

from __future__ import annotations

from services.core.errors import QueueFull, ShareExceeded
from services.gateway.service_types import RequestCapacity


def test_a_tenant_is_rejected_at_its_share_and_all_at_the_whole() -> None:
    capacity = RequestCapacity(3, 2)
    for tenant in ("a", "a", "b"):
        assert capacity.refusal(tenant) is None
        capacity.enter(tenant)
    assert isinstance(capacity.refusal("a"), ShareExceeded)
    assert isinstance(capacity.refusal("c"), QueueFull)
    capacity.leave("a")
    assert capacity.refusal("a") is None
    assert capacity.refusal("c") is None
