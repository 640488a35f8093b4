"""Ends of records that the store did not take: one tenant's push out no other's."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.idempotency import record_writer
from services.gateway.idempotency.record_writer import PendingRecordEnds
from services.gateway.idempotency.run import KeyedRun
from services.gateway.idempotency.types import Ending
from services.ports.idempotency import Hold, RecordKey
from tests.unit.gateway.idempotency.test_ownership import PORTS


def ended(tenant: str, number: int) -> KeyedRun:
    key = RecordKey(tenant, f"{number:032x}")
    run = KeyedRun(key, "f", PORTS, cast_launch, lambda follower: None)
    run.pending_end = Ending(Hold(key, "g", 1), b"", None, None, True)
    return run


def cast_launch(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing is run")


def test_a_tenant_with_more_than_its_share_loses_its_own_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_writer, "MAX_PENDING_ENDS", 8)
    dropped: list[KeyedRun] = []
    endings = PendingRecordEnds(PORTS, dropped.append)
    theirs = [ended("beta", number) for number in range(4)]
    mine = [ended("acme", number) for number in range(10)]
    for run in (*theirs, *mine):
        endings.retain(run)
        endings.check_integrity()
    assert dropped == mine[:6]
    assert len(endings) == 8
