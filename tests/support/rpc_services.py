"""Every service of the protos with its generated stubs, found in the packages: none is listed by hand."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor, ServiceDescriptor

import fairway.inference
import fairway.keda
import fairway.v1
from tests.support.stack import ROOT

PROTOS = ROOT / "protos"


@dataclass(frozen=True)
class RpcService:
    descriptor: ServiceDescriptor
    register: Callable[[Any, Any], None]
    servicer: Callable[[], Any]  # answers UNIMPLEMENTED


def proto_files() -> dict[str, FileDescriptor]:
    """Return the generated files by name. Raises AssertionError for a proto without one."""
    modules = [
        importlib.import_module(f"{package.__name__}.{found.name}")
        for package in (fairway.v1, fairway.inference, fairway.keda)
        for found in pkgutil.iter_modules(package.__path__)
        if found.name.endswith("_pb2")
    ]
    files = {module.DESCRIPTOR.name: module.DESCRIPTOR for module in modules}
    sources = {str(path.relative_to(PROTOS)) for path in Path(PROTOS).rglob("*.proto")}
    assert sources == set(files), f"protos and generated files differ: {sources ^ set(files)}"
    return files


def rpc_services() -> list[RpcService]:
    found = []
    for name, file in sorted(proto_files().items()):
        stubs = importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2_grpc")
        for service in file.services_by_name.values():
            register = getattr(stubs, f"add_{service.name}Servicer_to_server")
            found.append(RpcService(service, register, getattr(stubs, f"{service.name}Servicer")))
    return found


def rpc_methods() -> list[MethodDescriptor]:
    return [method for service in rpc_services() for method in service.descriptor.methods]


async def called(
    channel: Any, method: MethodDescriptor, metadata: tuple[tuple[str, str], ...]
) -> grpc.StatusCode:
    """Return the status of a call with an empty request; of a stream, without one."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    async with asyncio.timeout(30):
        if method.client_streaming:  # no message: for the client a write after the refusal is INTERNAL
            stream = channel.stream_stream(path)(metadata=metadata)
            code: grpc.StatusCode = await stream.code()
            return code
        try:
            await channel.unary_stream(path)(b"", metadata=metadata).read()
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK
