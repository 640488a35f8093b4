"""A gateway that runs a batch is killed or frozen: another continues within seconds, and no line is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.adapters.blobs.folder import FolderBlobs
from services.adapters.etcd.store import EtcdStore
from services.core.batches import BatchRecord, BatchStatus, OwnerRecord, owner_key
from services.core.generation import Principal
from services.core.records import KeyRole, load
from services.runtime.clock import SystemClock
from tests.conftest import Server
from tests.support.batch_process import LEASE_S
from tests.support.local_servers import die_with_parent
from tests.support.memory_batches import BatchStack, running_stack
from tests.support.stack import ROOT

LINES = 1000
CALLER = Principal("k", KeyRole.TENANT, "acme")


@contextmanager
def two_gateways(etcd: Server, folder: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    command = [sys.executable, "-m", "tests.support.batch_process", etcd.address, str(folder)]
    found = {
        name: subprocess.Popen([*command, name], cwd=ROOT, preexec_fn=die_with_parent)
        for name in ("g0", "g1")
    }
    try:
        yield found
    finally:
        for process in found.values():
            process.kill()
            process.wait()


async def created(stack: BatchStack) -> BatchRecord:
    upload = stack.files.upload("acme")
    for number in range(LINES):
        line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": {"n": number}}
        await upload.write(json.dumps(line).encode() + b"\n")
    file = await stack.files.add(upload, "in.jsonl")
    await upload.close()
    return await stack.service.create(CALLER, file.file_id, "/v1/completions", "24h", {})


async def reached(stack: BatchStack, batch: BatchRecord, holds: Callable[[BatchRecord], bool]) -> BatchRecord:
    async with asyncio.timeout(40):
        while not holds(record := await stack.service.batch(CALLER, batch.batch_id)):
            await asyncio.sleep(0.02)
    return record


async def owner_of(stack: BatchStack, batch: BatchRecord) -> str:
    entry = await stack.etcd.get(owner_key("acme", batch.batch_id))
    return load(entry.value, OwnerRecord).gateway if entry is not None else ""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_another_gateway_continues(own_etcd: Server, tmp_path: Path, how: signal.Signals) -> None:
    etcd = EtcdStore((own_etcd.address,), SystemClock())
    blobs = FolderBlobs(tmp_path / "files")
    async with running_stack(SystemClock(), etcd=etcd, blobs=blobs) as stack:
        batch = await created(stack)
        with two_gateways(own_etcd, tmp_path / "files") as processes:
            await reached(stack, batch, lambda record: record.next_line > 40)
            first = await owner_of(stack, batch)
            os.kill(processes[first].pid, how)
            stopped = await stack.service.batch(CALLER, batch.batch_id)
            began_s = asyncio.get_running_loop().time()
            await reached(stack, batch, lambda record: record.next_line > stopped.next_line + 40)
            assert asyncio.get_running_loop().time() - began_s < LEASE_S + 15.0
            assert await owner_of(stack, batch) not in ("", first)
            if how is signal.SIGSTOP:
                os.kill(processes[first].pid, signal.SIGCONT)  # its late writes are refused
            ended = await reached(stack, batch, lambda record: record.status.is_over)
        assert (ended.status, ended.completed, ended.failed) == (BatchStatus.COMPLETED, LINES, 0)
        file = await stack.files.file("acme", ended.output_file_id)
        data = b"".join([piece async for piece in stack.files.content(file)])
        assert [json.loads(line)["custom_id"] for line in data.splitlines()] == [
            f"{number}" for number in range(LINES)
        ]
    await etcd.close()
