"""Certificates that are replaced while servers, channels and stores use them."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import uvloop
from cryptography.hazmat.primitives import serialization
from spiffe._proto import workload_pb2, workload_pb2_grpc

from fairway.cli import embedded
from fairway.cli.authority import Authority
from fairway.tls import TlsIdentity, read_folder
from fairway.v1 import worker_pb2, worker_pb2_grpc
from services.adapters.etcd.store import EtcdStore
from services.adapters.grpc.client_stream import GrpcStreams
from services.adapters.redis.limiter import RedisLimiter
from services.adapters.redis.topologies import RedisAccess
from services.core.errors import InvalidInput, StoreUnavailable, Unauthenticated
from services.gateway.faces.openai.server import HttpServer
from services.ports.store import KeyChanged, Put
from services.ports.streams import StreamLost
from services.rpc.channel import MAX_CHANNELS, RoleChannel, RoleChannels
from services.rpc.methods import EXECUTE, FOLLOW
from services.rpc.server import GrpcServerStream, RpcServer, RpcService, ServerTls
from services.runtime.certificates import FolderCertificates, WorkloadCertificates, renewed_context
from services.runtime.clock import SystemClock
from services.runtime.config import ConfigError
from services.runtime.telemetry.metrics import Metrics
from services.runtime.telemetry.server import TelemetryServer
from tests.conftest import Server
from tests.support import local_servers
from tests.support.certificates import HeldCertificates, authority_in, identity_of, issued
from tests.support.waiting import until

TOKEN = "t" * 40
CHECK = "/grpc.health.v1.Health/Check"


class LookingClock(SystemClock):
    """Each reading is seconds later, so that files are looked at whenever they are used."""

    _now_s = 0.0

    def monotonic_s(self) -> float:
        self._now_s += 2.0
        return self._now_s


class Echo(worker_pb2_grpc.WorkerServiceServicer):
    async def Execute(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # type: ignore[override]
        stream: Any = GrpcServerStream(request_iterator, context)
        with contextlib.suppress(StreamLost):
            while True:
                await stream.read(60.0)
                await stream.write(worker_pb2.ExecuteResponse())


class Rig:
    """A worker with certificates in a folder, and a gateway's side of the wire."""

    def __init__(self, root: Path) -> None:
        self.authority = authority_in(root)
        folders = {role: issued(self.authority, role).folder for role in ("worker", "gateway")}
        self.server_certificates = FolderCertificates(folders["worker"], LookingClock())
        self.certificates = FolderCertificates(folders["gateway"], LookingClock())
        self.refused: list[str] = []
        service = RpcService(
            worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
            worker_pb2_grpc.add_WorkerServiceServicer_to_server,
            Echo(),  # type: ignore[abstract]
        )
        self.server = RpcServer(
            [service],
            listen="127.0.0.1:0",
            internal_token=TOKEN,
            new_incident=lambda: "inc_1",
            tls=ServerTls(self.server_certificates, SystemClock(), refused=self.refused.append),
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    async def stream(self, identity: TlsIdentity | None = None) -> Any:
        certificates = self.certificates if identity is None else HeldCertificates(identity)
        return await GrpcStreams(TOKEN, certificates).open(self.address, EXECUTE, timeout_s=5.0)

    def connections(self) -> int:
        found = psutil.Process().net_connections("tcp")
        return sum(
            each.status == psutil.CONN_ESTABLISHED
            and bool(each.raddr)
            and each.raddr.port == self.server.port
            for each in found
        )


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    found = Rig(tmp_path / "certs")
    await found.server.start()
    guarding = asyncio.create_task(found.server.guard_connections(SystemClock()))
    yield found
    await found.server.stop(0)
    guarding.cancel()
    await asyncio.wait({guarding})


async def echo(stream: Any) -> None:
    await stream.write(worker_pb2.ExecuteRequest())
    await stream.read(10.0)


async def check(channel: grpc.aio.Channel) -> bytes:
    method: Any = channel.unary_unary(CHECK)
    answer: bytes = await method(b"", timeout=10)
    return answer


async def test_streams_go_on_over_rotations_and_new_ones_have_the_new_certificates(rig: Rig) -> None:
    before = {each: each.current() for each in (rig.server_certificates, rig.certificates)}
    channel = RoleChannel(rig.address, "worker", rig.certificates)
    first = await rig.stream()
    await echo(first)
    assert await check(channel())
    rig.authority.renew()
    second = await rig.stream()
    await echo(second)
    assert await check(channel())
    steps: list[str] = []

    def pause(done: str) -> None:
        steps.append(done)

    await asyncio.to_thread(rig.authority.rotate, pause)
    assert len(steps) == 3
    third = await rig.stream()
    for stream in (first, second, third):
        await echo(stream)
    assert await check(channel())
    for source, old in before.items():
        present = source.current()
        assert present.leaf.serial != old.leaf.serial
        assert present.roots_pem.count(b"BEGIN") == 1
        assert present.roots_pem != old.roots_pem
    for stream in (first, second, third):
        await stream.close()
    await channel.close()


@pytest.mark.parametrize(("reason", "text"), [("revoked", "was revoked"), ("expired", r"expired \d+ s ago")])
async def test_open_streams_end_with_their_certificate(rig: Rig, reason: str, text: str) -> None:
    """The other streams of the server go on, and a new certificate opens one at once."""
    life_days = 1.0 if reason == "revoked" else 8 / 86400
    identity = identity_of(rig.authority, "gateway", "other", days=life_days)
    ended, other = await rig.stream(identity), await rig.stream()
    await echo(ended)
    await echo(other)
    if reason == "revoked":
        await asyncio.to_thread(rig.authority.revoke, identity.leaf.serial)
    with pytest.raises(Unauthenticated, match=text):
        await ended.read(20.0)
    await echo(other)
    assert rig.refused == [reason]
    with pytest.raises(StreamLost if reason == "expired" else Unauthenticated):
        await echo(await rig.stream(identity))
    renewed = await rig.stream(identity_of(rig.authority, "gateway", "other"))
    await echo(renewed)
    for stream in (ended, other, renewed):
        await stream.close()


async def test_each_step_of_an_authoritys_rotation_serves_those_that_have_not_seen_it(rig: Rig) -> None:
    """A process reads its files some time after they were written: one step late, it still works."""
    stale = HeldCertificates(rig.certificates.current())
    seen: list[str] = []

    async def works() -> None:
        channel = RoleChannel(rig.address, "worker", stale)
        assert await check(channel())
        await channel.close()

    loop = asyncio.get_running_loop()

    def pause(done: str) -> None:
        if len(seen) < 2:
            asyncio.run_coroutine_threadsafe(works(), loop).result(20)
        seen.append(done)
        stale.identity = rig.certificates.current()

    await asyncio.to_thread(rig.authority.rotate, pause)
    await works()


async def test_a_replaced_channel_closes_its_connection_after_its_last_call(rig: Rig) -> None:
    channel = RoleChannel(rig.address, "worker", rig.certificates)
    call: Any = channel().stream_stream(
        EXECUTE.path,
        request_serializer=worker_pb2.ExecuteRequest.SerializeToString,
        response_deserializer=worker_pb2.ExecuteResponse.FromString,
    )(metadata=(("authorization", f"Bearer {TOKEN}"),))
    await call.write(worker_pb2.ExecuteRequest())
    await call.read()
    rig.authority.renew()
    assert await check(channel())
    await until(lambda: rig.connections() == 2)
    await call.write(worker_pb2.ExecuteRequest())
    assert await call.read() is not grpc.aio.EOF
    call.cancel()
    del call
    await until(lambda: rig.connections() == 1)
    assert await check(channel())
    await channel.close()


async def test_a_channel_to_a_process_that_was_not_called_lately_ends_with_its_last_call(rig: Rig) -> None:
    channels = RoleChannels(lambda address: rig.certificates)
    call = channels(rig.address, "worker")().stream_stream(
        EXECUTE.path,
        request_serializer=worker_pb2.ExecuteRequest.SerializeToString,
        response_deserializer=worker_pb2.ExecuteResponse.FromString,
    )(metadata=(("authorization", f"Bearer {TOKEN}"),))
    await call.write(worker_pb2.ExecuteRequest())
    await call.read()
    for number in range(MAX_CHANNELS):
        channels(f"127.0.0.1:{number + 1}", "worker")
    assert len(channels) == MAX_CHANNELS
    await call.write(worker_pb2.ExecuteRequest())
    assert await call.read() is not grpc.aio.EOF
    call.cancel()
    del call
    await until(lambda: rig.connections() == 0)
    assert await check(channels(rig.address, "worker")())
    await channels.close()
    assert not len(channels)


async def test_the_servers_role_is_verified_and_not_its_address(rig: Rig) -> None:
    stream = await GrpcStreams(TOKEN, rig.certificates).open(rig.address, FOLLOW, timeout_s=5.0)
    with pytest.raises(StreamLost, match="certificate is of another role"):
        await stream.read(10.0)
    await stream.close()


async def test_files_that_do_not_fit_leave_the_certificate_in_use(rig: Rig) -> None:
    before = rig.server_certificates.current()
    key = rig.authority.root / "worker" / "tls.key"
    fits = key.read_bytes()
    key.write_bytes((rig.authority.root / "gateway" / "tls.key").read_bytes())
    assert rig.server_certificates.current() is before
    key.write_bytes(b"nothing")
    assert rig.server_certificates.current() is before
    key.write_bytes(fits)
    assert rig.server_certificates.current().leaf == before.leaf
    (rig.authority.root / "worker" / "tls.crt").unlink()
    with pytest.raises(ConfigError, match=r"tls.crt does not exist; `fairway certs issue`"):
        FolderCertificates(rig.authority.root / "worker", SystemClock())


@contextlib.contextmanager
def etcd_with_tls(folder: Path, authority: Authority, url: str = "") -> Iterator[str]:
    """Yield the address of an etcd that takes certificates of the authorities at its start only."""
    own = authority.root / "etcd"
    if not own.exists():
        issued(authority, "etcd")
    peer = local_servers.free_port()
    data = folder / "etcd-data"
    data.mkdir(mode=0o700, exist_ok=True)
    url = url or f"https://127.0.0.1:{local_servers.free_port()}"
    command = [
        *embedded.etcd_command(data, url, f"http://127.0.0.1:{peer}", fsync=False),
        f"--cert-file={own / 'tls.crt'}",
        f"--key-file={own / 'tls.key'}",
        f"--trusted-ca-file={own / 'ca.crt'}",
        "--client-cert-auth",
    ]
    with (folder / "etcd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=local_servers.die_with_parent)
        try:
            yield url
        finally:
            process.kill()
            process.wait(timeout=10)


async def test_etcd_over_tls_keeps_watches_over_a_rotation(tmp_path: Path) -> None:
    authority = authority_in(tmp_path / "certs")
    folder = issued(authority, "scheduler").folder
    with etcd_with_tls(tmp_path, authority) as url:
        store = EtcdStore([url], SystemClock(), certificates=FolderCertificates(folder, LookingClock()))
        await written(store, "/fairway/v1/a", b"1")
        found = await store.list("/fairway/v1/")
        async with aclosing(store.watch("/fairway/v1/", found.revision)) as batches:
            seen = asyncio.create_task(anext(batches))
            await asyncio.sleep(0)
            authority.renew()
            await store.commit([Put("/fairway/v1/b", b"2")])
            async with asyncio.timeout(20):
                while not (batch := await seen).events:
                    seen = asyncio.create_task(anext(batches))
            assert [event.entry.key for event in batch.events if isinstance(event, KeyChanged)] == [
                "/fairway/v1/b"
            ]
        await store.close()
        foreign = HeldCertificates(identity_of(authority_in(tmp_path / "foreign"), "scheduler"))
        stranger = EtcdStore([url], SystemClock(), certificates=foreign, timeout_s=2.0)
        with pytest.raises(StoreUnavailable):
            await stranger.get("/fairway/v1/a")
        await stranger.close()
    with pytest.raises(InvalidInput, match="FAIRWAY_TLS_DIR"):
        EtcdStore([url], SystemClock())
    with pytest.raises(InvalidInput, match="all https:// or none"):
        EtcdStore([url, "127.0.0.1:2379"], SystemClock())


async def test_stores_that_missed_a_rotation_return_with_their_restart(tmp_path: Path) -> None:
    """etcd reads its authorities at its start. Roles wait for it, and one that reads late returns as well."""
    authority = authority_in(tmp_path / "certs")
    roles = {role: issued(authority, role).folder for role in ("scheduler", "gateway")}
    late = HeldCertificates(read_folder(roles["gateway"]))
    prompt = FolderCertificates(roles["scheduler"], LookingClock())
    key = "/fairway/v1/a"
    async with contextlib.AsyncExitStack() as closing:
        with etcd_with_tls(tmp_path, authority) as url:
            stores = [
                EtcdStore([url], SystemClock(), certificates=each, timeout_s=5.0) for each in (prompt, late)
            ]
            for store in stores:
                closing.push_async_callback(store.close)
            for store in stores:
                await written(store, key, b"1")
            found = await stores[0].list("/fairway/v1/")
            batches = await closing.enter_async_context(
                aclosing(stores[0].watch("/fairway/v1/", found.revision))
            )
            await asyncio.to_thread(authority.rotate, lambda done: None)
            with pytest.raises(StoreUnavailable):
                await stores[0].get(key)
            assert await stores[1].get(key) is not None, "its connection is from before"
        with etcd_with_tls(tmp_path, authority, url):
            await written(stores[0], key, b"2")
            async with asyncio.timeout(30):
                while not (batch := await anext(batches)).events:
                    pass
            assert [event.entry.value for event in batch.events if isinstance(event, KeyChanged)] == [b"2"]
            with pytest.raises(StoreUnavailable):
                await stores[1].get(key)
            late.identity = read_folder(roles["gateway"])
            await written(stores[1], key, b"3")


async def written(store: EtcdStore, key: str, value: bytes) -> None:
    """Return once the store took it."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(StoreUnavailable):
                await store.commit([Put(key, value)])
                return


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    target.close()


async def test_redis_over_tls_connects_with_the_present_certificate(
    tmp_path: Path, own_redis: Server
) -> None:
    """The embedded Redis is built without TLS: a terminator stands before it."""
    authority = authority_in(tmp_path / "certs")
    front = FolderCertificates(issued(authority, "redis").folder, LookingClock())
    folder = issued(authority, "gateway").folder
    serials: list[str] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await writer.start_tls(renewed_context(front, server=True, verify_peer=True)())
        except (OSError, ssl.SSLError):
            return
        serials.append(writer.get_extra_info("peercert")["serialNumber"])
        writers.append(writer)
        inside, outside = await asyncio.open_connection("127.0.0.1", own_redis.port)
        await asyncio.gather(_pump(reader, outside), _pump(inside, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"rediss://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"

    def limiter(certificates: Any) -> RedisLimiter:
        access = RedisAccess(contexts=renewed_context(certificates, server=False, verify_peer=True))
        return RedisLimiter(url, SystemClock(), timeout_s=2.0, access=access)

    mine = limiter(FolderCertificates(folder, LookingClock()))
    await mine.connect()
    first = set(serials)
    authority.renew()
    await mine.connect()
    for writer in writers:
        writer.transport.abort()
    async with asyncio.timeout(20):
        while set(serials) <= first:
            with contextlib.suppress(StoreUnavailable):
                await mine.connect()
            await asyncio.sleep(0.05)
    await mine.close()
    stranger = limiter(HeldCertificates(identity_of(authority_in(tmp_path / "foreign"), "gateway")))
    with pytest.raises(StoreUnavailable):
        await stranger.connect()
    await stranger.close()
    server.close()


async def exchange(port: int, identity: TlsIdentity | None, path: str = "/metrics") -> str:
    """Return the answer to a GET; raises OSError when the connection is refused."""
    if identity is None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    else:
        context = client_context(identity)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        async with asyncio.timeout(10):
            return (await reader.read()).decode()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def client_context(identity: TlsIdentity) -> ssl.SSLContext:
    return renewed_context(HeldCertificates(identity), server=False, verify_peer=True)()


async def refused(port: int, identity: TlsIdentity | None) -> bool:
    """Whether the handshake was refused: the server closes without an answer."""
    try:
        return not await exchange(port, identity)
    except OSError:
        return True


LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
Run = Callable[[Any], None]


@LOOPS
def test_metrics_are_for_monitors_and_operators(tmp_path: Path, run: Run) -> None:
    run(_metrics(tmp_path))


async def _metrics(tmp_path: Path) -> None:
    authority = authority_in(tmp_path / "certs")
    certificates = FolderCertificates(issued(authority, "worker").folder, LookingClock())

    async def started(head_timeout_s: float) -> TelemetryServer:
        server = TelemetryServer(
            Metrics().registry,
            "127.0.0.1:0",
            problems=tuple,
            certificates=certificates,
            head_timeout_s=head_timeout_s,
        )
        await server.start()
        return server

    server = await started(20.0)
    monitor, gateway = identity_of(authority, "monitor"), identity_of(authority, "gateway")
    assert (await exchange(server.port, monitor)).startswith("HTTP/1.1 200")
    assert (await exchange(server.port, identity_of(authority, "operator"))).startswith("HTTP/1.1 200")
    answer = await exchange(server.port, gateway)
    assert answer.startswith("HTTP/1.1 403")
    assert "monitor or operator" in answer
    late = identity_of(authority_in(tmp_path / "certs", days_ago=3), "monitor", "late")
    foreign = identity_of(authority_in(tmp_path / "foreign"), "monitor")
    trusting = replace(foreign, roots_pem=monitor.roots_pem, crl_pem=monitor.crl_pem)
    for identity in (None, late, trusting):
        assert await refused(server.port, identity)
    authority.revoke(monitor.leaf.serial)
    assert await refused(server.port, replace(monitor, crl_pem=b""))
    another = identity_of(authority, "monitor")
    await asyncio.to_thread(authority.rotate, lambda done: None)
    assert await refused(server.port, another)
    assert (await exchange(server.port, identity_of(authority, "monitor"))).startswith("HTTP/1.1 200")
    await server.stop()
    server = await started(0.5)
    _, silent = await asyncio.open_connection("127.0.0.1", server.port)
    await until(lambda: server.connections == 1)
    await until(lambda: server.connections == 0)
    silent.close()
    await server.stop()


async def hello(scope: Any, receive: Any, send: Any) -> None:
    body = scope["scheme"].encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": body.ljust(5)})


@LOOPS
def test_the_http_face_has_tls_within_the_bounds_on_connections(tmp_path: Path, run: Run) -> None:
    run(_http(tmp_path))


async def _http(tmp_path: Path) -> None:
    authority = authority_in(tmp_path / "certs")
    certificates = FolderCertificates(issued(authority, "gateway").folder, LookingClock())
    context = renewed_context(certificates, server=True, verify_peer=False)
    server = HttpServer(hello, "127.0.0.1", 0, max_connections=8, context=context)
    await server.start()
    client = identity_of(authority, "operator")
    assert (await exchange(server.port, client)).endswith("https")
    assert await refused(server.port, None), "plain text is no handshake"
    idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(20)]
    assert (await exchange(server.port, client)).endswith("https")
    assert server.connections <= 8
    before = server.port
    authority.renew()
    await asyncio.to_thread(authority.rotate, lambda done: None)
    client = identity_of(authority, "operator")
    assert (await exchange(before, client)).endswith("https")
    for _, writer in idle:
        writer.close()
    await server.stop(0.1)
    await until(lambda: server.connections == 0)
    server.table.check_integrity()


class Agent(workload_pb2_grpc.SpiffeWorkloadAPIServicer):
    """A Workload API: it sends the identity, and another one when the test replaces it."""

    def __init__(self) -> None:
        self.changed: list[Callable[[], Any]] = []
        self.sent = 0

    def FetchX509SVID(self, request: Any, context: Any) -> Any:
        assert dict(context.invocation_metadata())["workload.spiffe.io"] == "true"
        while context.is_active():
            if self.sent < len(self.changed):
                self.sent += 1
                yield self.changed[self.sent - 1]()
            else:
                time.sleep(0.02)


def svid(identity: TlsIdentity) -> Any:
    def der(pem: bytes) -> bytes:
        return ssl.PEM_cert_to_DER_cert(pem.decode())

    key = serialization.load_pem_private_key(identity.key_pem, None)
    encoded = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    one = workload_pb2.X509SVID(
        spiffe_id=str(identity.id),
        x509_svid=der(identity.chain_pem),
        x509_svid_key=encoded,
        bundle=der(identity.roots_pem),
    )
    return workload_pb2.X509SVIDResponse(svids=[one])


async def test_a_workload_api_is_a_source_like_the_files(tmp_path: Path) -> None:
    authority = authority_in(tmp_path / "certs")
    agent, socket = Agent(), f"unix:{tmp_path}/agent.sock"
    first = identity_of(authority, "worker")
    agent.changed.append(lambda: svid(first))
    server = grpc.server(ThreadPoolExecutor(2))
    workload_pb2_grpc.add_SpiffeWorkloadAPIServicer_to_server(agent, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(socket)
    server.start()
    source = await asyncio.to_thread(WorkloadCertificates, socket)
    found = source.current()
    assert found.leaf == first.leaf
    assert source.current() is found
    second = identity_of(authority, "worker")
    agent.changed.append(lambda: svid(second))
    await until(lambda: source.current().leaf == second.leaf)
    served = RpcServer(
        [],
        listen="127.0.0.1:0",
        internal_token=TOKEN,
        new_incident=lambda: "inc_1",
        tls=ServerTls(source, SystemClock()),
    )
    await served.start()
    channel = RoleChannel(
        f"127.0.0.1:{served.port}", "worker", HeldCertificates(identity_of(authority, "gateway"))
    )
    assert await check(channel())
    await channel.close()
    await served.stop(0)
    await asyncio.to_thread(server.stop(None).wait)
    assert source.current().leaf == second.leaf, "an agent that went away"
    source.close()
    with pytest.raises(ConfigError, match="FAIRWAY_SPIFFE_SOCKET"):
        await asyncio.to_thread(lambda: WorkloadCertificates(f"unix:{tmp_path}/none.sock", first_s=0.5))
