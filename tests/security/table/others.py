"""Inputs beside generations: framing, spellings of routes, names, uploads, artifacts, malformed messages."""

from __future__ import annotations

import asyncio
import hashlib
import json
import pickle  # noqa: TID251  (it writes what must be refused)
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor

from fairway.cli.state import StateDir, read_secret
from fairway.formats.version_files import weights_digest
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import controlplane_pb2_grpc, options_pb2, registry_pb2_grpc
from fairway.v1 import registry_pb2 as rg
from services.runtime.clock import SystemClock
from tests.security.drills.http import head, post
from tests.security.drills.target import Target
from tests.security.drills.versions import change_json, checkpoint
from tests.security.table.cells import Answer, Cell, Outcome, of_grpc
from tests.security.table.faces import LIMIT_S, TENANT, ask, upload
from tests.security.table.inputs import NAMES
from tests.support.rpc_services import rpc_methods
from tests.support.stack import metadata

now_s = SystemClock().monotonic_s
_COMPLETIONS: Final = "/v1/completions"
# The process that serves a service in an installation of one host; of the followers there is none.
ROLES: Final = {
    "InferenceService": "gateway",
    "GRPCInferenceService": "gateway",
    "SchedulerService": "scheduler",
    "WorkerService": "worker-0",
    "ChunkService": "worker-0",
    "RegistryService": "registry",
    "ControlPlaneService": "controlplane",
    "UsageService": "controlplane",
    "SliService": "controlplane",
    "ExternalScaler": "controlplane",
}
_MALFORMED: Final = {
    "no message": b"\xff" * 64,
    "a length of 2 GiB": b"\x0a\xff\xff\xff\xff\x07",
    "10,000 levels": b"".join(b"\x0a" + _varint for _varint in (b"\x7f",) * 10_000),
    "a pickle": pickle.dumps({"a": 1}),
}


class _Marker:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


# --- HTTP ---------------------------------------------------------------------------------------


def framing_cells(target: Target) -> Iterator[Cell]:
    """Requests that two parsers could read in two ways."""
    gateway, key = target.gateways[0], target.keys[TENANT]
    body = json.dumps({"model": target.model, "prompt": "a", "max_tokens": 1}).encode()
    size, chunked = f"content-length: {len(body)}", "transfer-encoding: chunked"
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    smuggled = head("/v1/models", key, method="GET")
    framings: dict[str, tuple[tuple[str, ...], bytes]] = {
        "gzip, chunked": (("transfer-encoding: gzip, chunked",), chunks),
        "chunked, gzip": (("transfer-encoding: chunked, gzip",), chunks),
        "chunked twice": ((chunked, chunked), chunks),
        "xchunked": (("transfer-encoding: xchunked",), chunks),
        "length with chunks": ((size, chunked), chunks),
        "chunks with length": ((chunked, size), chunks),
        "two lengths": ((size, "content-length: 5"), body),
        "length below zero": (("content-length: -1",), body),
        "folded line": (("x-a: 1", " folded", size), body),
        "NUL": (("x-a: a\0b", size), body),
        "bare CR": (("x-a: a\rb", size), body),
        "space before the colon": (("x-a : b", size), body),
        "two keys": (("authorization: Bearer x", size), body),
        "second request in a length": (("content-length: 0",), b"" + smuggled),
        "trailer": ((chunked,), chunks[:-2] + b"authorization: Bearer x\r\n\r\n"),
    }
    for name, (lines, sent) in framings.items():
        request = head(_COMPLETIONS, key, "connection: close", *lines) + sent
        yield Cell("HTTP framing", name, "HTTP", partial(ask, gateway.http, request))
    for name, version in (("HTTP/1.2", "1.2"), ("HTTP/2.0", "2.0"), ("HTTP/9.9", "9.9")):
        request = head(_COMPLETIONS, key, "connection: close", size, version=version) + body
        yield Cell("HTTP framing", name, "HTTP", partial(ask, gateway.http, request))


def route_cells(target: Target) -> Iterator[Cell]:
    """Spellings of a route that could pass authentication by, and methods that no port has, without a key."""
    gateway = target.gateways[0]
    spellings = {
        "forwarded host": ("/v1/models", ("x-forwarded-host: localhost", "x-forwarded-for: 127.0.0.1")),
        "rewritten address": ("/v1/models", ("x-original-url: /healthz", "x-rewrite-url: /healthz")),
        "role in a header": ("/v1/models", ("x-fairway-role: admin", "x-fairway-tenant: drills")),
        "public route in front": ("/healthz/../v1/models", ()),
        "encoded dots": ("/healthz/%2e%2e/v1/models", ()),
        "two slashes": ("//v1/models", ()),
        "backslash": ("/healthz\\..\\v1\\models", ()),
        "encoded letter": ("/%761/models", ()),
        "NUL in the path": ("/v1/models%00/healthz", ()),
        "parameter of a path": ("/v1/models;x=/healthz", ()),
        "absolute address": ("http://localhost/healthz/../v1/models", ()),
        "address of a user": ("http://healthz@127.0.0.1/v1/models", ()),
        "upper case": ("/V1/MODELS", ()),
        "documents": ("/docs", ()),
        "description": ("/openapi.json", ()),
    }
    for name, (path, lines) in spellings.items():
        request = head(path, "", "connection: close", *lines, method="GET")
        yield Cell("before a credential", name, "HTTP", partial(ask, gateway.http, request))
    for host in ("x/healthz", "x?", "localhost@x", ""):
        request = head("/v1/models", "", "connection: close", method="GET", host=host)
        yield Cell("before a credential", f"Host {host!r}", "HTTP", partial(ask, gateway.http, request))
    for path in ("/", "/metrics", "/readyz", "/v1/models", "/v1/files/x", "/v1/responses/x", "/v1/batches/x"):
        for method in ("DELETE", "PUT"):
            request = head(path, "", "connection: close", method=method)
            for name, address in (("HTTP", gateway.http), *target.metrics.items()):
                if name == "HTTP" or path in ("/", "/metrics", "/readyz"):
                    face = name if name == "HTTP" else f"metrics of {name}"
                    yield Cell("DELETE on a port", f"{method} {path}", face, partial(ask, address, request))


def name_cells(target: Target) -> Iterator[Cell]:
    """Names in paths and of uploads that could leave where they belong."""
    gateway, key = target.gateways[0], target.keys[TENANT]
    for name, text in NAMES.items():
        if len(text) > 4096 or "\n" in text:
            continue
        encoded = text.encode("unicode_escape").decode().replace(" ", "%20")
        for path in ("/v1/files", "/v1/responses", "/v1/batches"):
            request = head(f"{path}/{encoded}", key, "connection: close", method="GET")
            yield Cell("names", f"{path}: {name}", "HTTP", partial(ask, gateway.http, request))
    folder = target.state
    for name, text in NAMES.items():
        if "\n" not in text:
            data, kind = upload(text, b"{}\n")
            request = post("/v1/files", data, key).replace(b"application/json", kind.encode())
            yield Cell("uploads", name, "HTTP", partial(_inside, folder, gateway.http, request), True)


async def _inside(folder: Path, address: str, request: bytes) -> Answer:
    """Upload, and fail where a file of the client's name is anywhere."""
    answer = await ask(address, request)
    if Path("/etc/passwd.jsonl").exists() or list(folder.rglob("passwd*")):
        return Answer(Outcome.FAILED, answer.status, "a file has the name that the client chose")
    return answer


# --- gRPC ---------------------------------------------------------------------------------------


async def _called(call: Callable[[grpc.aio.Channel], Awaitable[Any]], address: str) -> Answer:
    began_s = now_s()
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            await call(channel)
        except grpc.aio.AioRpcError as error:
            return of_grpc(error.code().name, error.details() or "", now_s() - began_s)
    return of_grpc("OK", "", now_s() - began_s)


async def call_raw(address: str, method: MethodDescriptor, data: bytes, key: str) -> Answer:
    """Call a method with bytes for its request, and read what it answers."""
    path = f"/{method.containing_service.full_name}/{method.name}"

    async def call(channel: grpc.aio.Channel) -> None:
        options: dict[str, Any] = {"metadata": metadata(key), "timeout": LIMIT_S}
        if not method.client_streaming:
            unary: Any = channel.unary_stream(path)
            await unary(data, **options).read()
            return
        stream: Any = channel.stream_stream(path)(**options)
        await stream.write(data)
        await stream.done_writing()
        while await stream.read() is not grpc.aio.EOF:
            pass

    return await _called(call, address)


def served_methods(target: Target) -> Iterator[tuple[MethodDescriptor, str, str]]:
    """Yield each method with the address that serves it and a credential that opens it."""
    internal = read_secret(StateDir.at(target.state), "internal_token")
    for method in rpc_methods():
        role = ROLES.get(method.containing_service.name)
        if role is not None:
            access = method.GetOptions().Extensions[options_pb2.access]
            if options_pb2.ACCESS_TENANT in access:
                key = target.keys[TENANT]
            else:
                key = target.admin_key if options_pb2.ACCESS_ADMIN in access else internal
            yield method, target.roles[role], key


def rpc_cells(target: Target) -> Iterator[Cell]:
    """Bytes that are no message to every method that is served, and names to those that store them."""
    for method, address, key in served_methods(target):
        for name, data in _MALFORMED.items():
            if name != "a pickle" or method.name in (
                "Execute",
                "Report",
                "Connect",
                "ReportUsage",
                "ReportSlis",
            ):
                send = partial(call_raw, address, method, data, key)
                yield Cell("no message", name, f"{method.containing_service.name}.{method.name}", send)
    for name, text in NAMES.items():
        requests: dict[str, Any] = {
            "CreateTenant": cp.CreateTenantRequest(tenant=cp.Tenant(metadata=cp.Metadata(name=text))),
            "CreateKey": cp.CreateKeyRequest(
                key=cp.Key(metadata=cp.Metadata(name=text), role=cp.KEY_ROLE_TENANT, tenant=TENANT)
            ),
            "CreateDeployment": cp.CreateDeploymentRequest(
                deployment=cp.Deployment(metadata=cp.Metadata(name=text), model=text, version="latest")
            ),
            "GetTenant": cp.GetTenantRequest(name=text),
        }
        for method_name, request in requests.items():

            async def call(channel: grpc.aio.Channel, name: str = method_name, sent: Any = request) -> Any:
                stub = controlplane_pb2_grpc.ControlPlaneServiceStub(channel)
                return await getattr(stub, name)(sent, metadata=metadata(target.admin_key), timeout=LIMIT_S)

            yield Cell("names", name, method_name, partial(_called, call, target.controlplane))


def pickle_cells(target: Target, folder: Path) -> Iterator[Cell]:
    """A pickle at every port: nothing loads it, which its marker would show."""
    marker = folder / "marker"
    data = pickle.dumps(_Marker(marker))
    kinds = {"alone": data, "after its length": len(data).to_bytes(8, "little") + data}
    ports = {**target.roles, **{f"metrics of {name}": at for name, at in target.metrics.items()}}
    for name, address in {**ports, "HTTP": target.gateways[0].http}.items():
        for kind, sent in kinds.items():
            yield Cell("pickles", kind, name, partial(_unloaded, marker, address, sent))


async def _unloaded(marker: Path, address: str, data: bytes) -> Answer:
    answer = await ask(address, data + b"\r\n\r\n")
    if marker.exists():
        return Answer(Outcome.FAILED, answer.status, "the pickle was loaded")
    return answer


# --- artifacts ----------------------------------------------------------------------------------


def artifact_cells(target: Target) -> Iterator[Cell]:
    """Versions that claim another file than they have, lie outside of their folder, or bring code."""
    admin = metadata(target.admin_key)
    data = b"{}"
    digest = "sha256:" + hashlib.sha256(data).hexdigest()

    async def create(edit: Callable[[rg.Manifest, rg.ManifestFile], object]) -> Answer:
        async def call(channel: grpc.aio.Channel) -> None:
            stub = registry_pb2_grpc.RegistryServiceStub(channel)
            good = await stub.GetVersion(
                rg.GetVersionRequest(model=target.model, version="latest"), metadata=admin, timeout=LIMIT_S
            )
            manifest = good.version.manifest
            parts = (
                rg.UploadChunkRequest(header=rg.ChunkHeader(digest=digest, size_bytes=len(data))),
                rg.UploadChunkRequest(data=data),
            )
            await stub.UploadChunk(iter(parts), metadata=admin, timeout=LIMIT_S)
            file = rg.ManifestFile(path="x.json", size_bytes=len(data), digest=digest, chunks=[digest])
            edit(manifest, file)
            manifest.files.append(file)
            ordered = sorted(manifest.files, key=lambda each: each.path)
            del manifest.files[:]
            manifest.files.extend(ordered)
            weights = [each for each in ordered if each.path.endswith(".safetensors")]
            manifest.weights_digest = weights_digest([(each.path, each.digest) for each in weights])
            request = rg.CreateVersionRequest(model="cells", manifest=manifest)
            await stub.CreateVersion(request, metadata=admin, timeout=LIMIT_S)

        return await _called(call, target.registry)

    paths = (
        "../x.json", "a/../../x.json", "/etc/x.json", "./x.json", "a//x.json", "a\\..\\x.json", "C:\\x.json",
        "x\0.json", "x.json/", "..", "con\n.json", "pytorch_model.bin", "model.pkl", "modeling.py",
        "a/__init__.py", "model.pt", "x.so", "config.json/x.json",
    )  # fmt: skip
    for path in paths:

        def named(_: rg.Manifest, file: rg.ManifestFile, path: str = path) -> None:
            file.path = path

        yield Cell("artifacts", f"path {path!r}", "CreateVersion", partial(create, named))
    lies: dict[str, Callable[[rg.Manifest, rg.ManifestFile], object]] = {
        "size of a petabyte": lambda _, file: setattr(file, "size_bytes", 10**15),
        "size of another": lambda _, file: setattr(file, "size_bytes", 3),
        "digest of another": lambda _, file: setattr(file, "digest", "sha256:" + "0" * 64),
        "chunk that is not stored": lambda _, file: file.chunks.__setitem__(0, "sha256:" + "0" * 64),
        "no chunks": lambda _, file: file.ClearField("chunks"),
        "weights that are none": lambda _, file: setattr(file, "path", "more.safetensors"),
        "a file twice": lambda _, file: setattr(file, "path", "config.json"),
        "tokenizer of another": lambda it, _: setattr(it, "tokenizer_digest", "sha256:" + "0" * 64),
        "context of a billion": lambda it, _: setattr(it, "max_context_tokens", 2**30),
        "unknown schema": lambda it, _: setattr(it, "schema", 99),
        "unknown kind": lambda it, _: setattr(it, "kind", "pickle"),
    }
    for name, lie in lies.items():
        yield Cell("artifacts", name, "CreateVersion", partial(create, lie))


def publish_cells(target: Target) -> Iterator[Cell]:
    """Folders with code, or with files that would run it, through the command that publishes."""
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    edits: dict[str, Callable[[Path], object]] = {
        "auto_map": lambda at: change_json(
            at / "config.json", lambda it: it.update(auto_map={"AutoModel": "evil.Model"})
        ),
        "pickled weights": lambda at: (at / "model.safetensors").rename(at / "pytorch_model.bin"),
        "a pickle named as weights": lambda at: (at / "model.safetensors").write_bytes(
            pickle.dumps({"a": 1})
        ),
        "truncated weights": lambda at: (at / "model.safetensors").write_bytes(
            (at / "model.safetensors").read_bytes()[:1000]
        ),
        "a header of 8 exabytes": lambda at: (at / "model.safetensors").write_bytes(b"\xff" * 7 + b"\x7f"),
        "a template that leaves its sandbox": lambda at: change_json(
            at / "tokenizer_config.json", lambda it: it.update(chat_template=template)
        ),
        "a link out of the folder": lambda at: (at / "merges.txt").symlink_to("/etc/passwd"),
        "config of another shape": lambda at: change_json(
            at / "config.json", lambda it: it.update(hidden_size=2**40)
        ),
        "config of 1,000 levels": lambda at: (at / "config.json").write_text("[" * 1000 + "]" * 1000),
    }
    for name, edit in edits.items():
        yield Cell("artifacts", name, "publish", partial(_published, target, edit), False)


async def _published(target: Target, edit: Callable[[Path], object]) -> Answer:
    began_s = now_s()
    with checkpoint(edit) as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fairway.cli.main", "models", "publish", str(folder)),
            *("--name", "cells", "--state-dir", str(target.state)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        _, error = await process.communicate()
    text = error.decode().replace(str(folder), "FOLDER")
    if process.returncode == 0:
        return Answer(Outcome.SERVED, "0", text)
    outcome = Outcome.FAILED if "Traceback" in text or (process.returncode or 0) < 0 else Outcome.REFUSED
    return Answer(outcome, f"{process.returncode}", text, now_s() - began_s)
