"""The gateways of a client: one channel each, the choice of the next one, and avoidance of failed ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import grpc

from fairway.client import policy
from fairway.client.errors import FairwayError, NoGateway
from fairway.v1 import inference_pb2_grpc

Metadata = tuple[tuple[str, str], ...]
# A folder's files are read again after they changed; None: the servers are without TLS.
Credentials = grpc.ChannelCredentials | Path | None
Made = TypeVar("Made")

MAX_ENDPOINTS: Final = 64
_POLL_S: Final = 0.01
_DOWN: Final = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)
_FILES: Final = ("tls.key", "tls.crt", "ca.crt")
_LOOK_S: Final = 1.0  # how long replaced files may go unnoticed
_LOOPBACK: Final = ("127.", "localhost:", "[::1]")


def channel_options(address: str, max_message_bytes: int) -> list[tuple[str, int]]:
    """Return options with which a dead connection is detected within 15 s and retried at most every 2 s."""
    options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5_000),  # also the time limit of one connection attempt
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # gRPC's own retries are off: they would multiply with this client's, which have the budget.
        ("grpc.enable_retries", 0),
        # Clients of one process share no connection, so that closing one does not affect another.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if address.startswith(_LOOPBACK):
        options.append(("grpc.enable_http_proxy", 0))
    return options


def tls_credentials(folder: Path | str) -> grpc.ChannelCredentials:
    """Return the credentials of a channel: a folder's authorities, and its certificate if it has one.

    The files are ca.crt, tls.crt and tls.key, as `fairway certs issue` makes them. They are read once: a
    client whose ``credentials`` are the folder reads them again after they were replaced. Raises OSError.
    """
    root = Path(folder)
    own = [(root / name).read_bytes() if (root / name).exists() else None for name in _FILES[:2]]
    return grpc.ssl_channel_credentials((root / _FILES[2]).read_bytes(), *own)


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, Any]]
) -> grpc.aio.Channel:
    """Return a channel with TLS, or a plain one without credentials. The caller closes it."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


class Endpoint:
    """One gateway. Its channel is opened at construction and connects at the first state check.

    The channel is replaced after files of the certificate were: gRPC runs the calls of the earlier one to
    their end. Raises OSError for a folder without a certificate.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        options: Sequence[tuple[str, Any]],
        now: Callable[[], float],
    ) -> None:
        self.address = address
        self.failures = policy.FailureRecord()
        self.in_flight = 0
        self._credentials = credentials
        self._options = options
        self._now = now
        self._looked_s = now()
        self._read = _stamps(credentials)
        self._open()

    def _open(self) -> None:
        found = self._credentials
        credentials = tls_credentials(found) if isinstance(found, Path) else found
        self._channel = open_channel(self.address, credentials, self._options)
        self._stubs: dict[Any, Any] = {}

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel for a call that begins now."""
        if isinstance(self._credentials, Path) and self._now() - self._looked_s >= _LOOK_S:
            self._looked_s = self._now()
            if (stamps := _stamps(self._credentials)) != self._read:
                with contextlib.suppress(OSError):  # the files are being replaced
                    self._open()
                    self._read = stamps  # taken before the files were read
        return self._channel

    def stub_of(self, make: Callable[[grpc.aio.Channel], Made]) -> Made:
        """Return the stub that ``make`` returns for the channel."""
        channel = self.channel
        if make not in self._stubs:
            self._stubs[make] = make(channel)
        found: Made = self._stubs[make]
        return found

    @property
    def stub(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        found: inference_pb2_grpc.InferenceServiceAsyncStub
        found = self.stub_of(inference_pb2_grpc.InferenceServiceStub)
        return found

    async def close(self) -> None:
        await self._channel.close()

    @property
    def connected(self) -> bool:
        """Whether it is connected; if not, the channel starts to connect."""
        return self.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY

    @property
    def down(self) -> bool:
        return self.channel.get_state(try_to_connect=True) in _DOWN


class EndpointPool:
    """Distributes calls over the gateways. Callers report every failure and every response to it."""

    def __init__(
        self, endpoints: Sequence[Endpoint], *, now: Callable[[], float], rng: Random, noun: str = "gateway"
    ) -> None:
        assert endpoints
        self._noun = noun
        self._endpoints = {endpoint.address: endpoint for endpoint in endpoints}
        self._now = now
        self._rng = rng

    async def take(self, timeout_s: float, *, last_failed: str = "", wait_for_ready: bool = True) -> Endpoint:
        """Return a connected gateway; the caller passes it to ``release`` once.

        Waits up to ``timeout_s`` for a connection; without ``wait_for_ready``, at most until all are down.
        Raises NoGateway; nothing was sent then, so an attempt at the next gateway is not a retry.
        """
        deadline_s = self._now() + timeout_s
        while True:
            endpoint = self._choose(last_failed)
            if endpoint.connected:
                endpoint.in_flight += 1
                return endpoint
            if self._now() >= deadline_s:
                raise self._unreachable(f" within {timeout_s:.1f} s")
            if not wait_for_ready and all(one.down for one in self._endpoints.values()):
                raise self._unreachable("")
            # By polling: a state watch of grpc.aio cannot be abandoned before the state changes.
            await asyncio.sleep(min(_POLL_S, max(0.0, deadline_s - self._now())))

    def release(self, endpoint: Endpoint) -> None:
        endpoint.in_flight -= 1

    def is_avoided(self, endpoint: Endpoint) -> bool:
        return endpoint.failures.avoided(self._now())

    def has_other(self, endpoint: Endpoint) -> bool:
        """Whether another gateway is available for a call that failed on this one."""
        now_s = self._now()
        return any(
            one is not endpoint and not one.down and not one.failures.avoided(now_s)
            for one in self._endpoints.values()
        )

    def succeeded(self, endpoint: Endpoint) -> None:
        endpoint.failures = endpoint.failures.succeeded(self._now())

    def failed(self, endpoint: Endpoint, error: FairwayError) -> None:
        """Avoid the gateway for a while if it is at fault."""
        if policy.fault_scope(error.reason) is policy.FaultScope.GATEWAY:
            endpoint.failures = endpoint.failures.failed(
                self._now(), jitter=self._rng.random(), retry_after_s=error.retry_after_s
            )
        elif error.reason != "DEADLINE_EXCEEDED":
            self.succeeded(endpoint)

    async def close(self) -> None:
        for endpoint in self._endpoints.values():
            await endpoint.close()

    def _choose(self, last_failed: str) -> Endpoint:
        candidates = tuple(
            policy.Candidate(one.address, one.failures, one.in_flight, one.down)
            for one in self._endpoints.values()
        )
        chosen = policy.choose(
            candidates, now_s=self._now(), jitter=self._rng.random(), last_failed=last_failed
        )
        return self._endpoints[chosen]

    def _unreachable(self, when: str) -> NoGateway:
        addresses = ", ".join(self._endpoints)
        return NoGateway(
            f"no {self._noun} could be reached{when}: {addresses}",
            reason="NO_GATEWAY",
            metadata={"endpoints": addresses},
        )


def check_addresses(addresses: Sequence[str]) -> None:
    """Raise ValueError for none, too many or a duplicate."""
    if not addresses or len(addresses) > MAX_ENDPOINTS or len(set(addresses)) != len(addresses):
        raise ValueError(f"a client needs 1 to {MAX_ENDPOINTS} different endpoints, as host:port")


def open_endpoints(
    addresses: Sequence[str], credentials: Credentials, max_message_bytes: int, *, now: Callable[[], float]
) -> list[Endpoint]:
    """Open a channel per address. Raises ValueError like ``check_addresses``, OSError like ``Endpoint``."""
    check_addresses(addresses)
    return [
        Endpoint(address, credentials, channel_options(address, max_message_bytes), now)
        for address in addresses
    ]


def _stamps(credentials: Credentials) -> list[tuple[int, int, int]]:
    """Return what changes when a file of the folder is replaced."""
    if not isinstance(credentials, Path):
        return []
    found = (os.stat(credentials / name) for name in _FILES if (credentials / name).exists())
    return [(each.st_ino, each.st_mtime_ns, each.st_size) for each in found]
