"""Ends of records that the store did not take: one tenant's push out no other's."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.idempotency import records
from services.gateway.idempotency.ownership import Ending
from services.gateway.idempotency.record import KeyedRecord
from services.gateway.idempotency.records import PendingRecordEnds
from services.ports.idempotency import Hold, RecordKey
from tests.unit.gateway.idempotency.test_ownership import PORTS


def ended(tenant: str, number: int) -> KeyedRecord:
    key = RecordKey(tenant, f"{number:032x}")
    run = KeyedRecord(key, "f", PORTS, nothing, nothing, nothing)
    run.pending_end = Ending(Hold(key, "g", 1), b"", None, None, True)
    return run


def nothing(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing is run")


def test_a_tenant_with_more_than_its_share_loses_its_own_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_PENDING_ENDS", 8)
    dropped: list[KeyedRecord] = []
    endings = PendingRecordEnds(PORTS, dropped.append)
    theirs = [ended("beta", number) for number in range(4)]
    mine = [ended("acme", number) for number in range(10)]
    for run in (*theirs, *mine):
        endings.retain(run)
        endings.check_integrity()
    assert dropped == mine[:6]
    assert len(endings) == 8
