"""While an engine loads, its version's message is the step that the engine reports."""

from __future__ import annotations

from typing import Any, cast

from services.core.records import AssignedVersion
from services.ports.clock import Clock
from services.worker.engine_protocol import Progress
from services.worker.memory_ledger import MemoryLedger
from services.worker.policy.lifecycle import VersionPhase
from services.worker.slots.engine_settings import EngineSettings
from services.worker.slots.version_engine import SlotContext
from services.worker.slots.version_slot import VersionSlot
from services.worker.telemetry import WorkerTelemetry
from tests.support.clocks import HandClock


def test_each_step_is_reported_once() -> None:
    woken: list[str] = []
    clock: Clock = HandClock()
    nothing = cast(Any, None)
    context = SlotContext(
        EngineSettings(),
        nothing,
        MemoryLedger(2**30),
        lambda _version: nothing,
        nothing,
        clock,
        nothing,
        lambda: woken.append(slot.message),
        WorkerTelemetry(clock=clock),
    )
    slot = VersionSlot(AssignedVersion("chat", "chat", "sha256:" + "0" * 64), context)
    slot.engine_progress(Progress("operators", 0.0))
    assert slot.message == "", "it does not load yet"
    slot.phase = VersionPhase.LOADING
    woken.clear()
    slot.engine_progress(Progress("operators", 0.0))
    slot.engine_progress(Progress("operators", 0.001))
    assert woken == ["preparing operators, compiled once per machine"]
    slot.engine_progress(Progress("weights", 0.0))
    slot.restarting = True
    slot.engine_progress(Progress("warm_up", 0.0))
    assert slot.message == "loading weights", "after a restart the message stays"
