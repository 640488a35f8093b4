"""`fairway audit`, against a control plane; its export is verified without it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from fairway.cli.main import app, run
from fairway.client import AdminClient, NotFound
from fairway.v1 import controlplane_pb2 as pb
from services.adapters.memory.store import MemoryStore
from services.runtime.clock import SystemClock
from tests.support.audited_plane import ADMIN_KEY, AuditedPlane, audited_plane
from tests.support.memory_ledger import MemoryLedger

CLOCK = SystemClock()


@pytest_asyncio.fixture
async def plane(tmp_path: Path) -> AsyncIterator[AuditedPlane]:
    async with audited_plane(MemoryStore(CLOCK, bookmark_s=0.2), MemoryLedger(), CLOCK, tmp_path) as found:
        await found.tenant("acme")
        await found.sequence()
        yield found


async def said(*arguments: str, plane: AuditedPlane | None = None, code: int = 0) -> str:
    out, err = io.StringIO(), io.StringIO()
    where = () if plane is None else ("--controlplane", plane.address, "--admin-key", ADMIN_KEY)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        ended = await asyncio.to_thread(run, app, ["audit", *arguments, *where])
    assert (ended or 0) == code, (arguments, out.getvalue(), err.getvalue())
    return (out if code == 0 else err).getvalue()


async def document(*arguments: str, plane: AuditedPlane | None = None) -> Any:
    return json.loads(await said(*arguments, "-o", "json", plane=plane))


async def test_entries_are_listed(plane: AuditedPlane) -> None:
    table = await said("list", "--action", "CreateTenant", plane=plane)
    assert table.split("\t")[2:6] == ["root", "CreateTenant", "acme", "OK"]
    (entry,) = (await document("list", "--actor", "root", "--since", "1h", plane=plane))["entries"]
    assert (entry["resource"], entry["address"]) == ("acme", "127.0.0.1")
    assert await document("list", "--until", "1h", plane=plane) == {"entries": []}


async def test_an_export_is_verified_without_a_server(plane: AuditedPlane, tmp_path: Path) -> None:
    folder, outside = str(tmp_path / "log"), str(tmp_path / "checkpoints")
    await said("export", folder, plane=plane)
    key = (tmp_path / "log" / "verifier").read_text().strip()
    found = await document("verify", folder, "--key", key, "--checkpoint", outside)
    assert (found["entries"], found["keys"], found["earlier_checkpoints"]) == (2, [key], 1)
    assert "2 entries, as signed" in await said("verify", folder)

    bundle = tmp_path / "log" / "tile" / "entries" / "000.p" / "2"
    bundle.write_bytes(bundle.read_bytes().replace(b"acme", b"acne"))
    refused = await said("verify", folder, code=1)
    assert "LOG_DAMAGED" in refused
    assert "tile/0/000.p/2 is not what its entries hash to" in refused
    assert "no Ed25519 key" in await said("verify", folder, "--key", "x", code=1)


async def test_a_log_is_verified_through_the_api_and_a_cut_end_is_found(
    plane: AuditedPlane, tmp_path: Path
) -> None:
    outside = tmp_path / "checkpoints"
    assert (await document("verify", "--checkpoint", str(outside), plane=plane))["entries"] == 2
    await said("export", str(tmp_path / "old"), plane=plane)
    await plane.tenant("second")
    await plane.sequence()
    assert (await document("verify", "--checkpoint", str(outside), plane=plane))["entries"] > 2
    refused = await said("verify", str(tmp_path / "old"), "--checkpoint", str(outside), code=1)
    assert "its end was cut" in refused
    shutil.rmtree(tmp_path / "old")
    assert "LOG_DAMAGED" in await said("verify", str(tmp_path), code=1)


async def test_a_script_reads_the_log(plane: AuditedPlane) -> None:
    async with AdminClient(plane.address, admin_key=ADMIN_KEY) as admin:
        with pytest.raises(NotFound):
            await admin.tenants.delete("nobody")
        await plane.sequence()
        (refused,) = await admin.audit.list(action="DeleteTenant")
        assert (refused.outcome, refused.resource) == ("NOT_FOUND", "nobody")
        names = [each.name async for each in admin.audit.export()]
    assert names[:2] == ["verifier", "checkpoint"]
    assert pb.ExportAuditLogResponse(last=True).last
