"""The commands that set limits, budgets and prices, against a control plane."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fairway.cli.main import app, run
from services.core.manifest import sha256_of
from services.core.records import VersionRecord, version_key
from tests.integration.client.planes import Fleet, fleet

DIGEST = sha256_of(b"1")


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path) as found:
        await found.put(version_key("tiny", DIGEST), VersionRecord("tiny", DIGEST, 1, 0.0))
        yield found


async def said(admin: Fleet, command: str, *, code: int = 0) -> str:
    """Return what a command printed; fail unless it exits with ``code``."""
    out, err = io.StringIO(), io.StringIO()
    arguments = [*command.split(), "--controlplane", admin.planes[0].address, "--admin-key", "admin"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        ended = await asyncio.to_thread(run, app, arguments)
    assert (ended or 0) == code, (command, out.getvalue(), err.getvalue())
    return (out if code == 0 else err).getvalue()


async def document(admin: Fleet, command: str) -> Any:
    return json.loads(await said(admin, f"{command} -o json"))


async def test_a_budget_is_created_shown_changed_and_deleted(admin: Fleet) -> None:
    await said(admin, "tenants create acme")
    made = await said(
        admin,
        "budgets create all --tenant acme --per-month 100 --per-day 12.50 --label team=ml",
    )
    assert made.rstrip("\n").split("\t") == ["all", "acme", "0.00 / 100.00", "0.00 / 12.50", "USD"]
    shown = await document(admin, "budgets show all")
    assert (shown["limit_micros"], shown["day_limit_micros"]) == ("100000000", "12500000")
    await said(admin, "budgets update all --per-month 0.000001 --per-day 0")
    assert "0.00 / 0.000001\tno limit" in await said(admin, "budgets list")
    assert "not an amount" in await said(admin, "budgets update all --per-month 1e3", code=2)
    await said(admin, "budgets create users --tenant acme --each-user --per-day 1")
    assert "users\tacme each user\tno limit\t? / 1.00\tUSD" in await said(admin, "budgets list")
    for name in ("all", "users"):
        await said(admin, f"budgets delete {name} --yes")
    assert await document(admin, "budgets list") == {"budgets": []}


async def test_limits_of_a_tenant_its_users_and_a_key_are_set(admin: Fleet) -> None:
    made = await document(
        admin,
        "tenants create acme --requests-per-minute 60 --max-timeout 90s --user-tokens-per-minute 500",
    )
    assert (made["requests_per_minute"], made["max_timeout"]) == (60, "90s")
    assert made["user_limits"]["tokens_per_minute"] == "500"
    changed = await document(admin, "tenants update acme --user-max-output-tokens 100 --max-timeout 0")
    assert (changed["requests_per_minute"], changed.get("max_timeout")) == (60, None)
    assert changed["user_limits"]["tokens_per_minute"] == "500"
    assert changed["user_limits"]["max_output_tokens"] == 100
    made = await document(admin, "keys create ci --tenant acme --requests-per-minute 6")
    assert made["key"]["limits"]["requests_per_minute"] == 6
    changed = await document(admin, "keys update ci --max-context-tokens 4096")
    assert changed["limits"]["requests_per_minute"] == 6
    assert changed["limits"]["max_context_tokens"] == 4096
    assert "requests_per_minute=6,max_context_tokens=4096" in await said(admin, "keys list -o wide")


async def test_a_deployment_has_a_price(admin: Fleet) -> None:
    create = f"deployments create tiny --version {DIGEST} --input-price 0.50 --output-price 1.5"
    made = await document(admin, create)
    price = {"input_micros": "500000", "cached_micros": "500000", "output_micros": "1500000"}
    assert made["price"] == price, "cached tokens cost as much as others where no price is given"
    changed = await document(admin, "deployments update tiny --cached-price 0.05")
    assert changed["price"] == {**price, "cached_micros": "50000"}
    assert "0.50/0.05/1.50" in await said(admin, "deployments list -o wide")
    assert "cannot cost more" in await said(admin, "deployments update tiny --cached-price 0.60", code=4)
