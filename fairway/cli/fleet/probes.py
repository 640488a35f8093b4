"""Probes of a process: does it serve? The result is "" for yes, else the reason why not.

A reason that begins with ``NO_ANSWER`` means no response; every other one came from a running process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2

from fairway.cli.calls import credentials_of
from fairway.client.endpoints import open_channel

Probe = Callable[[], Awaitable[str]]

NO_ANSWER: Final = "no answer"  # prefix of the reason when no response arrived
_SILENT: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_TIMEOUT_S: Final = 2.0
_MAX_ANSWER_BYTES: Final = 4096


def etcd_healthy(address: str) -> Probe:
    """Return a probe for etcd's health endpoint, which shows that etcd can commit.

    ``address`` is ``host:port`` or ``unix:PATH``, here and below.
    """

    async def probe() -> str:
        request = b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n"
        answer = await _exchange(address, request, until=b'"health"')
        if isinstance(answer, str):
            return answer
        return "" if b'"health":"true"' in answer.replace(b" ", b"") else "etcd is not healthy yet"

    return probe


def redis_answers(address: str) -> Probe:
    """Return a probe for Redis: it answers PING once its data is loaded."""

    async def probe() -> str:
        answer = await _exchange(address, b"PING\r\n", until=b"\r\n")
        if isinstance(answer, str):
            return answer
        return "" if answer.startswith(b"+PONG") else answer.decode("utf-8", "replace").strip()

    return probe


def grpc_serving(address: str, tls_dir: Path | None = None) -> Probe:
    """Return a probe for a role: its health service answers SERVING.

    ``tls_dir``: the folder of a certificate, read for each call; None: the role serves without TLS.
    """

    async def probe() -> str:
        credentials = credentials_of(tls_dir)
        async with open_channel(address, credentials, (("grpc.enable_http_proxy", 0),)) as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            try:
                answer = await check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
            except grpc.aio.AioRpcError as exc:
                if exc.code() in _SILENT:
                    return f"{NO_ANSWER} on {address} ({exc.code().name})"
                return f"rejects the probe ({exc.code().name})"  # so the process is alive
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        return "" if status == "SERVING" else f"answers {status}"

    return probe


def tcp_open(address: str) -> Probe:
    """Return a probe for a listening port."""

    async def probe() -> str:
        answer = await _exchange(address, b"", until=b"")
        return answer if isinstance(answer, str) else ""

    return probe


def all_of(*probes: Probe) -> Probe:
    """Return a probe that succeeds when each of ``probes`` does."""

    async def probe() -> str:
        for each in probes:
            if reason := await each():
                return reason
        return ""

    return probe


async def _exchange(address: str, request: bytes, *, until: bytes) -> bytes | str:
    """Send ``request`` and return the response up to and a little after ``until``, or why there is none."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await _connected(address)
            try:
                writer.write(request)
                await writer.drain()
                received = b""
                while until not in received and len(received) < _MAX_ANSWER_BYTES:
                    piece = await reader.read(1024)
                    if not piece:
                        break
                    received += piece
                return received
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError:
        return f"{NO_ANSWER} on {address} within {_TIMEOUT_S:g} s"
    except OSError as exc:
        return f"{NO_ANSWER} on {address} ({exc.strerror or exc})"


async def _connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))
