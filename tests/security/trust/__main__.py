"""`make drill-trust`: every certificate and key is replaced under load, and nothing opens what it must not.

One installation whose faces have TLS, under streams and completions with keys and tokens:

- the certificates, their authority, the keys of the tokens' provider, those of the audit log, of tenants'
  data, and those that wrap these are replaced: no request fails, what was stored before is read, and each
  acknowledged change is in the log, by a client written from its specification;
- every RPC and every route is called with no credential, spoiled ones, lower roles, another tenant's key, a
  worker's certificate, and certificates that open nothing;
- the processor time of a refused call is compared with that of a completion of 16 tokens.

A second installation without TLS serves the same requests in turn, for the ratio of the times to first token.
The last line is ``RESULT {json}``. Exits 0 when nothing failed, was opened or lost.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # read when grpc is imported: it starts processes
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import argparse
import asyncio
import contextlib
import json
import logging
import secrets
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import psutil
import structlog

from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc
from services.core.records import KeyRole
from services.runtime.clock import SystemClock
from tests.conftest import Server
from tests.security.drills.canary import Canary, CanaryFailed, generation, grpc_stream
from tests.security.trust.matrix import (
    OTHER,
    OWN,
    Callers,
    Cells,
    Https,
    certificate_cells,
    route_cells,
    rpc_cells,
    tenant_cells,
)
from tests.support.audited_plane import times_of_changes, verified
from tests.support.oidc_provider import AUDIENCE, OidcProvider, oidc_provider
from tests.support.stack import Stack, fairway, metadata, processes
from tests.support.updating import admin_of

CLIENTS: Final = 2
REFRESH_S: Final = 10.0  # the shortest period in which the roles read the provider's keys
SETTLE_S: Final = 3.0
KEY_CACHE_S: Final = 1.0
PROMPT: Final = "def f(n):\n"
STREAMS: Final = 40  # on each installation, for the times to first token
SERVED: Final = 40
REFUSED: Final = 400
SERVED_TOKENS: Final = 16
MAX_TTFT_RATIO: Final = 1.1
MAX_REFUSED_RATIO: Final = 1 / 20
MAX_AUDIT_MS: Final = 5.0
now_s = SystemClock().monotonic_s


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextlib.asynccontextmanager
async def face_of(stack: Stack) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the gateway as a client opens it: with the authorities of now, without a certificate."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    if not stack.http.startswith("https"):
        opened = grpc.aio.insecure_channel(stack.endpoints["grpc"], options)
    else:
        roots = (Path(stack.endpoints["tls_dir"]) / "ca.crt").read_bytes()
        opened = grpc.aio.secure_channel(
            stack.endpoints["grpc"], grpc.ssl_channel_credentials(roots), options
        )
    async with opened as channel:
        yield channel


@dataclass(slots=True)
class Load:
    """Clients of both faces with keys and tokens, and an operator who makes tenants."""

    stack: Stack
    token: Callable[[], str]
    served: int = 0
    acknowledged: list[str] = field(default_factory=list)
    stored: dict[str, object] = field(default_factory=dict)  # responses by id
    failures: list[str] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for work in (self._streams, self._completions, self._responses):
                for _ in range(CLIENTS):
                    group.create_task(self._repeat(work, stopping))
            group.create_task(self._repeat(self._change, stopping))
            try:
                yield
            finally:
                stopping.set()

    async def _repeat(self, work: Callable[[], Awaitable[None]], stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            try:
                await work()
                self.served += 1
            except grpc.aio.AioRpcError as error:
                self.failures.append(f"{error.code().name} {error.details()}"[:200])
            except (CanaryFailed, OSError, ValueError, AssertionError) as error:
                self.failures.append(f"{type(error).__name__} {error}"[:200])

    async def _streams(self) -> None:
        """Streams of a client that opens a channel, with a key and a token in turn."""
        async with face_of(self.stack) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for credential in (self.stack.api_key, self.token()):
                ids, _ = await grpc_stream(
                    stub, generation(self.stack.model, PROMPT, 24), credential, Canary("")
                )
                assert len(ids) == 24, f"{len(ids)} of 24 tokens"

    async def _completions(self) -> None:
        body = {"model": self.stack.model, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
        face, data = Https(self.stack), json.dumps(body).encode()
        for credential in (self.stack.api_key, self.token()):
            status, said = await asyncio.to_thread(face.ask, "POST", "/v1/completions", credential, data)
            assert status == 200, f"{status} {said[:120]!r}"

    async def _responses(self) -> None:
        """Store a response, and read the first one again."""
        body = {"model": self.stack.model, "input": PROMPT, "max_output_tokens": 8, "store": True}
        face, data = Https(self.stack), json.dumps(body).encode()
        status, said = await asyncio.to_thread(face.ask, "POST", "/v1/responses", self.stack.api_key, data)
        assert status == 200, f"{status} {said[:120]!r}"
        made = json.loads(said)
        self.stored[made["id"]] = made["output"]
        assert not (wrong := await self.unread(list(self.stored)[:1])), wrong

    async def unread(self, ids: Iterable[str]) -> list[str]:
        """Return which stored responses are not read as they were written."""
        found, face = [], Https(self.stack)
        for each in ids:
            path = f"/v1/responses/{each}"
            status, said = await asyncio.to_thread(face.ask, "GET", path, self.stack.api_key)
            if status != 200 or json.loads(said)["output"] != self.stored[each]:
                found.append(f"{each}: {status} {said[:120]!r}")
        return found

    async def _change(self) -> None:
        name = f"made-{len(self.acknowledged)}"
        async with admin_of(self.stack) as admin:
            await admin.tenants.create(cp.Tenant(metadata=cp.Metadata(name=name)))
        self.acknowledged.append(name)
        await asyncio.sleep(0.1)


# --- rotations ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Keys:
    """What is replaced. ``signing``: place of the key of new tokens among those that are published."""

    stack: Stack
    provider: OidcProvider
    signing: int = 0

    def token(self) -> str:
        key = self.provider.keys[self.signing]
        return self.provider.token(key=key, groups=["tenants"], tenant=OWN)

    async def leaves(self) -> None:
        await self._certs("rotate")

    async def authority(self) -> None:
        await self._certs("rotate", "--ca")

    async def token_keys(self) -> None:
        """Publish a key, sign with it once every role has read it, and withdraw the one before."""
        self.provider.rotate(keep=1)
        self.signing = 1
        await asyncio.sleep(REFRESH_S + SETTLE_S)
        self.signing = 0
        del self.provider.keys[1:]
        await asyncio.sleep(REFRESH_S + SETTLE_S)

    async def audit_key(self) -> None:
        """Put a key before the one that signs the audit log."""
        path = self.stack.state / "secrets" / "audit_key"
        path.write_text(f"{secrets.token_hex(32)}\n{path.read_text()}")
        await asyncio.sleep(SETTLE_S)

    async def tenants_key(self) -> None:
        before = (await self._data_keys())["default"].generations
        async with admin_of(self.stack) as admin:
            await admin.tenants.rotate_key("default")
        while (await self._data_keys())["default"].generations == before:
            await asyncio.sleep(0.5)

    async def wrapping_key(self) -> None:
        """Add a key behind the present one, let it wrap every key of a tenant, and remove the former one."""
        path, key = self.stack.state / "secrets" / "record_keys", secrets.token_hex(32)
        former, before = path.read_text(), {each.wrapper for each in (await self._data_keys()).values()}
        path.write_text(f"{former.rstrip()}\n{key}\n")
        await asyncio.sleep(SETTLE_S)
        path.write_text(f"{key}\n{former}")
        while before & {each.wrapper for each in (await self._data_keys()).values()}:
            await asyncio.sleep(0.5)
        path.write_text(f"{key}\n")

    async def _data_keys(self) -> dict[str, cp.DataKeyStatus]:
        """Return the state of the keys of tenants that have one, by tenant."""
        async with admin_of(self.stack) as admin:
            found = {name: (await admin.tenants.get(name)).data_key for name in ("default", OWN, OTHER)}
        return {name: each for name, each in found.items() if each.generations}

    async def _certs(self, *arguments: str) -> None:
        await asyncio.to_thread(fairway, "certs", *arguments, "--state-dir", str(self.stack.state))


# A kind of key that the installation gains is a line here.
ROTATIONS: Final[Mapping[str, Callable[[Keys], Awaitable[None]]]] = {
    "certificates": Keys.leaves,
    "authority": Keys.authority,
    "keys of tokens": Keys.token_keys,
    "keys of the audit log": Keys.audit_key,
    "a tenant's data key": Keys.tenants_key,
    "the key that wraps tenants' keys": Keys.wrapping_key,
}


async def rotate_all(stack: Stack, keys: Keys) -> Load:
    """Replace everything under load; return what the clients observed."""
    load = Load(stack, keys.token)
    async with load.running():
        await asyncio.sleep(SETTLE_S)
        for name, rotation in ROTATIONS.items():
            served, began_s = load.served, now_s()
            await rotation(keys)
            await asyncio.sleep(SETTLE_S)
            say(f"{name}: replaced in {now_s() - began_s:.0f} s, {load.served - served} served meanwhile")
    return load


def audit_lost(stack: Stack, acknowledged: Iterable[str], folder: Path) -> list[str]:
    """Return the changes without an entry, in the log as an independent client verifies it."""
    fairway("audit", "export", str(folder), "--state-dir", str(stack.state))
    objects = {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    entries = verified(objects)
    logged = {
        each["resource"].rpartition("/")[2]
        for each in entries
        if each["outcome"] == "OK" and "CreateTenant" in each["method"]
    }
    return [name for name in acknowledged if name not in logged]


# --- what it costs ------------------------------------------------------------------------------


def _processor_s(stack: Stack) -> float:
    total = 0.0
    for process in processes(stack.state):
        with contextlib.suppress(psutil.Error):
            used = process.cpu_times()
            total += used.user + used.system
    return total


async def refused_cost_ratio(stack: Stack, callers: Callers) -> float:
    """Return the processor time of a refused call over that of a completion, in all processes together."""
    began_s, before = now_s(), _processor_s(stack)
    await asyncio.sleep(5.0)
    idle = (_processor_s(stack) - before) / (now_s() - began_s)

    async def cost_s(credentials: list[str], count: int) -> float:
        async with face_of(stack) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            wanted = pb.CompleteRequest(generation=generation(stack.model, PROMPT, SERVED_TOKENS))

            async def one(number: int) -> None:
                sender = metadata(credentials[number % len(credentials)])
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await stub.Complete(wanted, metadata=sender, timeout=30)

            await one(0)
            began_s, before = now_s(), _processor_s(stack)
            for number in range(count):
                await one(number)
            return (_processor_s(stack) - before - idle * (now_s() - began_s)) / count

    spoiled = [callers.bad[name] for name in ("garbage", "expired key", "token expired")]
    refused_s = await cost_s(spoiled, REFUSED)
    served_s = await cost_s([stack.api_key], SERVED)
    say(f"processor time: {1000 * refused_s:.2f} ms refused, {1000 * served_s:.2f} ms served")
    return refused_s / served_s


async def ttft_ratio(secured: Stack, plain: Stack) -> float:
    """Return the median time to first token with TLS over that without, of streams in turn."""
    times: dict[str, list[float]] = {secured.http: [], plain.http: []}
    async with contextlib.AsyncExitStack() as opened:
        stubs = {
            each.http: inference_pb2_grpc.InferenceServiceStub(
                await opened.enter_async_context(face_of(each))
            )
            for each in (secured, plain)
        }
        for number in range(STREAMS + 2):
            for each in (secured, plain):
                began_s, first_s = now_s(), 0.0
                request = pb.GenerateRequest(generation=generation(each.model, f"{number} {PROMPT}", 4))
                async for event in stubs[each.http].Generate(request, metadata=metadata(each.api_key)):
                    if event.HasField("chunk") and not first_s:
                        first_s = now_s() - began_s
                if number >= 2:  # the first ones open the connections
                    times[each.http].append(first_s)
    medians = {name: statistics.median(each) for name, each in times.items()}
    say(", ".join(f"{name}: {1000 * each:.1f} ms to the first token" for name, each in medians.items()))
    return medians[secured.http] / medians[plain.http]


async def audit_added_p99_ms(folder: Path) -> float:
    etcd = Server("etcd", folder)
    folder.mkdir()
    await asyncio.to_thread(etcd.start)
    try:
        found = (await times_of_changes(etcd.address, folder))["p99"]
    finally:
        etcd.kill()
    return found["with_ms"] - found["without_ms"]


# --- the drill ----------------------------------------------------------------------------------


async def drill(secured: Stack, provider: OidcProvider, folder: Path) -> tuple[dict[str, float], list[str]]:
    """Run it on one installation; return the figures, and what was not as it must be."""
    keys = Keys(secured, provider)
    callers = await Callers.created(secured, provider)
    refused_ratio = await refused_cost_ratio(secured, callers)
    load = await rotate_all(secured, keys)
    unread = await load.unread(load.stored)
    say(f"{len(load.stored)} responses stored, {len(unread)} not read afterwards")
    say(f"{load.served} served, {len(load.acknowledged)} changes, {len(load.failures)} failed")
    lost = await asyncio.to_thread(audit_lost, secured, load.acknowledged, folder / "log")
    cells = Cells()
    callers = callers.renewed(provider)
    for kind, sending in (
        ("RPCs with credentials", rpc_cells(secured, callers, cells)),
        ("resources of another tenant", tenant_cells(secured, callers, cells)),
        ("RPCs with certificates", certificate_cells(secured, cells, folder)),
        ("routes", asyncio.to_thread(route_cells, secured, callers, cells)),
    ):
        before = cells.count
        await sending
        say(f"{kind}: {cells.count - before} cells")
    wrong = [*load.failures, *unread, *cells.unexpected, *(f"no entry of {each}" for each in lost)]
    figures = {
        "rotations": len(ROTATIONS),
        "failed": len(load.failures),
        "stored": len(load.stored),
        "unread": len(unread),
        "cells": cells.count,
        "unexpected": len(cells.unexpected),
        "audit_lost": len(lost),
        "refused_cost_ratio": round(refused_ratio, 4),
    }
    return figures, wrong


def run(folder: Path) -> tuple[dict[str, float], list[str]]:
    with oidc_provider() as provider:
        settings = {
            "issuer": provider.issuer,
            "audience": AUDIENCE,
            "jwks": provider.jwks_url,
            "roles": {f"{role}s": f"{role}" for role in KeyRole},
            "refresh_s": REFRESH_S,
        }
        (folder / "oidc.json").write_text(json.dumps(settings))
        # A cached key would hide that its wrapped form opens no more.
        variables = {
            "FAIRWAY_OIDC_FILE": str(folder / "oidc.json"),
            "FAIRWAY_KEY_CACHE_S": f"{KEY_CACHE_S:g}",
        }
        options = ("--host", "0.0.0.0")
        with Stack.started(
            folder / "tls", workers=1, replicas=1, settings=variables, options=options
        ) as secured:
            figures, wrong = asyncio.run(drill(secured, provider, folder))
            with Stack.started(folder / "plain", workers=1, replicas=1, options=("--insecure",)) as plain:
                figures["ttft_ratio"] = round(asyncio.run(ttft_ratio(secured, plain)), 3)
    figures["audit_added_p99_ms"] = round(asyncio.run(audit_added_p99_ms(folder / "etcd")), 2)
    return figures, wrong


def main(arguments: list[str]) -> int:
    argparse.ArgumentParser(prog="python -m tests.security.trust").parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory(prefix="fairway-trust-") as folder:
        figures, wrong = run(Path(folder))
    for each in wrong:
        say(f"  {each}")
    say(f"RESULT {json.dumps(figures)}")
    held = (
        figures["ttft_ratio"] <= MAX_TTFT_RATIO
        and figures["refused_cost_ratio"] <= MAX_REFUSED_RATIO
        and figures["audit_added_p99_ms"] <= MAX_AUDIT_MS
    )
    return 0 if held and not wrong else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
