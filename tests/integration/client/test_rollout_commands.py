"""`fairway rollouts` and the history of deployments, against a control plane."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.controlplane.rollouts.records import Rollout, RolloutPhase
from services.core.manifest import sha256_of
from services.core.records import (
    ROLLOUTS,
    WORKERS,
    LoadedVersion,
    VersionRecord,
    VersionState,
    Worker,
    load,
    version_key,
)
from tests.integration.client.planes import Fleet, fleet
from tests.integration.client.test_limit_commands import document, said

OLD, NEW = sha256_of(b"1"), sha256_of(b"2")


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path) as found:
        for digest in (OLD, NEW):
            await found.put(version_key("tiny", digest), VersionRecord("tiny", digest, 2**21, 0.0))
        await said(found, f"deployments create chat --model tiny --version {OLD}")
        ready = LoadedVersion("chat", "tiny", OLD, VersionState.READY)
        await found.put(WORKERS + "w0", Worker("w0", "w0:1", versions=(ready,)))
        yield found


async def test_a_plan_is_shown_and_nothing_starts(admin: Fleet) -> None:
    plan = await said(admin, f"rollouts start chat --to {NEW} --steps 1,50,100 --hold 2m --dry-run")
    assert "step 2: 50.00%, at least 120 s and 100 requests" in plan
    assert "canary\t1/1\t2 MiB or more (its files)\tw0" in plan
    assert await document(admin, "rollouts list") == {"rollouts": []}


async def test_a_rollout_is_started_paused_resumed_and_aborted(admin: Fleet) -> None:
    made = await document(
        admin,
        f"rollouts start chat --to {NEW} --name to-new --deny-tenant acme --override beta=canary "
        "--class-cap interactive=5 --metric cost --metric ttft_p95 --accept cost=wanted --soak 1h",
    )
    rules = made["rules"]
    assert (rules["denied_tenants"], rules["overrides"]) == (["acme"], {"beta": "canary"})
    assert rules["class_caps"] == {"interactive": 0.05}
    assert made["gate"]["metrics"] == ["cost", "ttft_p95"]
    assert (made["gate"]["accepted"], made["soak"]) == ({"cost": "wanted"}, "3600s")
    status = await said(admin, "rollouts status chat")  # the newest of the deployment
    assert "to-new: canary of chat, loading" in status
    assert f"stable\t{OLD}\t100.00%\t1/1\t0\t-" in status
    assert "loading (paused)" in await said(admin, "rollouts pause to-new")
    await said(admin, "rollouts resume to-new")
    assert "a reason" in await said(admin, "rollouts promote to-new --accept cost=", code=4)
    assert "rolling back" in await said(admin, "rollouts abort chat --reason odd --yes")
    history = await said(admin, "rollouts history chat")
    assert [line.split("\t")[1] for line in history.splitlines()] == [
        "PAUSED",
        "RESUMED",
        "ABORTED_BY_OPERATOR",
    ]
    assert "to-new\tchat\tcanary\trolling back" in await said(admin, "rollouts list")


async def test_an_ab_test_names_its_arms(admin: Fleet) -> None:
    command = f"rollouts start chat --strategy ab --arm terse={NEW}:30 --name ab"
    assert (await document(admin, command))["arms"][0]["weight_ratio"] == 0.3
    assert "VERSION:PERCENT" in await said(admin, "rollouts start chat --strategy ab --arm terse=v2", code=2)
    assert "there is no rollout other" in await said(admin, "rollouts status other", code=4)


async def test_a_deployment_goes_back_to_its_last_other_state(admin: Fleet) -> None:
    await said(admin, f"deployments update chat --version {NEW} --output-price 2")
    rows = (await said(admin, "deployments history chat")).splitlines()
    assert [row.split("\t")[2] for row in rows] == ["update", "create"]
    back = await document(admin, "deployments rollback chat")
    assert back["version_digest"] == OLD
    await said(admin, f"deployments rollback chat --to {rows[0].split(chr(9))[0]}")
    assert (await document(admin, "deployments show chat"))["version_digest"] == NEW


async def test_a_wait_ends_with_the_cutover_and_fails_without_one(admin: Fleet) -> None:
    made = await document(admin, f"rollouts start chat --to {NEW} --name r --keep-warm 90s")
    assert made["keep_warm"] == "90s"
    assert "r is loading" in await said(admin, "rollouts wait chat --within 1s", code=4)
    held = await admin.store.get(ROLLOUTS + "r")
    assert held is not None
    final = replace(load(held.value, Rollout), phase=RolloutPhase.COMPLETED, cutover_revision=7)
    await admin.put(held.key, replace(final, message="cut over: from route revision 7 on"))
    assert "cut over: from route revision 7 on" in await said(admin, "rollouts wait r")
    await admin.put(held.key, replace(final, phase=RolloutPhase.REVERTED))
    assert "r is reverted" in await said(admin, "rollouts wait r", code=4)
