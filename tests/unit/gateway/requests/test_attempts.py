"""Where a sequence is placed that lost its worker."""

from __future__ import annotations

import pytest

from services.core.errors import IsolationUnavailable, NoLeader, NoWorkerAvailable, QueueTimeout
from services.core.generation import AnyGrant, PlaceSpec
from services.gateway.policy.retry import EXCLUDED_S
from services.gateway.requests.attempts import placed
from tests.unit.scheduler.model import place_spec


@pytest.mark.parametrize("error", [IsolationUnavailable, NoLeader, NoWorkerAvailable, QueueTimeout])
async def test_the_lost_worker_may_return_after_the_search_without_it(error: type[Exception]) -> None:
    """Of a dedicated tenant it may be the only node: the search without it ends with the tier's error."""
    asked: list[PlaceSpec] = []

    async def place(spec: PlaceSpec) -> AnyGrant:
        asked.append(spec)
        raise error("none")

    with pytest.raises(error):
        await placed(place, place_spec(queue_ttl_s=30.0), ("w1",))
    assert [(spec.excluded_workers, spec.queue_ttl_s) for spec in asked] == [
        (("w1",), EXCLUDED_S),
        ((), 30.0),
    ]
