"""`fairway policies`: create, assign, history and test, as an operator runs them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from services.core.records import TENANTS, Meta, Tenant
from tests.integration.safety.conftest import Installation, policy
from tests.integration.safety.test_moderation import write
from tests.support.rows_fixtures import folders
from tests.support.rows_gateway import API_KEY, rows_gateway, served
from tests.support.waiting import until

__all__ = ["folders"]


async def fairway(*arguments: str, code: int = 0) -> str:
    """Return what a command printed, its errors after it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fairway.cli.entry", "policies", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == code, (out, err)
    return (out + err).decode()


async def test_a_pack_is_created_assigned_and_shown(installation: Installation) -> None:
    at = ("--controlplane", installation.address, "--admin-key", "admin")
    to = ("--registry", installation.registry.address, "--admin-key", "admin")
    file = installation.folder / "strict.json"
    file.write_text(json.dumps(policy("kaboom")))
    digest = (await fairway("create", str(file), "--name", "strict", *to)).split()[0]
    await installation.tenant(pack="")
    shown = await fairway("assign", "--tenant", "acme", "--pack", "strict", *at)
    assert "deployed strict at latest" in shown
    await until(lambda: installation.tenants.view[TENANTS + "acme"].record.safety_pack == "strict")
    terms = await installation.packs.named("strict", "acme", "s")
    assert terms.pins.pack_digest == digest
    file.write_text(json.dumps(policy("zap")))
    assert (await fairway("create", str(file), "--name", "strict", "--tag", "v2", *to)).split()[0] != digest
    await fairway("assign", "--tenant", "acme", "--none", *at)
    await fairway("assign", "--tenant", "acme", *at, code=2)
    await fairway("assign", "--tenant", "acme", "--pack", "missing", *at, code=4)
    history: Any = json.loads(await fairway("history", "strict", "-o", "json", *at))
    found = [(one["what"], one["who"]) for one in history["changes"]]
    assert sorted(found) == [("SAFETY_PACK_ASSIGNED", "acme")] * 2 + [("create", "")]
    assert history["tenants"] == []
    file.write_text("{}x")
    refused = await fairway("create", str(file), "--name", "strict", *to, code=1)
    assert "safety_policy.json" in refused


async def test_a_file_of_texts_becomes_a_table(folders: dict[str, Path], tmp_path: Path) -> None:
    cases = [
        {"text": "kaboom", "expected": ["bad"]},
        {"text": "all is well", "expected": []},
        {"text": "say hello", "expected": ["bad"]},
        {"text": "kaboom again", "expected": ["mail"]},
        *({"text": f"text {number}"} for number in range(200)),
    ]
    file = tmp_path / "cases.jsonl"
    file.write_text("\n".join(map(json.dumps, cases)))
    async with rows_gateway(folders) as gateway, served(gateway) as sockets:
        gateway.deploy_pack("strict", write(tmp_path / "strict"))
        gateway.put_tenant(Tenant(Meta("acme")))
        at = ("--grpc", f"127.0.0.1:{sockets.grpc_port}", "--api-key", API_KEY, "--pack", "strict")
        found: Any = json.loads(await fairway("test", str(file), *at, "-o", "json"))
        table = {one.pop("category"): one for one in found["categories"]}
        assert list(table) == ["bad", "mail", "mood"]
        counts = ("hits", "false_alarms", "misses", "rest", "precision", "recall")
        assert [table["bad"][name] for name in counts] == [1, 1, 1, 201, 0.5, 0.5]
        assert [table["mail"][name] for name in counts] == [0, 0, 1, 203, None, 0.0]
        shown = await fairway("test", str(file), *at)
        assert "bad\t1\t1\t1\t201\t50.0%\t50.0%" in shown
        file.write_text('{"text": "x", "expected": ["unknown"]}')
        assert "no category of the pack" in await fairway("test", str(file), *at, code=2)
        file.write_text("[]")
        assert "line 1" in await fairway("test", str(file), *at, code=2)
