"""A version that a real engine loads takes requests only after it has answered its probe."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.core.estimates.traffic_shapes import RequestShape, SamplingKind
from services.core.records import AssignedVersion, VersionState
from services.worker.slots.engine_settings import EngineSettings
from tests.integration.worker.harness import DIGEST, Harness, eventually, start_harness, write_model
from tests.support.faulty_versions import FIELD, VersionFault
from tests.support.stack import ROOT

SHAPES = (RequestShape(700, 6, SamplingKind.LOGPROBS), RequestShape(90, 20, SamplingKind.PENALISED))
VERSION = AssignedVersion("null", "null", DIGEST, executor="null", itl_target_s=0.2, probes=SHAPES)
FAULTS = {"PYTHONPATH": os.pathsep.join((str(ROOT / "tests/support/rollout_faults"), str(ROOT)))}


@pytest.fixture
async def workers() -> AsyncIterator[list[Harness]]:
    started: list[Harness] = []
    yield started
    for harness in started:
        await harness.close()


async def started(folder: Path, fault: VersionFault, workers: list[Harness]) -> Harness:
    write_model(folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, FIELD: fault.value}))
    settings = EngineSettings(null_step_s=0.002)
    harness = await start_harness(folder, settings, assign=False, env={**os.environ, **FAULTS})
    workers.append(harness)
    await harness.assign(VERSION)
    return harness


async def test_a_version_that_answers_is_ready_and_is_not_probed_again_after_a_crash(
    tmp_path: Path, workers: list[Harness]
) -> None:
    harness = await started(tmp_path, VersionFault.GOOD, workers)
    table = await harness.ready()
    assert not harness.usage.sequences, "a probe is nobody's"
    assert harness.host.device is not None
    assert harness.host.device.busy_s == 0.0
    assert not harness.host.tally.take(16)
    table.check_integrity()
    (pool,) = harness.agent.take_snapshot(True).pools
    assert pool.itl_target_s == 0.2, "the scheduler needs the target that was assigned"
    pid = harness.engine_pid
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: harness.state() is VersionState.RESTARTING)
    await harness.ready()
    (slot,) = harness.agent.levels()
    assert slot.state == "ready"


async def test_a_version_that_fails_its_probe_takes_no_request(
    tmp_path: Path, workers: list[Harness]
) -> None:
    harness = await started(tmp_path, VersionFault.UNANSWERING, workers)
    seen: set[VersionState | None] = set()

    def failed() -> bool:
        seen.add(harness.state())
        assert harness.host.table(DIGEST) is None
        return harness.state() is VersionState.FAILED

    await eventually(failed, 20.0)
    assert VersionState.READY not in seen
    (found,) = (version.record for version in harness.agent.status().versions)
    assert (found.reason, found.retry_unix_s) == ("PROBE_FAILED", 0.0)
    assert found.message in {
        "the prompt of 700 tokens: a fault of the drill", "the prompt of 90 tokens: a fault of the drill"
    }  # fmt: skip
    await eventually(lambda: harness.engine_pid == 0)
