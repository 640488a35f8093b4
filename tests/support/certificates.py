"""Certificates of the tests: an authority in a folder, as `fairway certs` makes it, at any time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc

from fairway.cli.authority import Authority, Issued
from fairway.tls import TlsIdentity, read_folder
from services.rpc.channel import channel_credentials


def authority_in(folder: Path, *, days_ago: float = 0.0) -> Authority:
    """Return an authority that exists and whose clock is late."""
    found = Authority(folder, lambda: datetime.now(UTC) - timedelta(days=days_ago))
    found.create()
    return found


def identity_of(authority: Authority, role: str, name: str = "", *, days: float = 1.0) -> TlsIdentity:
    return read_folder(issued(authority, role, name, days=days).folder)


def issued(authority: Authority, role: str, name: str = "", *, days: float = 1.0) -> Issued:
    return authority.issue(role, name or role, days=days)


class HeldCertificates:
    """``Certificates`` whose identity the test replaces."""

    def __init__(self, identity: TlsIdentity) -> None:
        self.identity = identity

    def current(self) -> TlsIdentity:
        return self.identity


def secured_channel(address: str, identity: TlsIdentity) -> grpc.aio.Channel:
    """Return a channel with a connection of its own; the server is verified by address."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100))
    return grpc.aio.secure_channel(address, channel_credentials(identity), options=options)
