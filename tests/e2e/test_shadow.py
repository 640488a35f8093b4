"""A shadow of all traffic on an installation: clients, usage and quotas show the stable version alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.stack import metric_sum
from fairway.client import AdminClient, FailedPrecondition
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import inference_pb2 as pb
from tests.support.stack import Stack, metadata
from tests.support.updating import admin_of, publish_twin
from tests.support.waiting import until

NAME = "to-shadow"
TENANT = "copied"
REQUESTS = 12
TOKENS = 6
COPIES = "fairway_gateway_shadow_copies_total"


async def send(stack: Stack, key: str) -> Sequence[pb.CompleteResponse]:
    """Return the answers of as many requests as the tenant's rate admits, one after another."""
    generation = pb.Generation(
        model=stack.model, prompt="def f():", max_output_tokens=TOKENS, ignore_eos=True
    )
    async with stack.inference() as stub:
        return [
            await stub.Complete(pb.CompleteRequest(generation=generation), metadata=metadata(key), timeout=60)
            for _ in range(REQUESTS)
        ]


async def phase_is(admin: AdminClient, phase: cp.RolloutPhase.ValueType) -> None:
    """Return once the rollout is in the phase."""
    for _ in range(1200):
        if (await admin.rollouts.get(NAME)).phase == phase:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(await admin.rollouts.get(NAME))


async def test_a_shadow_of_all_traffic(stack: Stack, tmp_path: Path) -> None:
    await asyncio.to_thread(publish_twin, stack, tmp_path / "twin", "shadow-twin")
    async with admin_of(stack) as admin:
        stable = (await admin.deployments.get(stack.model)).version_digest
        await admin.tenants.create(cp.Tenant(metadata=cp.Metadata(name=TENANT), requests_per_minute=REQUESTS))
        key = cp.Key(metadata=cp.Metadata(name=TENANT), tenant=TENANT, role=cp.KEY_ROLE_TENANT)
        secret = (await admin.keys.create(key)).secret
        rollout = cp.Rollout(
            metadata=cp.Metadata(name=NAME),
            deployment=stack.model,
            strategy=cp.ROLLOUT_STRATEGY_SHADOW,
            arms=[cp.RolloutArm(name="shadow", version="shadow-twin")],
            shadow=cp.RolloutShadow(arm="shadow", fraction_ratio=1.0),
        )
        shadow = (await admin.rollouts.create(rollout)).arms[0].version_digest
        assert shadow != stable
        await phase_is(admin, cp.ROLLOUT_PHASE_RUNNING)
        answers = await send(stack, secret)
        assert {answer.accepted.version_digest for answer in answers} == {stable}

        def copies(labels: str) -> int:
            return int(metric_sum(stack.state, "gateway", COPIES, labels))

        await until(lambda: copies(shadow[:19]) == REQUESTS, timeout_s=30.0)
        assert copies('outcome="FINISHED"') > 0
        assert copies('outcome="FINISHED"') + copies('outcome="SKIPPED_') == REQUESTS
        device_s = metric_sum(stack.state, "gateway", "fairway_gateway_shadow_device_seconds_total")
        assert device_s > 0

        by = (cp.USAGE_DIMENSION_TENANT, cp.USAGE_DIMENSION_VERSION)
        used: list[tuple[str, str, int, int]] = []
        for _ in range(100):
            records = await admin.usage.list(group_by=by, tenant=TENANT)
            used = [(one.tenant, one.version_digest, one.requests, one.output_tokens) for one in records]
            if used and used[0][2] == REQUESTS:
                break
            await asyncio.sleep(0.1)
        assert used == [(TENANT, stable, REQUESTS, REQUESTS * TOKENS)]

        with pytest.raises(FailedPrecondition):
            await admin.rollouts.promote(NAME)
        await admin.rollouts.abort(NAME, reason="seen enough")
        await phase_is(admin, cp.ROLLOUT_PHASE_ABORTED)
        assert (await admin.deployments.get(stack.model)).version_digest == stable
