"""A version takes over the engine of the one before: what is admitted, returned and refused meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from services.core.errors import FailedPrecondition
from services.core.generation import FinishReason, NotAdmittedReason, StartSpec
from services.core.records import AssignedVersion, InPlace
from services.core.rollouts.routes import Withdrawal
from services.worker import engine_protocol as wire
from services.worker.agent.report import WorkerIdentity, record_of, take_snapshot
from services.worker.policy.lifecycle import VersionPhase
from services.worker.policy.replacement import obstacle
from services.worker.slots.engine_process import Crashed
from services.worker.slots.version_slot import VersionSlot
from tests.support.waiting import until
from tests.unit.worker.bench import Bench
from tests.unit.worker.reader import Reader
from tests.unit.worker.slots.test_shared_engine import (
    FIRST,
    MIB,
    SECOND,
    THIRD,
    Files,
    Rig,
    ScriptedEngine,
    ends,
    of,
    reader,
    rig,
    step,
)

__all__ = ["reader", "rig"]  # fixtures
LONG_S = 1e9  # more than the clock of these tests comes to
REVISION = 8


def successor(rig: Rig, digest: str = THIRD, *, finish_s: float = LONG_S) -> VersionSlot:
    version = AssignedVersion("chat", "chat", digest, in_place=InPlace(finish_s, REVISION))
    slot = VersionSlot(version, rig.context)
    slot.probed = True
    return slot


def sent(engine: ScriptedEngine) -> bool:
    return any(isinstance(one, wire.ReplaceWeights) for one in engine.sent)


async def began(rig: Rig, engine: ScriptedEngine, slot: VersionSlot) -> None:
    slot.load()
    await until(lambda: sent(engine))


async def settled(slot: VersionSlot) -> None:
    assert slot._task is not None
    await asyncio.wait({slot._task})


def resolved(spec: StartSpec, revision: int) -> StartSpec:
    return replace(spec, generation=replace(spec.generation, route_revision=revision))


async def test_running_requests_finish_new_ones_wait_and_then_the_successor_serves(
    rig: Rig, bench: Bench, reader: Reader
) -> None:
    first, next_ = rig.slot(FIRST), successor(rig)
    engine = await rig.ready(first)
    free_bytes = rig.ledger.free_bytes
    reader.stream.start(1, of(bench.spec(), FIRST))
    next_.load()
    await until(lambda: "finish" in next_.message)
    reader.stream.start(2, of(bench.spec(), FIRST))
    first.retire()
    first.undrain()  # the planner changes its mind: that opens nothing
    reader.stream.start(3, of(bench.spec(), FIRST))
    assert not sent(engine), "weights were replaced under a sequence"
    step(engine, {1: 97})
    reader.stream.cancel([1])
    await until(lambda: sent(engine))
    reader.stream.start(4, of(bench.spec(), FIRST))
    reader.read()
    assert reader.refused == dict.fromkeys((2, 3, 4), NotAdmittedReason.DRAINING)
    engine.events.on_weights(wire.WeightsReplaced(0.1))
    await settled(next_)

    assert (next_.phase, first.gone) == (VersionPhase.READY, True)
    assert len(rig.engines) == 1
    assert rig.ledger.free_bytes == free_bytes, "it took memory"
    assert record_of(next_, "chat").weight_bytes
    pools = take_snapshot(rig.host, WorkerIdentity("w1", "a:1"), whole=True).pools
    assert [(pool.digest, pool.ready) for pool in pools] == [(FIRST, True), (THIRD, True)]
    reader.stream.start(5, resolved(of(bench.spec(), FIRST), REVISION - 1))
    reader.stream.start(6, resolved(of(bench.spec(produced=(97,)), FIRST), REVISION - 1))
    reader.stream.start(7, resolved(of(bench.spec(), FIRST), REVISION))
    reader.stream.start(8, of(bench.spec(), THIRD))
    reader.read()
    assert [reader.refused[handle] for handle in (5, 6, 7)] == [
        NotAdmittedReason.STALE_ROUTE,
        NotAdmittedReason.STALE_ROUTE,
        NotAdmittedReason.NOT_READY,
    ]
    assert reader.withdrawn[-1] == Withdrawal(FIRST, REVISION, THIRD)
    assert 8 in reader.accepted
    rig.check_integrity()
    rig.host.sweep(rig.clock.now_s + rig.context.settings.retire_s + 1.0)
    assert rig.host.table(FIRST) is None
    await next_.stop()
    assert rig.ledger.free_bytes == rig.ledger.total_bytes


async def test_after_the_time_to_finish_all_are_returned(rig: Rig, bench: Bench, reader: Reader) -> None:
    first, next_ = rig.slot(FIRST), successor(rig, finish_s=0.05)
    engine = await rig.ready(first)
    reader.stream.start(1, of(bench.spec(), FIRST))
    reader.stream.start(2, of(bench.spec(), FIRST))
    step(engine, {1: 97})
    await began(rig, engine, next_)
    assert ends(reader) == dict.fromkeys((1, 2), FinishReason.PREEMPTED)
    assert reader.ids[1] == [97], "what the old weights computed is delivered"
    kinds = [type(one) for one in engine.sent]
    assert kinds.index(wire.Cancel) < kinds.index(wire.ReplaceWeights)
    await next_.stop()
    await first.stop()


async def test_a_refusal_with_nothing_changed_lets_the_version_before_serve_on(
    rig: Rig, bench: Bench, reader: Reader
) -> None:
    first, next_ = rig.slot(FIRST), successor(rig)
    engine = await rig.ready(first)
    await began(rig, engine, next_)
    engine.events.on_weights(wire.WeightsRefused("bad_checkpoint", "a tensor lacks"))
    await settled(next_)
    assert (next_.phase, next_.failures.reason) == (VersionPhase.BROKEN, "BAD_CHECKPOINT")
    assert first.phase is VersionPhase.READY
    reader.stream.start(1, of(bench.spec(), FIRST))
    reader.read()
    assert reader.accepted == [1]
    assert not engine.ended
    sibling = rig.slot(SECOND)
    await rig.load(sibling)
    assert sibling.phase is VersionPhase.READY, "its engine has its name again"
    rig.check_integrity()


@pytest.mark.parametrize("halfway", [False, True])
async def test_an_engine_that_ends_meanwhile_leaves_the_version_before_to_start_again(
    rig: Rig, halfway: bool
) -> None:
    first, next_ = rig.slot(FIRST), successor(rig)
    engine = await rig.ready(first)
    await began(rig, engine, next_)
    if halfway:
        engine.events.on_weights(wire.WeightsRefused("bad_checkpoint", "not finite", changed=True))
    engine.events.on_exit(Crashed(-9, "killed"))
    await settled(next_)
    assert next_.failures.reason == ("BAD_CHECKPOINT" if halfway else "REPLACEMENT_CRASHED")
    assert (first.phase, first.observed().restarting) == (VersionPhase.BROKEN, True)
    assert rig.ledger.free_bytes == rig.ledger.total_bytes
    assert (next_.observed().final, next_.observed().failed_in_place) == (True, True)
    assert record_of(next_, "chat").retry_unix_s == 0.0, "each try ends an engine that serves"
    await rig.load(next_)
    assert next_.failures.reason == "UNAVAILABLE", "it waits for the version before"
    assert len(rig.engines) == 1
    await rig.ready(first)
    assert rig.engines[-1].config.model_dir == str(rig.folder)
    rig.check_integrity()


async def test_a_probe_that_the_new_weights_do_not_answer_is_not_tried_again(rig: Rig) -> None:
    first, next_ = rig.slot(FIRST), successor(rig)
    next_.probed = False
    engine = await rig.ready(first)
    await began(rig, engine, next_)
    engine.events.on_weights(wire.WeightsReplaced(0.1))
    await settled(next_)  # the clock of these tests jumps to the end of every wait
    assert next_.failures.reason == "PROBE_TIMEOUT"
    assert next_.observed().final


async def test_an_adapter_takes_no_engine_over(rig: Rig) -> None:
    rig.adapters[THIRD] = MIB
    first, next_ = rig.slot(FIRST), successor(rig)
    engine = await rig.ready(first)
    next_.has_before = True
    await rig.load(next_)
    assert next_.failures.reason == "NOT_REPLACEABLE"
    assert "an adapter" in next_.message
    assert not [one for one in engine.sent if isinstance(one, wire.LoadAdapter)]


async def test_deleted_files_of_the_version_before_are_fetched_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, next_ = rig.slot(FIRST), successor(rig)
    engine = await rig.ready(first)
    lost, fetched = first.files, list[Files]()

    async def parts(files: Files, folder: Path) -> dict[str, str]:
        if files is lost:
            raise FailedPrecondition("the version has no readable weights: model.safetensors: missing")
        return files.stated

    async def fetch(files: Files, progress: object) -> None:
        fetched.append(files)

    def unpin(files: Files) -> None:
        files.folder = None

    for one in (parts, fetch, unpin):
        monkeypatch.setattr(Files, one.__name__, one)
    await rig.load(next_)
    assert (next_.failures.reason, next_.observed().final) == ("UNAVAILABLE", False)
    assert FIRST[:19] in next_.message
    assert first.phase is VersionPhase.READY
    await began(rig, engine, next_)
    assert [one.folder for one in fetched] == [None], "what was fetched stays pinned"
    engine.events.on_weights(wire.WeightsReplaced(0.1))
    await settled(next_)
    assert (next_.phase, first.gone) == (VersionPhase.READY, True)


async def test_a_replacement_that_is_given_up_halfway_ends_the_process(rig: Rig) -> None:
    first, next_ = rig.slot(FIRST), successor(rig)
    engine = await rig.ready(first)
    killed: list[str] = []
    engine.kill = killed.append  # type: ignore[method-assign, assignment]
    await began(rig, engine, next_)
    await next_.stop()
    assert killed, "nobody knows whose weights it has"


async def test_what_another_version_or_deployment_uses_is_not_replaced(rig: Rig) -> None:
    first, sibling = rig.slot(FIRST), rig.slot(SECOND)
    await rig.ready(first, sibling)
    for users, part in ((frozenset({"other"}), "other serves"), (frozenset({"chat"}), "another version")):
        first.deployments = sibling.deployments = users
        next_ = successor(rig)
        await rig.load(next_)
        assert next_.failures.reason == "NOT_REPLACEABLE"
        assert part in next_.message
        assert next_.observed().final
    assert [slot.phase for slot in (first, sibling)] == [VersionPhase.READY] * 2


async def test_a_version_that_differs_in_more_than_weights_is_refused_with_the_difference(rig: Rig) -> None:
    first, next_ = rig.slot(FIRST), successor(rig)
    engine = await rig.ready(first)
    assert isinstance(next_.files, Files)
    next_.files.stated = {"config.json": "another", "tokenizer.json": "new"}
    await rig.load(next_)
    assert next_.failures.reason == "NOT_REPLACEABLE"
    assert "config.json, tokenizer.json" in next_.message
    assert not sent(engine)


def test_an_obstacle_is_named() -> None:
    def why(**changed: object) -> str:
        usual = {"deployment": "chat", "users": {"chat"}, "sharing": (), "nodes": 1} | changed
        before, after = usual.pop("before", {"a": "1"}), usual.pop("after", {"a": "1"})
        return obstacle(before, after, **usual)  # type: ignore[arg-type]

    assert why() == ""
    assert "a, b, c and 1 more" in why(after=dict.fromkeys("abcd", "2"))
    assert "several nodes" in why(nodes=2)
