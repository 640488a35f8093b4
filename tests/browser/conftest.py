"""An installation with tenants, keys, budgets, an objective, a rollout and requests, and its console."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from fairway.v1 import controlplane_pb2 as cp
from tests.browser.watched import CHROMIUM, WIDE, Watched, chromium
from tests.support.stack import Stack
from tests.support.updating import CHECKPOINT, admin_of, publish

ROLLED = "web"
ROLES = ("viewer", "operator", "auditor")


@dataclass(frozen=True, slots=True)
class Console:
    """``keys`` by role; those of a tenant are of acme."""

    stack: Stack
    url: str
    keys: dict[str, str]


@pytest.fixture(scope="session")
def console(tmp_path_factory: pytest.TempPathFactory, installations: None) -> Iterator[Console]:
    if not CHROMIUM.exists():
        pytest.skip(f"SKIPPED: there is no {CHROMIUM}: it runs where chromium and its driver are installed")
    folder = tmp_path_factory.mktemp("console")
    options = ("--set", "worker:FAIRWAY_MEMORY_BYTES=2147483648")
    with Stack.started(folder / "state", workers=2, replicas=1, options=options) as stack:
        for number, tag in enumerate(("stable", "next", "later")):
            version = folder / tag
            shutil.copytree(CHECKPOINT, version)
            (version / "README.md").write_text(f"Version {number}.\n")
            publish(stack, version, ROLLED, tag)
        keys = asyncio.run(prepare(stack))
        for number in range(12):
            complete(stack, keys["tenant"], f"def function_{number}(value):\n", 8 + 4 * number)
        yield Console(stack, stack.endpoints["console"], keys)


async def prepare(stack: Stack) -> dict[str, str]:
    """Make what the pages show; return a key of each role."""
    keys = {"admin": str(stack.endpoints["admin_key"])}
    async with admin_of(stack) as admin:
        tenant = cp.Tenant(
            metadata=cp.Metadata(name="acme"), display_name="Acme <b>Corp</b>", requests_per_minute=6000
        )
        await admin.tenants.create(tenant)
        budget = cp.Budget(
            metadata=cp.Metadata(name="acme"),
            tenant="acme",
            limit_micros=50_000_000,
            day_limit_micros=5_000_000,
        )
        await admin.budgets.create(budget)
        for role in ROLES:
            key = cp.Key(
                metadata=cp.Metadata(name=f"ops-{role}"), role=cp.KeyRole.Value(f"KEY_ROLE_{role.upper()}")
            )
            keys[role] = (await admin.keys.create(key)).secret
        for role in ("tenant", "tenant-admin"):
            kind = cp.KeyRole.Value("KEY_ROLE_" + role.upper().replace("-", "_"))
            key = cp.Key(metadata=cp.Metadata(name=f"acme.{role}"), role=kind, tenant="acme")
            keys[role] = (await admin.keys.create(key)).secret
        objective = cp.Objective(
            metadata=cp.Metadata(name="tiny-standard"),
            model=stack.model,
            availability=0.999,
            ttft=cp.LatencyTarget(seconds=2.0),
            itl=cp.LatencyTarget(seconds=0.2),
        )
        await admin.objectives.create(objective)
        deployed = cp.Deployment(
            metadata=cp.Metadata(name=ROLLED), model=ROLLED, version="stable", replicas=1, executor="null"
        )
        await admin.deployments.create(deployed)
        await admin.deployments.wait_ready(ROLLED, timeout_s=240)
    return keys


def complete(stack: Stack, key: str, prompt: str, tokens: int) -> None:
    body = {"model": stack.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{stack.http}/v1/completions", json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=120) as answer:
        answer.read()


@pytest.fixture(scope="session")
def chrome(console: Console) -> Iterator[Browser]:
    with sync_playwright() as playwright, chromium(playwright) as found:
        yield found


Visitor = Callable[[str], Watched]


@pytest.fixture
def visitor(chrome: Browser, console: Console) -> Iterator[Visitor]:
    """Return a function that opens a browser of a person with the key of a role; "" is a stranger."""
    opened: list[Watched] = []

    def open_as(role: str) -> Watched:
        context = chrome.new_context(viewport=WIDE, reduced_motion="reduce")
        found = Watched(context, console.url)
        opened.append(found)
        if role:
            found.sign_in(console.keys[role])
        return found

    yield open_as
    for each in opened:
        each.context.close()


def pictures(config: pytest.Config) -> Path | None:
    """Return the folder for the pictures of the documentation; None: none are made."""
    found = config.getoption("--pictures")
    return Path(found) if found else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", default="", help="Folder for the pictures of docs/operations/console.md.")
