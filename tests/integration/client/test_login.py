"""`fairway login` at a provider, and what then uses the login: commands and clients without a key."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fairway.client import AdminClient, Client, Options, Unauthenticated
from fairway.login import LoginFailed, load, log_in, login_file, save, valid_login
from fairway.v1 import controlplane_pb2, controlplane_pb2_grpc
from services.adapters.memory.store import MemoryStore
from services.controlplane.audit_reads import AuditReader
from services.controlplane.service import ControlPlaneService
from services.controlplane.servicer import ControlPlaneServicer
from services.rpc.server import RpcServer, RpcService
from simulator.stores.limiter import MemoryLimiter
from tests.integration.client.scripted import ScriptedGateway
from tests.integration.controlplane.plane import SEALER, ScriptedUsage, TurnedClock
from tests.support.credentials import Credentials
from tests.support.memory_ledger import MemoryLedger
from tests.support.no_plane import NoPlane
from tests.support.oidc_provider import CLIENT, OidcProvider, oidc_provider
from tests.support.registry import TOKEN
from tests.support.stack import ROOT
from tests.support.waiting import until

ASKED = {"scope": "openid"}


@pytest.fixture
def provider() -> Iterator[OidcProvider]:
    with oidc_provider() as found:
        yield found


@asynccontextmanager
async def control_plane(provider: OidcProvider) -> AsyncIterator[str]:
    """Yield the address of a control plane that takes the provider's tokens."""
    credentials, clock = Credentials(provider), TurnedClock()
    store, nothing, limiter = MemoryStore(clock), None, MemoryLimiter(clock)
    service = ControlPlaneService(store, clock, SEALER, limiter)
    require = credentials.directory.require_current
    queues: Any = nothing
    audit = AuditReader(store, MemoryLedger())
    servicer = ControlPlaneServicer(
        service,
        store,
        queues,
        ScriptedUsage(),
        *[NoPlane()] * 4,
        audit=audit,
        require_current=require,
    )
    server = RpcServer(
        [
            RpcService(
                controlplane_pb2.DESCRIPTOR.services_by_name["ControlPlaneService"],
                controlplane_pb2_grpc.add_ControlPlaneServiceServicer_to_server,
                servicer,
            )
        ],
        listen="127.0.0.1:0",
        internal_token=TOKEN,
        new_incident=lambda: "inc",
        authenticate=credentials.directory.authenticate,
    )
    await server.start()
    reading = asyncio.create_task(credentials.tokens.run())
    await until(lambda: not credentials.tokens.problem())
    yield f"127.0.0.1:{server.port}"
    await server.stop(0)
    reading.cancel()
    await asyncio.wait({reading})


@dataclass(frozen=True, slots=True)
class Home:
    """A user's machine."""

    folder: Path

    @property
    def login(self) -> Path:
        return self.folder / "fairway" / "login.json"

    async def run(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        """Run a command as a process; return stdout and stderr."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("FAIRWAY_")}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "fairway.cli.main",
            *arguments,
            cwd=ROOT,
            env={**kept, "XDG_CONFIG_HOME": str(self.folder)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == code, (arguments, out, err)
        return out.decode(), err.decode()

    def expire(self, left_s: float = -1.0) -> None:
        found = load(self.login)
        assert found is not None
        save(self.login, replace(found, expire_unix_s=time.time() + left_s))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Home(tmp_path / "config")


async def test_a_login_is_confirmed_used_renewed_and_revoked(
    provider: OidcProvider, home: Home, tmp_path: Path
) -> None:
    async with control_plane(provider) as address:
        to = ("--controlplane", address, "--state-dir", str(tmp_path / "none"))
        assert "NO_KEY" in (await home.run("whoami", *to, code=5))[1]
        shown = (await home.run("login", "--issuer", provider.issuer, "--client-id", CLIENT))[1]
        assert "ABCD-EFGH" in shown
        assert provider.requests.count("/token") == 2  # it was pending once
        assert stat.S_IMODE(home.login.stat().st_mode) == 0o600
        assert stat.S_IMODE(home.login.parent.stat().st_mode) == 0o700

        out, _ = await home.run("whoami", *to)
        assert out.startswith(f"admin ann by {provider.issuer} until ")
        found = json.loads((await home.run("whoami", "-o", "json", *to))[0])
        assert (found["role"], found["subject"], found["key"]) == ("KEY_ROLE_ADMIN", "ann", "token:ann")
        await home.run("tenants", "create", "acme", *to)
        assert "acme" in (await home.run("tenants", "list", *to))[0]

        home.expire()
        await asyncio.gather(*(home.run("whoami", *to) for _ in range(2)))
        assert provider.requests.count("/token") == 3  # one of them renewed it for both
        home.expire()
        provider.refused = "invalid_grant"
        assert "LOGIN_ENDED" in (await home.run("whoami", *to, code=5))[1]
        provider.refused = ""

        await home.run("login")  # The provider is the same.
        refresh = provider.refreshes.copy()
        await home.run("logout")
        assert provider.requests[-1] == "/revoke"
        assert len(refresh - provider.refreshes) == 1
        assert not home.login.exists()
        assert "Nobody" in (await home.run("logout"))[1]


async def test_clients_without_a_key_use_the_login(provider: OidcProvider, home: Home) -> None:
    with pytest.raises(ValueError, match="nobody is logged in"):
        AdminClient("127.0.0.1:1")
    with pytest.raises(ValueError, match="nobody is logged in"):
        Client("127.0.0.1:1")
    provider.lifetime_s = 61  # renewed after a second
    login = log_in(provider.issuer, CLIENT, asked=ASKED, show=lambda page, code: None)
    save(login_file(), login)
    async with control_plane(provider) as address, AdminClient(address) as admin:
        assert (await admin.caller()).subject == "ann"
        home.expire(30)
        before = provider.requests.count("/token")

        async def renewed() -> bool:
            await admin.caller()
            return provider.requests.count("/token") > before

        async with asyncio.timeout(30):
            while not await renewed():
                await asyncio.sleep(0.05)
        provider.refused = "invalid_grant"
        home.expire()
        with pytest.raises(Unauthenticated) as caught:
            async with asyncio.timeout(30):
                while True:
                    await admin.caller()
                    await asyncio.sleep(0.05)
        assert caught.value.reason == "LOGIN_ENDED"


async def test_a_session_opens_another_stream_for_a_renewed_login(
    provider: OidcProvider, home: Home, gateways: tuple[ScriptedGateway, ScriptedGateway]
) -> None:
    gateway = gateways[0]
    provider.lifetime_s = 62  # due after 2 s at the earliest
    save(login_file(), log_in(provider.issuer, CLIENT, asked=ASKED, show=lambda page, code: None))
    async with Client(gateway.address) as client, client.session() as session:

        async def generated() -> int:
            stream = session.generate("tiny", "hi", Options(max_output_tokens=2))
            return len([event async for event in stream])

        await generated()
        before = provider.requests.count("/token")
        assert gateway.sessions == 1
        async with asyncio.timeout(30):
            while gateway.sessions == 1:
                await generated()
                await asyncio.sleep(0.05)
        assert provider.requests.count("/token") == before + 1


def test_polling_slows_down_when_asked_to(provider: OidcProvider) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        provider.refused = "slow_down" if len(waits) == 1 else ""

    provider.pending = 2
    log_in(provider.issuer, CLIENT, asked=ASKED, show=lambda page, code: None, sleep=sleep)
    assert waits == [0.01, 5.01, 5.01, 5.01]


@pytest.mark.parametrize(
    ("problem", "match"),
    [("access_denied", "access_denied"), ("expired_token", "expired_token"), ("invalid_client", "refused")],
)
def test_a_refused_login_says_why(provider: OidcProvider, problem: str, match: str) -> None:
    provider.refused = problem
    with pytest.raises(LoginFailed, match=match):
        log_in(provider.issuer, CLIENT, asked=ASKED, show=lambda page, code: None)


def test_a_code_that_nobody_confirms_ends(provider: OidcProvider) -> None:
    now_s = [0.0]
    provider.pending = 1000

    def sleep(seconds: float) -> None:
        now_s[0] += 10

    with pytest.raises(LoginFailed, match="expired before"):
        log_in(
            provider.issuer,
            CLIENT,
            asked=ASKED,
            show=lambda page, code: None,
            sleep=sleep,
            now=lambda: now_s[0],
        )
    assert provider.requests.count("/token") == 6  # the code lives 60 s


def test_another_issuer_than_the_named_one_is_refused(provider: OidcProvider) -> None:
    with pytest.raises(LoginFailed, match="no OpenID provider"):
        log_in(provider.issuer + "/", CLIENT, asked=ASKED, show=lambda page, code: None)


def test_a_valid_token_outlives_an_absent_provider(provider: OidcProvider, home: Home) -> None:
    save(home.login, log_in(provider.issuer, CLIENT, asked=ASKED, show=lambda page, code: None))
    home.expire(30)
    provider.down = True
    found = valid_login(home.login)
    assert found is not None
    home.expire(-1)
    with pytest.raises(LoginFailed, match="503"):
        valid_login(home.login)
