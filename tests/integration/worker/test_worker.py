"""The worker's whole token path over a socket and a real engine process with the null executor."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from tokenizers import Tokenizer

from fairway.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from services.core.errors import IntegrityError
from services.core.generation import FinishReason, NotAdmittedReason
from services.core.records import WORKERS, AssignedVersion, VersionState, Worker
from services.worker.slots.engine_process import EngineTimeouts
from services.worker.slots.engine_settings import EngineSettings
from tests.integration.worker.harness import Harness, Sink, Starter, eventually
from tests.support.model_folder import write_sparse

SLOW = EngineSettings(
    null_step_s=0.005,
    drain_s=1.0,
    crash_backoff_first_s=0.2,
    failed_backoff_first_s=0.5,
    timeouts=EngineTimeouts(silence_s=20.0, shutdown_s=5.0),
)
LONG = 3000


async def test_thirty_two_sequences_stream_to_their_ends(start_worker: Starter) -> None:
    worker = await start_worker()
    table = worker.table
    sinks = [Sink() for _ in range(32)]
    for index, sink in enumerate(sinks):
        worker.client.start(worker.spec(max_tokens=10 + index, seed=index), sink)
    for index, sink in enumerate(sinks):
        await sink.wait()
        assert sink.finished.reason is FinishReason.LENGTH
        assert len(sink.ids) == sink.finished.output_tokens == 10 + index
        assert sink.text
        assert sink.after_end == 0
    assert (table.kv.blocks, len(table)) == (0, 0)
    worker.agent.check_integrity()
    await eventually(lambda: table.stats.kv_blocks_used == 0)


async def test_an_engine_is_within_what_its_version_allows(start_worker: Starter, model_dir: Path) -> None:
    (model_dir / "engine_limits.json").write_text('{"max_context_tokens": 512, "max_sequences": 2}')
    worker = await start_worker(assign=False)
    worker.files.context = 256  # of the manifest
    await worker.assign(worker.version)
    limits = (await worker.ready()).limits
    assert (limits.max_model_len, limits.max_sequences) == (256, 2)


async def test_text_is_the_decode_of_the_tokens_and_a_resume_goes_on(
    start_worker: Starter, tokenizer: Tokenizer
) -> None:
    worker = await start_worker()
    whole, rest = Sink(), Sink()
    worker.client.start(worker.spec(max_tokens=200, seed=5), whole)
    await whole.wait()
    assert whole.text == tokenizer.decode(whole.ids)
    delivered = len(tokenizer.decode(whole.ids[:70]).rstrip("\ufffd"))
    spec = worker.spec(max_tokens=200, seed=5, produced=tuple(whole.ids[:70]), delivered_chars=delivered)
    worker.client.start(spec, rest)
    await rest.wait()
    assert (rest.offset_base, rest.ids) == (70, whole.ids[70:])
    assert whole.text[:delivered] + rest.text == whole.text
    assert rest.finished.output_tokens == 200


async def test_stop_strings_logprobs_and_deadlines(start_worker: Starter) -> None:
    worker = await start_worker(SLOW)
    first = Sink()
    worker.client.start(worker.spec(max_tokens=300, seed=9), first)
    await first.wait()
    stop = next(first.text[at : at + 3] for at in range(40, 300) if first.text[at : at + 3].isascii())
    stopped, logged, late = Sink(), Sink(), Sink()
    worker.client.start(worker.spec(max_tokens=300, seed=9, stop=(stop,)), stopped)
    worker.client.start(worker.spec(max_tokens=3, logprobs=0), logged)
    worker.client.start(worker.spec(max_tokens=LONG, time_left_s=1.5), late)
    for sink in (stopped, logged, late):
        await sink.wait()
    assert stopped.finished.reason is FinishReason.STOP
    assert stopped.finished.stop == stop
    assert stopped.text == first.text[: first.text.index(stop)]
    assert len(logged.logprobs) == len(logged.ids) == 3
    assert late.finished.reason is FinishReason.DEADLINE
    assert 0 < len(late.ids) < LONG


async def test_credit_is_the_limit_and_a_slow_reader_disturbs_nobody(start_worker: Starter) -> None:
    worker = await start_worker(replace(SLOW, slow_reader_s=0.5))
    slow, steady = Sink(), Sink()
    worker.client.start(worker.spec(max_tokens=LONG, credit=20), slow)
    running = worker.client.start(worker.spec(max_tokens=300, credit=16), steady)
    steady.credit = running.credit
    await slow.wait()
    assert len(slow.ids) == 20
    assert slow.finished.reason is FinishReason.SLOW_READER
    await steady.wait()
    assert len(steady.ids) == 300


async def test_a_cancel_frees_its_blocks_within_one_step(start_worker: Starter) -> None:
    worker = await start_worker(replace(SLOW, null_step_s=0.25))
    table = worker.table
    gone, stays = Sink(), Sink()
    running = worker.client.start(worker.spec(max_tokens=LONG, prompt=range(320)), gone)
    worker.client.start(worker.spec(max_tokens=LONG), stays)
    await eventually(lambda: len(gone.ids) > 2 and len(stays.ids) > 2)
    before = table.stats
    used, steps = before.kv_blocks_used, before.steps
    assert used >= 20
    running.cancel()
    await eventually(lambda: len(table) == 1)
    heard_at = table.stats.steps
    assert table.kv.blocks < 20
    await eventually(lambda: table.stats.kv_blocks_used <= used - 20)
    assert table.stats.steps <= heard_at + 2, "one step was on its way, the next has it freed"
    assert table.stats.steps > steps


async def test_a_gateway_that_goes_away_frees_everything(start_worker: Starter) -> None:
    worker = await start_worker(SLOW)
    sinks = [Sink() for _ in range(8)]
    for sink in sinks:
        worker.client.start(worker.spec(max_tokens=LONG), sink)
    await eventually(lambda: all(sink.ids for sink in sinks))
    await worker.client.close()
    await eventually(lambda: worker.table.kv.blocks == 0 and worker.table.stats.kv_blocks_used == 0)
    assert all(sink.lost for sink in sinks)
    worker.agent.check_integrity()


# --- engines that die -----------------------------------------------------------------------------


async def test_a_killed_engine_is_told_restarted_and_back_at_the_baseline(start_worker: Starter) -> None:
    worker = await start_worker(SLOW)
    pid = worker.engine_pid
    sinks = [Sink() for _ in range(32)]
    for sink in sinks:
        worker.client.start(worker.spec(max_tokens=LONG), sink)
    await eventually(lambda: all(sink.ids for sink in sinks))
    os.kill(pid, signal.SIGKILL)
    for sink in sinks:
        await sink.wait()
        assert sink.finished.reason is FinishReason.ENGINE_LOST
        assert sink.finished.output_tokens == len(sink.ids), "all that was made was told"
    assert worker.state() is VersionState.RESTARTING
    refused = Sink()
    worker.client.start(worker.spec(), refused)
    await refused.wait()
    assert refused.refusal is NotAdmittedReason.NOT_READY
    table = await worker.ready()
    assert worker.engine_pid != pid
    (version,) = worker.agent.status().versions
    assert (version.record.engine_restarts, version.kv_blocks_reserved) == (1, 0)
    again = Sink()
    worker.client.start(worker.spec(max_tokens=5), again)
    await again.wait()
    assert len(again.ids) == 5
    await eventually(lambda: table.stats.kv_blocks_used == 0)
    worker.agent.check_integrity()


async def test_files_deleted_under_an_engine_are_fetched_again_when_it_restarts(
    start_worker: Starter, model_dir: Path
) -> None:
    worker = await start_worker(SLOW)
    copy = model_dir.with_name("fetched-again")
    model_dir.rename(copy)
    worker.files.folder = copy  # what a fetch returns
    os.kill(worker.engine_pid, signal.SIGKILL)
    await eventually(lambda: worker.state() is not VersionState.READY)
    await worker.ready()
    again = Sink()
    worker.client.start(worker.spec(max_tokens=5), again)
    await again.wait()
    assert len(again.ids) == 5
    assert (worker.files.fetches, worker.files.pins) == (2, 1)


async def test_a_stopped_engine_is_detected_and_replaced(start_worker: Starter) -> None:
    worker = await start_worker(replace(SLOW, timeouts=EngineTimeouts(silence_s=2.5, shutdown_s=5.0)))
    pid = worker.engine_pid
    sink = Sink()
    worker.client.start(worker.spec(max_tokens=LONG), sink)
    await eventually(lambda: sink.ids)
    os.kill(pid, signal.SIGSTOP)
    await sink.wait(30.0)
    assert sink.finished.reason is FinishReason.ENGINE_LOST
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    await worker.ready()


async def test_a_version_that_cannot_be_loaded_fails_with_its_message(
    start_worker: Starter, model_dir: Path
) -> None:
    worker = await start_worker(SLOW, assign=False)
    (model_dir / "config.json").write_text('{"vocab_size": -3}')
    await worker.assign(AssignedVersion("d", "m", worker.digest, executor="null"))
    await eventually(lambda: worker.state() is VersionState.FAILED)
    (version,) = worker.agent.status().versions
    assert "vocab_size" in version.record.message
    assert version.record.reason == "UNSUPPORTED_MODEL"
    assert (version.record.failed_attempts, version.record.retry_unix_s) == (1, 0.0), "it is not tried again"
    assert version.record.engine_restarts == 0
    await worker.assign()
    await eventually(lambda: worker.state() is None)
    (model_dir / "config.json").write_text('{"vocab_size": 512}')
    await worker.assign(worker.version)
    await worker.ready()


async def test_a_failure_that_may_pass_is_tried_again_and_says_when(start_worker: Starter) -> None:
    worker = await start_worker(SLOW, assign=False)
    worker.files.error = IntegrityError("a chunk is damaged")
    await worker.assign(worker.version)

    def failed_twice() -> bool:
        versions = worker.agent.status().versions
        return bool(versions) and versions[0].record.failed_attempts >= 2

    await eventually(failed_twice)
    await eventually(lambda: worker.state() is VersionState.FAILED)
    (version,) = worker.agent.status().versions
    assert version.record.reason == "INTEGRITY_ERROR"
    assert version.record.retry_unix_s > 0
    worker.files.error = None  # the blob was healed
    await worker.ready()
    (version,) = worker.agent.status().versions
    assert (version.record.reason, version.record.failed_attempts) == ("", 0)


async def test_what_does_not_fit_says_why(start_worker: Starter, model_dir: Path) -> None:
    write_sparse(model_dir / "model.safetensors", {"w": (1024, 1048576)})
    worker = await start_worker(SLOW, assign=False)
    await worker.assign(AssignedVersion("d", "m", worker.digest, executor="torch"))
    await eventually(lambda: worker.state() is VersionState.FAILED)
    (version,) = worker.agent.status().versions
    assert "d needs 4096 MiB for weights" in version.record.message
    assert (version.record.reason, version.record.failed_attempts) == ("DOES_NOT_FIT", 1)
    assert version.record.needed_bytes == 4096 * 2**20 + 16 * 2**20
    assert (await worker.registered()).memory_free_bytes == 2 * 2**30
    assert version.engine_pid == 0
    worker.agent.check_integrity()


# --- assignment, registration, drain ---------------------------------------------------------------


async def test_an_unassigned_version_drains_and_is_gone(start_worker: Starter) -> None:
    worker = await start_worker(replace(SLOW, drain_s=10.0))
    pid = worker.engine_pid
    sink, late = Sink(), Sink()
    worker.client.start(worker.spec(max_tokens=100), sink)
    await eventually(lambda: sink.ids)
    await worker.assign()
    await eventually(lambda: worker.state() is VersionState.DRAINING)
    worker.client.start(worker.spec(), late)
    await late.wait()
    assert late.refusal is NotAdmittedReason.DRAINING
    await sink.wait()
    assert sink.finished.reason is FinishReason.LENGTH
    await eventually(lambda: worker.agent.status().versions == ())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert worker.files.pins == 0


async def test_a_version_that_is_wanted_again_goes_on(start_worker: Starter) -> None:
    worker = await start_worker(replace(SLOW, drain_s=10.0))
    pid = worker.engine_pid
    sink = Sink()
    worker.client.start(worker.spec(max_tokens=LONG), sink)
    await eventually(lambda: sink.ids)
    await worker.assign()
    await eventually(lambda: worker.state() is VersionState.DRAINING)
    await worker.assign(worker.version)
    await worker.ready()
    assert worker.engine_pid == pid


async def test_a_version_that_retires_takes_what_was_accepted_for_it_until_nothing_comes(
    start_worker: Starter,
) -> None:
    worker = await start_worker(replace(SLOW, drain_s=0.1, retire_s=1.0))
    pid = worker.engine_pid
    sink, late = Sink(), Sink()
    running = worker.client.start(worker.spec(max_tokens=100, credit=20), sink)
    await eventually(lambda: sink.ids)
    await worker.assign(replace(worker.version, retiring=True))
    await eventually(lambda: worker.state() is VersionState.RETIRING)
    worker.client.start(worker.spec(max_tokens=150), late)
    await eventually(lambda: late.accepted)
    running.credit(1 << 20)
    for each in (sink, late):
        assert (await each.wait()).finished.reason is FinishReason.LENGTH
    assert worker.state() is VersionState.RETIRING
    await eventually(lambda: worker.agent.status().versions == ())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert worker.files.pins == 0


async def test_a_version_that_retires_and_is_wanted_again_keeps_its_engine(start_worker: Starter) -> None:
    worker = await start_worker(replace(SLOW, retire_s=60.0))
    pid = worker.engine_pid
    await worker.assign(replace(worker.version, retiring=True))
    await eventually(lambda: worker.state() is VersionState.RETIRING)
    await worker.assign(worker.version)
    await worker.ready()
    assert worker.engine_pid == pid


async def test_a_version_whose_logits_were_not_finite_says_so_while_it_is_ready(
    start_worker: Starter,
) -> None:
    worker = await start_worker(SLOW)
    assert worker.agent.status().versions[0].record.message == ""
    worker.table.had_non_finite = True
    assert "without finite logits" in worker.agent.status().versions[0].record.message


async def test_the_record_in_the_store_follows_the_states(start_worker: Starter) -> None:
    worker = await start_worker(SLOW)
    async with asyncio.timeout(30):
        while (record := await worker.registered()).versions[0].state is not VersionState.READY:
            await asyncio.sleep(0.02)
    assert (record.address, record.versions[0].deployment) == (worker.address, "null")
    assert record.versions[0].kv_blocks_total > 0
    os.kill(worker.engine_pid, signal.SIGKILL)
    await eventually(lambda: worker.state() is VersionState.RESTARTING)
    async with asyncio.timeout(30):
        while (await worker.registered()).versions[0].engine_restarts != 1:
            await asyncio.sleep(0.02)


async def test_a_lost_lease_is_a_new_life_and_running_sequences_go_on(start_worker: Starter) -> None:
    worker = await start_worker(SLOW)
    old = worker.host.grants.incarnation
    running = Sink()
    worker.client.start(worker.spec(max_tokens=500), running)
    await eventually(lambda: running.ids)
    entry = await worker.store.get(WORKERS + worker.worker_id)
    assert entry is not None
    await worker.store.revoke_lease(entry.lease_id)
    await eventually(lambda: worker.host.grants.incarnation not in (0, old))
    stale, fresh = Sink(), Sink()
    worker.client.start(worker.spec(incarnation=old), stale)
    worker.client.start(worker.spec(max_tokens=3), fresh)
    await stale.wait()
    await fresh.wait()
    assert stale.refusal is NotAdmittedReason.STALE_INCARNATION
    assert fresh.finished.reason is FinishReason.LENGTH
    await running.wait()
    assert len(running.ids) == 500
    assert (await worker.registered()).worker_id == "w1"


async def test_operators_see_and_drain_the_worker(start_worker: Starter) -> None:
    worker = await start_worker(SLOW)
    sink, late = Sink(), Sink()
    worker.client.start(worker.spec(max_tokens=600), sink)
    await eventually(lambda: sink.ids)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        seen = await stub.GetWorker(worker_pb2.GetWorkerRequest(), metadata=worker.metadata)
        (version,) = seen.versions
        assert (seen.worker_id, seen.incarnation) == ("w1", worker.host.grants.incarnation)
        assert (version.state, version.running) == (worker_pb2.VERSION_STATE_READY, 1)
        assert version.kv_blocks_reserved >= version.kv_blocks_used > 0
        assert version.engine_pid == worker.engine_pid
        remaining = await stub.DrainWorker(
            worker_pb2.DrainWorkerRequest(timeout=Duration(nanos=50_000_000)), metadata=worker.metadata
        )
        assert remaining.remaining == 1
        worker.client.start(worker.spec(), late)
        await late.wait()
        assert late.refusal is NotAdmittedReason.DRAINING
        assert (
            await stub.DrainWorker(
                worker_pb2.DrainWorkerRequest(timeout=Duration(seconds=10)), metadata=worker.metadata
            )
        ).remaining == 0
    await sink.wait()
    assert sink.finished.reason is FinishReason.LENGTH
    assert (await drained_record(worker)).draining


async def drained_record(worker: Harness) -> Worker:
    async with asyncio.timeout(30):
        while not (record := await worker.registered()).draining:
            await asyncio.sleep(0.02)
    return record


async def test_a_start_without_a_leaders_grant_is_refused(start_worker: Starter) -> None:
    worker = await start_worker(SLOW)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Execute(metadata=worker.metadata)
        fallback = worker_pb2.FallbackGrant(kv_blocks=1, version_digest=worker.digest)
        start = worker_pb2.StartSequence(
            handle=1,
            request_id="r1",
            tenant_id="t1",
            fallback=fallback,
            sampling=common_pb2.Sampling(seed=1),
            max_output_tokens=1,
            initial_credit_tokens=1,
        )
        await call.write(worker_pb2.ExecuteRequest(starts=[start]))
        response: Any = await call.read()
        assert [(entry.handle, entry.reason) for entry in response.not_admitted] == [
            (1, worker_pb2.NOT_ADMITTED_REASON_NO_FALLBACK)
        ]
        async with asyncio.timeout(30):
            while not response.HasField("heartbeat"):
                response = await call.read()
        call.cancel()
