"""KEDA's side of the wire: a plain gRPC client with a certificate alone, as KEDA makes its calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from fairway.cli.authority import Authority
from fairway.keda import externalscaler_pb2 as pb
from fairway.keda import externalscaler_pb2_grpc
from services.adapters.memory.store import MemoryStore
from services.controlplane.fleet import FleetRecord, decode
from services.controlplane.scaling.keda import KedaServicer
from services.core.records import DEPLOYMENTS, ROOT, SCALED, Deployment, Meta, dump
from services.core.scaling import Scaled, Scaling
from services.ports.store import Delete, Put
from services.rpc.interceptors.access import access_table
from services.rpc.peers import callers_table
from services.rpc.server import RpcServer, RpcService, ServerTls
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.informer import Informer
from tests.support.certificates import HeldCertificates, authority_in, identity_of, secured_channel

CLOCK = SystemClock()
SERVICE = pb.DESCRIPTOR.services_by_name["ExternalScaler"]
CHAT = Deployment(Meta("chat"), "m", "latest", "sha256:" + "a" * 64, 2, scaling=Scaling(0, 8))
# What KEDA sends of a trigger: all of its metadata, its own keys too.
TRIGGER = {"scalerAddress": "controlplane.fairway:9090", "deployment": "chat", "enableTLS": "true"}


@dataclass
class Rig:
    store: MemoryStore
    authority: Authority
    address: str

    def stub(self, channel: grpc.aio.Channel) -> Any:
        return externalscaler_pb2_grpc.ExternalScalerStub(channel)

    def channel(self, role: str) -> grpc.aio.Channel:
        return secured_channel(self.address, identity_of(self.authority, role))

    async def decide(self, replicas: int) -> None:
        await self.store.commit([Put(SCALED + "chat", dump(Scaled("chat", replicas)))])


@asynccontextmanager
async def plane(folder: Path, *, secured: bool = True) -> AsyncIterator[Rig]:
    store, authority = MemoryStore(CLOCK), authority_in(folder)
    await store.commit([Put(DEPLOYMENTS + "chat", dump(CHAT))])
    informer: Informer[FleetRecord | None] = Informer(store, ROOT, decode, CLOCK)
    held = HeldCertificates(identity_of(authority, "controlplane"))
    server = RpcServer(
        [
            RpcService(
                SERVICE, externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server, KedaServicer(informer)
            )
        ],
        listen="127.0.0.1:0",
        internal_token="t" * 40,
        new_incident=lambda: "inc_1",
        tls=ServerTls(held, CLOCK) if secured else None,
    )
    running = asyncio.create_task(informer.run())
    await server.start()
    try:
        yield Rig(store, authority, f"127.0.0.1:{server.port}")
    finally:
        await server.stop(0)
        running.cancel()
        await asyncio.wait({running})


def ref(**metadata: str) -> pb.ScaledObjectRef:
    return pb.ScaledObjectRef(name="workers", namespace="fairway-workers", scalerMetadata=metadata or TRIGGER)


async def until(check: Callable[[], Any], value: object) -> None:
    async with asyncio.timeout(10.0):
        while await check() != value:
            await asyncio.sleep(0.01)


async def test_the_metric_is_the_replicas_that_were_decided(tmp_path: Path) -> None:
    async with plane(tmp_path) as rig, rig.channel("autoscaler") as channel:
        stub = rig.stub(channel)
        (spec,) = (await stub.GetMetricSpec(ref())).metricSpecs
        assert (spec.targetSize, spec.targetSizeFloat) == (1, 1.0)
        request = pb.GetMetricsRequest(scaledObjectRef=ref(), metricName=spec.metricName)

        async def metric() -> tuple[str, int, float, bool]:
            (found,) = (await stub.GetMetrics(request)).metricValues
            active = (await stub.IsActive(ref())).result
            return found.metricName, found.metricValue, found.metricValueFloat, active

        assert await metric() == (spec.metricName, 2, 2.0, True), "the operator's number before a decision"
        await rig.decide(5)
        await until(metric, (spec.metricName, 5, 5.0, True))
        await rig.decide(0)
        await until(metric, (spec.metricName, 0, 0.0, False))
        await rig.store.commit([Put(DEPLOYMENTS + "chat", dump(replace(CHAT, scaling=None)))])
        await until(metric, (spec.metricName, 2, 2.0, True))


async def test_a_stream_has_the_state_at_once_and_each_change_once(tmp_path: Path) -> None:
    async with plane(tmp_path) as rig, rig.channel("autoscaler") as channel:
        await rig.decide(0)
        stream = rig.stub(channel).StreamIsActive(ref(), timeout=20)
        found = [(await stream.read()).result]
        for replicas in (1, 3, 0):
            await rig.decide(replicas)
            if replicas != 3:
                found.append((await stream.read()).result)
            else:  # a change that is none of the state, seen by itself
                await asyncio.sleep(0.3)
        assert found == [False, True, False]
        await rig.store.commit([Delete(DEPLOYMENTS + "chat")])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_requests_that_name_nothing_are_refused_with_what_to_do(tmp_path: Path) -> None:
    async with plane(tmp_path) as rig, rig.channel("autoscaler") as channel:
        stub = rig.stub(channel)
        code = grpc.StatusCode
        for call, status, text in (
            (stub.IsActive(ref(scalerAddress="a:1")), code.INVALID_ARGUMENT, "`deployment: NAME`"),
            (stub.IsActive(ref(deployment="none")), code.NOT_FOUND, "no deployment none"),
            (stub.GetMetricSpec(ref(deployment="none")), code.NOT_FOUND, "no deployment none"),
            (
                stub.GetMetrics(pb.GetMetricsRequest(metricName="replicas")),
                code.INVALID_ARGUMENT,
                "scaledObject",
            ),
            (
                stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=ref(), metricName="cpu")),
                code.NOT_FOUND,
                "`replicas`",
            ),
            (stub.IsActive(ref(deployment="x" * 5000)), code.INVALID_ARGUMENT, "scalerMetadata"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is status
            assert text in (caught.value.details() or "")
        assert (await stub.IsActive(ref())).result, "and the server goes on"


async def test_only_the_certificate_of_an_autoscaler_opens_it(tmp_path: Path) -> None:
    async with plane(tmp_path) as rig:
        for role in ("gateway", "operator", "worker"):
            for sent in ((), (("authorization", "Bearer " + "t" * 40),)):
                async with rig.channel(role) as channel:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await rig.stub(channel).IsActive(ref(), metadata=sent)
                    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
                    assert "presented here by autoscaler" in (caught.value.details() or "")


async def test_a_port_without_tls_refuses_it(tmp_path: Path) -> None:
    async with plane(tmp_path, secured=False) as rig, grpc.aio.insecure_channel(rig.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub(channel).IsActive(ref(), metadata=(("authorization", "Bearer " + "t" * 40),))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "this port has no TLS" in (caught.value.details() or "")


def test_its_methods_have_one_rule() -> None:
    assert set(callers_table([SERVICE]).values()) == {frozenset({"autoscaler"})}
    assert {len(rule) for rule in access_table([SERVICE]).values()} == {1}
