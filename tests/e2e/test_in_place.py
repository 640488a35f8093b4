"""Weights that are replaced in place under streams of a whole installation."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fairway.client import AdminClient
from fairway.v1 import controlplane_pb2 as cp
from tests.support.stack import Stack
from tests.support.updating import CHECKPOINT, TIMEOUT_S, Traffic, admin_of, publish
from tests.support.waiting import until


def write_tuned(folder: Path) -> Path:
    """Write the bundled checkpoint with other values in its weights."""
    shutil.copytree(CHECKPOINT, folder)
    drawn = torch.Generator().manual_seed(3)
    for path in folder.glob("*.safetensors"):
        tuned = {
            name: (one.float() * (1 + 0.02 * torch.randn(one.shape, generator=drawn))).to(one.dtype)
            for name, one in load_file(path).items()
        }
        save_file(tuned, path, metadata={"format": "pt"})
    return folder


async def replace(admin: AdminClient, name: str, version: str, finish_s: int | None) -> cp.Deployment:
    """Update a deployment, in place unless there is no time; return it once it is ready."""

    def change(found: cp.Deployment) -> None:
        found.version = version
        found.ClearField("in_place")
        if finish_s is not None:
            found.in_place.FromSeconds(finish_s)

    await admin.deployments.change(name, change)
    return await admin.deployments.wait_ready(name, timeout_s=180)


async def test_no_stream_fails_and_none_is_mixed_while_weights_are_replaced(
    stack: Stack, tmp_path: Path
) -> None:
    tuned = await asyncio.to_thread(write_tuned, tmp_path / "tuned")
    await asyncio.to_thread(publish, stack, tuned, stack.model, "tuned")
    traffic = Traffic()
    async with admin_of(stack) as admin:
        before = (await admin.deployments.get(stack.model)).version_digest
        try:
            async with traffic.running(stack, 4):
                await until(lambda: before in traffic.versions(), timeout_s=TIMEOUT_S)
                after = (await replace(admin, stack.model, "tuned", 60)).version_digest
                await until(lambda: after in traffic.versions(), timeout_s=TIMEOUT_S)
                await asyncio.sleep(2.0)
            finished = list(traffic.failures)
            async with traffic.running(stack, 4):
                await asyncio.sleep(1.0)
                # Streams with output end by name; the others start over.
                await replace(admin, stack.model, before, 0)
                served = len(traffic.served)
                await until(lambda: len(traffic.served) > served + 8, timeout_s=TIMEOUT_S)
        finally:
            await replace(admin, stack.model, before, None)
    assert finished == []
    assert traffic.versions() == [before, after]
    assert traffic.served[-1].version_digest == before
    ended = traffic.failures
    assert all("withdrew version" in one for one in ended), ended
    assert len(ended) <= 4, "each client had one stream"
