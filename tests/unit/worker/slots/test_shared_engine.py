"""Versions of one computation share an engine: one process, one grant of memory, ends of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import Tokenizer

from services.core.errors import FailedPrecondition
from services.core.generation import FinishReason, NotAdmittedReason, StartSpec
from services.core.poison.suspicion import LossCause
from services.core.records import AssignedVersion
from services.runtime.supervisor import Supervisor
from services.worker import engine_protocol as wire
from services.worker.agent.report import WorkerIdentity, record_of, take_snapshot
from services.worker.detokenizer import ByteLevelVocabulary, Vocabulary
from services.worker.memory_ledger import MemoryLedger
from services.worker.policy.lifecycle import VersionPhase
from services.worker.slots.engine_process import Crashed, EngineEvents, Stopped
from services.worker.slots.engine_settings import EngineSettings
from services.worker.slots.version_engine import SlotContext
from services.worker.slots.version_files import weight_bytes
from services.worker.slots.version_slot import VersionSlot
from services.worker.streams.charges import DeviceKind, DeviceTime
from services.worker.streams.host import SequenceHost
from services.worker.telemetry import WorkerTelemetry
from tests.support.clocks import HandClock
from tests.support.kept_usage import KeptUsage
from tests.support.model_folder import write_sparse
from tests.support.waiting import until
from tests.unit.worker.bench import Bench
from tests.unit.worker.reader import Reader

FIRST, SECOND, THIRD = ("sha256:" + letter * 64 for letter in "123")
MIB: Final = 1 << 20
WEIGHTS, BLOCK, BLOCKS = 40 * MIB, MIB // 4, 64
READY: Final = wire.Ready(
    BLOCKS, 16, 160, 512, BLOCK, WEIGHTS, working_bytes=8 * MIB, capabilities=frozenset({"resize"})
)


class ScriptedEngine:
    """Implements ``RunningEngine``: ready and ended when the test says so."""

    def __init__(self, config: wire.EngineConfig, events: EngineEvents) -> None:
        self.config, self.events = config, events
        self.sent: list[wire.Command] = []
        self.ended = False
        self.pid = 7
        self.silent_s = 0.0
        self.members: tuple[int, ...] = ()

    async def start(self) -> None: ...

    def send(self, command: wire.Command) -> bool:
        self.sent.append(command)
        return True

    def kill(self, reason: str) -> None: ...

    def crash(self, *members: int) -> None:
        self.ended = True
        self.events.on_exit(Crashed(-11, "it crashed", LossCause.FAULT, members))

    async def stop(self) -> None:
        if not self.ended:
            self.ended = True
            self.events.on_exit(Stopped())


class Files:
    """Implements ``LocalFiles``."""

    template_fault = ""

    def __init__(
        self, folder: Path, computation: str, vocabulary: Vocabulary, adapter_bytes: int = 0
    ) -> None:
        self._adapter_bytes = adapter_bytes
        self.folder: Path | None = folder
        self.error: FailedPrecondition | None = None
        self.stated = {"config.json": "same"}  # what it computes with but its weights
        self._computation, self._vocabulary = computation, vocabulary

    async def fetch(self, progress: Callable[[float], None], *, spare: bool = False) -> None: ...

    async def checked(self, progress: Callable[[float], None]) -> None: ...

    def lost(self) -> bool:
        return False

    def unpin(self) -> None: ...

    async def kind(self) -> str:
        return "causal-lm"

    async def computation(self, folder: Path) -> str:
        return self._computation

    async def parts(self, folder: Path) -> dict[str, str]:
        return self.stated

    async def vocabulary(self, folder: Path) -> Vocabulary:
        return self._vocabulary

    async def weight_bytes(self, folder: Path, bytes_per_value: int) -> int:
        return await asyncio.to_thread(weight_bytes, folder, bytes_per_value)

    async def adapter_bytes(self, folder: Path, bytes_per_value: int) -> int:
        return self._adapter_bytes

    async def limited(self, config: wire.EngineConfig, folder: Path) -> wire.EngineConfig:
        if self.error is not None:
            raise self.error
        return config


@dataclass
class Rig:
    """Slots over scripted engines."""

    byte_level: Tokenizer
    folder: Path
    computations: dict[str, str] = field(default_factory=lambda: dict.fromkeys((FIRST, SECOND), "same"))
    adapters: dict[str, int] = field(default_factory=dict)  # sizes by version
    engines: list[ScriptedEngine] = field(default_factory=list)
    usage: KeptUsage = field(default_factory=KeptUsage)
    clock: HandClock = field(default_factory=HandClock)
    ledger: MemoryLedger = field(default_factory=lambda: MemoryLedger(300 * MIB))

    def __post_init__(self) -> None:
        device = DeviceTime(DeviceKind("w1"), self.usage, self.clock)
        self.host = SequenceHost(changed=lambda: None, device=device)
        self.host.grants.registered(5)
        self.supervisor = Supervisor(self.clock)
        settings = EngineSettings(kv_memory_bytes=32 * MIB)
        self.context = SlotContext(
            settings,
            self.host,
            self.ledger,
            self.files,
            self.launch,
            self.clock,
            self.supervisor,
            lambda: None,
            WorkerTelemetry(clock=self.clock),
        )

    def files(self, version: AssignedVersion) -> Files:
        vocabulary = ByteLevelVocabulary(self.byte_level)
        digest = version.version_digest
        model = "chat" if digest in self.adapters else version.model
        computation = f"{model} {self.computations.get(digest, digest)}"
        return Files(self.folder, computation, vocabulary, self.adapters.get(digest, 0))

    def launch(self, config: wire.EngineConfig, events: EngineEvents) -> ScriptedEngine:
        self.engines.append(ScriptedEngine(config, events))
        return self.engines[-1]

    def slot(self, digest: str, *, model: str = "chat", executor: str = "torch") -> VersionSlot:
        """A version that has answered its probe on this worker."""
        slot = VersionSlot(AssignedVersion("chat", model, digest, executor), self.context)
        slot.probed = True
        return slot

    async def load(self, *slots: VersionSlot) -> None:
        for slot in slots:
            slot.load()
        await asyncio.wait({slot._task for slot in slots if slot._task is not None})

    async def ready(self, *slots: VersionSlot) -> ScriptedEngine:
        await self.load(*slots)
        engine = self.engines[-1]
        engine.events.on_ready(READY)
        assert [slot.phase for slot in slots] == [VersionPhase.READY] * len(slots)
        return engine

    def check_integrity(self) -> None:
        self.ledger.check_integrity()
        self.host.check_integrity()


@pytest.fixture
def rig(byte_level: Tokenizer, tmp_path: Path) -> Rig:
    write_sparse(tmp_path / "model.safetensors", {"w": (WEIGHTS // 4,)})
    return Rig(byte_level, tmp_path)


@pytest.fixture
def reader(rig: Rig, bench: Bench) -> Reader:
    return Reader(replace(bench, host=rig.host))


def ends(reader: Reader) -> dict[int, FinishReason]:
    reader.read()
    return {handle: end.reason for handle, end in reader.ends.items()}


def of(spec: StartSpec, digest: str) -> StartSpec:
    generation, grant = spec.generation, spec.grant
    return replace(
        spec,
        generation=replace(generation, version_digest=digest),
        grant=replace(grant, version_digest=digest),
    )


def step(engine: ScriptedEngine, tokens: dict[int, int], *, settled: Sequence[int] = ()) -> None:
    engine.events.on_stepped(
        wire.Stepped(
            step=1,
            step_s=0.02,
            handles=list(tokens),
            tokens=list(tokens.values()),
            finished={},
            prefill_tokens=0,
            kv_blocks_used=0,
            running=len(tokens),
            waiting=0,
            attended_tokens=1,
            device_us=dict.fromkeys(settled, 1000),
            settled=list(settled),
        )
    )


async def test_a_second_version_takes_no_memory_and_no_process(rig: Rig) -> None:
    first, second = rig.slot(FIRST), rig.slot(SECOND)
    await rig.ready(first)
    free_bytes = rig.ledger.free_bytes
    await rig.load(second)
    assert second.phase is VersionPhase.READY
    assert len(rig.engines) == 1
    assert rig.ledger.free_bytes == free_bytes, "the second version took memory"
    records = [record_of(slot, "chat") for slot in (first, second)]
    assert [one.weight_bytes for one in records] == [WEIGHTS, 0], "counted once"
    assert [one.spare_bytes > 0 for one in records] == [True, False]
    assert records[0].needed_bytes == records[1].needed_bytes
    assert [slot.observed().granted_bytes > 0 for slot in (first, second)] == [True, False]
    rig.check_integrity()


async def test_versions_that_load_at_once_start_one_engine(rig: Rig) -> None:
    slots = rig.slot(FIRST), rig.slot(SECOND)
    await rig.ready(*slots)
    assert len(rig.engines) == 1


@pytest.mark.parametrize(
    "other", [{"digest": THIRD}, {"digest": SECOND, "model": "other"}, {"digest": SECOND, "executor": "null"}]
)
async def test_another_computation_model_or_executor_has_its_own_engine(
    rig: Rig, other: dict[str, str]
) -> None:
    await rig.ready(rig.slot(FIRST))
    slot = rig.slot(other.pop("digest"), **other)
    await rig.load(slot)
    assert len(rig.engines) == 2
    assert slot.phase is VersionPhase.LOADING


async def test_the_report_names_what_is_shared_and_each_sequence_its_version(
    rig: Rig, bench: Bench, reader: Reader
) -> None:
    first, second = rig.slot(FIRST), rig.slot(SECOND)
    engine = await rig.ready(first, second)
    reader.stream.start(1, of(bench.spec(), FIRST))
    reader.stream.start(2, of(bench.spec(), SECOND))
    snapshot = take_snapshot(rig.host, WorkerIdentity("w1", "a:1"), whole=True)
    assert [(pool.digest, pool.engine) for pool in snapshot.pools] == [(FIRST, FIRST), (SECOND, FIRST)]
    assert [pool.kv_blocks_reserved for pool in snapshot.pools] == [4, 4], "the room is that of the engine"
    assert [one.digest for one in snapshot.live] == [FIRST, SECOND]
    step(engine, {1: 97, 2: 98})
    reader.stream.cancel([1, 2])
    step(engine, {}, settled=(1, 2))
    assert [one.version_digest for one in rig.usage.sequences] == [FIRST, SECOND]
    assert {one.digest for one in take_snapshot(rig.host, WorkerIdentity("w", "a"), whole=False).tenants} == {
        FIRST,
        SECOND,
    }
    rig.check_integrity()


async def test_the_first_leaves_and_the_second_goes_on_with_its_memory(
    rig: Rig, bench: Bench, reader: Reader
) -> None:
    first, second = rig.slot(FIRST), rig.slot(SECOND)
    engine = await rig.ready(first, second)
    reader.stream.start(1, of(bench.spec(), FIRST))
    reader.stream.start(2, of(bench.spec(), SECOND))
    free_bytes = rig.ledger.free_bytes
    first.drain()
    reader.stream.start(3, of(bench.spec(), FIRST))
    reader.stream.start(4, of(bench.spec(), SECOND))
    assert ends(reader) == {}
    assert reader.refused == {3: NotAdmittedReason.DRAINING}
    assert first.observed().running == 1
    await first.stop()
    assert first.gone
    assert not engine.ended, "the engine of the second version ended"
    assert ends(reader) == {1: FinishReason.ENGINE_LOST}
    assert rig.ledger.free_bytes == free_bytes
    assert record_of(second, "chat").weight_bytes == WEIGHTS, "it is the second's now"
    step(engine, {2: 97, 3: 98})
    rig.check_integrity()
    pools = take_snapshot(rig.host, WorkerIdentity("w1", "a:1"), whole=False).pools
    assert [(pool.digest, pool.engine) for pool in pools] == [(SECOND, FIRST)], "the engine keeps its name"
    again = rig.slot(FIRST)
    await rig.load(again)
    assert again.phase is VersionPhase.READY, "it joins what the second has"
    assert len(rig.engines) == 1
    await again.stop()
    await second.stop()
    assert engine.ended
    assert rig.ledger.free_bytes == rig.ledger.total_bytes


async def test_a_crash_counts_for_the_version_whose_sequences_ran_alone(
    rig: Rig, bench: Bench, reader: Reader
) -> None:
    first, second = rig.slot(FIRST), rig.slot(SECOND)
    engine = await rig.ready(first, second)
    reader.stream.start(1, of(bench.spec(), FIRST))
    reader.stream.start(2, of(bench.spec(), SECOND))
    engine.crash(1, 2)
    assert ends(reader) == dict.fromkeys((1, 2), FinishReason.ENGINE_LOST)
    assert [slot.restarts for slot in (first, second)] == [0, 0], "either may be at fault"
    assert [slot.phase for slot in (first, second)] == [VersionPhase.BROKEN] * 2
    assert rig.ledger.free_bytes == rig.ledger.total_bytes
    engine = await rig.ready(first)
    await rig.load(second)
    assert second.phase is VersionPhase.READY
    reader.stream.start(3, of(bench.spec(), FIRST))
    reader.stream.start(4, of(bench.spec(), SECOND))
    engine.crash(2)
    assert [slot.restarts for slot in (first, second)] == [0, 1]
    assert len(rig.engines) == 2


async def test_a_start_that_fails_or_is_given_up_keeps_nobody_waiting(rig: Rig) -> None:
    first, second = rig.slot(FIRST), rig.slot(SECOND)
    assert isinstance(first.files, Files)
    first.files.error = FailedPrecondition("no such limits")
    await rig.load(first, second)
    assert [slot.phase for slot in (first, second)] == [VersionPhase.BROKEN] * 2
    assert second.failures.reason == "ENGINE_STOPPED"
    assert rig.ledger.free_bytes == rig.ledger.total_bytes
    await rig.ready(second)
    assert rig.ledger.free_bytes < rig.ledger.total_bytes


async def test_the_starter_leaves_while_its_engine_loads(rig: Rig) -> None:
    first, second = rig.slot(FIRST), rig.slot(SECOND)
    await rig.load(first, second)
    await first.stop()
    rig.engines[0].events.on_ready(READY)
    assert second.phase is VersionPhase.READY
    held = rig.ledger.held_by(SECOND)
    assert held is not None
    assert held.weight_bytes == WEIGHTS
    await second.stop()
    assert rig.engines[0].ended


async def test_versions_of_one_engine_are_probed_once(rig: Rig) -> None:
    slots = [rig.slot(FIRST), rig.slot(SECOND)]
    for slot in slots:
        slot.probed = False
    await rig.load(*slots)
    (engine,) = rig.engines
    engine.events.on_ready(READY)
    assert [slot.phase for slot in slots] == [VersionPhase.PROBING] * 2
    assert not any(rig.host.takes(slot.digest) for slot in slots)
    for asked in [one for one in engine.sent if isinstance(one, wire.Submit)]:
        tokens, handle = asked.limits.max_tokens, asked.handle
        ended = wire.Stepped(1, 0.0, [handle] * tokens, [1] * tokens, {handle: "length"}, 0, 0, 0, 0)
        engine.events.on_stepped(ended)
    assert [slot.phase for slot in slots] == [VersionPhase.READY] * 2
    assert all(rig.host.takes(slot.digest) and slot.probed for slot in slots)
    await rig.supervisor.close()
    rig.check_integrity()


async def test_a_crash_during_the_probe_fails_every_version_of_the_engine(rig: Rig) -> None:
    slots = [rig.slot(FIRST), rig.slot(SECOND)]
    for slot in slots:
        slot.probed = False
    await rig.load(*slots)
    (engine,) = rig.engines
    engine.events.on_ready(READY)
    engine.crash()
    assert [(slot.phase, slot.failures.reason) for slot in slots] == [
        (VersionPhase.BROKEN, "PROBE_CRASHED")
    ] * 2
    assert [slot.restarts for slot in slots] == [0, 0]
    await rig.supervisor.close()
    rig.check_integrity()


ADAPTER_BYTES = 3 * MIB


def commands(engine: ScriptedEngine, kind: type[wire.Command]) -> list[Any]:
    return [command for command in engine.sent if isinstance(command, kind)]


async def test_adapters_of_any_model_join_the_engine_of_their_base(
    rig: Rig, bench: Bench, reader: Reader
) -> None:
    rig.adapters = dict.fromkeys((SECOND, THIRD), ADAPTER_BYTES)
    rig.computations[THIRD] = "same"
    base, one, other = rig.slot(FIRST), rig.slot(SECOND, model="mine"), rig.slot(THIRD, model="yours")
    engine = await rig.ready(base)
    free = rig.ledger.free_bytes
    await rig.load(one, other)
    assert len(rig.engines) == 1
    assert rig.ledger.free_bytes == free - 2 * ADAPTER_BYTES
    loads = commands(engine, wire.LoadAdapter)
    assert [load.adapter for load in loads] == [1, 2]
    assert not rig.host.takes(SECOND)
    engine.events.on_adapter(wire.AdapterLoaded(2, ADAPTER_BYTES))
    assert (one.phase, other.phase) == (VersionPhase.LOADING, VersionPhase.READY)
    engine.events.on_adapter(wire.AdapterLoaded(1, ADAPTER_BYTES))
    assert one.phase is VersionPhase.READY
    for number, digest in enumerate((FIRST, SECOND, THIRD), 1):
        reader.stream.start(number, of(bench.spec(), digest))
    assert [submit.adapter for submit in commands(engine, wire.Submit)] == [0, 1, 2]
    await one.stop()
    assert commands(engine, wire.DropAdapter) == [wire.DropAdapter(1)]
    assert isinstance(engine.sent[-1], wire.DropAdapter)  # after the cancel of its sequences
    assert rig.ledger.free_bytes == free - ADAPTER_BYTES
    again = rig.slot(SECOND)
    await rig.load(again)
    assert commands(engine, wire.LoadAdapter)[-1].adapter == 3
    rig.check_integrity()


async def test_a_refused_adapter_breaks_its_version_alone(rig: Rig) -> None:
    rig.adapters = {SECOND: ADAPTER_BYTES, THIRD: 1000 * MIB}
    rig.computations[THIRD] = "same"
    base, refused, large = (rig.slot(digest) for digest in (FIRST, SECOND, THIRD))
    engine = await rig.ready(base)
    free = rig.ledger.free_bytes
    await rig.load(refused, large)
    engine.events.on_adapter(wire.AdapterRefused(1, "its r is 0"))
    for slot, reason, message in (
        (refused, "ADAPTER_REFUSED", "its r is 0"),
        (large, "DOES_NOT_FIT", "do not fit"),
    ):
        assert (slot.phase, slot.failures.reason) == (VersionPhase.BROKEN, reason)
        assert message in slot.message
    assert refused.observed().needed_bytes == 0
    assert large.observed().needed_bytes == 1000 * MIB  # its base runs, so only the adapter needs memory
    assert base.phase is VersionPhase.READY
    await until(lambda: rig.ledger.free_bytes == free)
    assert not engine.ended


async def test_an_adapter_that_the_engine_has_no_memory_for_is_tried_again_after_a_pause(rig: Rig) -> None:
    rig.adapters = {SECOND: ADAPTER_BYTES}
    base, adapter = rig.slot(FIRST), rig.slot(SECOND)
    engine = await rig.ready(base)
    await rig.load(adapter)
    engine.events.on_adapter(wire.AdapterRefused(1, "there is no memory for it", "does_not_fit"))
    seen = adapter.observed()
    assert (adapter.failures.reason, seen.needed_bytes, seen.final) == ("DOES_NOT_FIT", 0, False)
    assert seen.retry_at_s > rig.clock.monotonic_s()
    await rig.load(adapter)
    engine.events.on_adapter(wire.AdapterLoaded(2, ADAPTER_BYTES))
    assert (adapter.phase, adapter.observed().needed_bytes) == (VersionPhase.READY, 0)


async def test_an_engine_that_an_adapter_starts_leaves_room_for_it(rig: Rig) -> None:
    rig.ledger = MemoryLedger(100 * MIB)  # a pool as large as wished would leave none
    rig.context = replace(rig.context, ledger=rig.ledger)
    rig.adapters = {FIRST: 20 * MIB}
    slot = rig.slot(FIRST)
    await rig.load(slot)
    engine = rig.engines[0]
    assert rig.ledger.free_bytes + engine.config.memory_bytes <= 80 * MIB
    engine.events.on_ready(READY)
    assert commands(engine, wire.LoadAdapter)
    rig.adapters = {SECOND: 100 * MIB}
    await slot.stop()
    whole = rig.slot(SECOND)
    await rig.load(whole)
    assert whole.failures.reason == "DOES_NOT_FIT"
    assert whole.observed().needed_bytes > rig.ledger.total_bytes


async def test_an_adapter_without_a_deployed_base_starts_its_engine_and_a_crash_brings_all_back(
    rig: Rig,
) -> None:
    rig.adapters = {FIRST: ADAPTER_BYTES, SECOND: ADAPTER_BYTES}
    one, other = rig.slot(FIRST), rig.slot(SECOND)
    await rig.load(one, other)
    for number in range(2):
        engine = rig.engines[number]
        engine.events.on_ready(READY)
        assert rig.host.table(FIRST) is None
        for load in commands(engine, wire.LoadAdapter):
            engine.events.on_adapter(wire.AdapterLoaded(load.adapter, ADAPTER_BYTES))
        assert (one.phase, other.phase) == (VersionPhase.READY, VersionPhase.READY)
        assert len(rig.engines) == number + 1
        if not number:
            engine.crash()
            assert one.phase is VersionPhase.BROKEN
            await rig.load(one, other)
    rig.check_integrity()


async def test_a_refused_adapter_that_was_alone_ends_the_engine(rig: Rig) -> None:
    rig.adapters = {FIRST: ADAPTER_BYTES}
    slot = rig.slot(FIRST)
    await rig.load(slot)
    engine = rig.engines[0]
    engine.events.on_ready(READY)
    engine.events.on_adapter(wire.AdapterRefused(1, "no"))
    await until(lambda: engine.ended)
    assert slot.phase is VersionPhase.BROKEN
    assert slot.failures.reason == "ADAPTER_REFUSED"
    await slot.stop()
    assert rig.ledger.free_bytes == rig.ledger.total_bytes
