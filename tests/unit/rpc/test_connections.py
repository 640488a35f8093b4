"""Which connections are surplus, whom they count against, and that the right sockets are shut."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rpc.connections import (
    MAX_OF_SOURCE,
    MAX_UNAUTHENTICATED,
    MAX_WITH_NEW,
    Idle,
    above_share,
    connected,
    idle_above,
    shut,
    source_of,
    surplus_of,
    unauthenticated_surplus,
)

names = st.builds("ipv4:10.0.0.{}:{}".format, st.integers(0, 6), st.integers(1, 40))
peers = st.dictionaries(names, st.floats(0, 100), max_size=80)


@given(peers, st.integers(1, 10), st.integers(7, 40))
def test_no_source_and_not_all_together_have_more_than_their_bound(
    since_s: dict[str, float], of_source: int, in_all: int
) -> None:
    surplus = surplus_of(since_s, of_source=of_source, in_all=in_all)
    left = since_s.keys() - surplus
    counts: dict[str, list[float]] = {}
    for peer in left:
        counts.setdefault(source_of(peer), []).append(since_s[peer])
    assert len(left) <= in_all
    assert all(len(found) <= of_source for found in counts.values())
    for peer in surplus:  # older than all that are left of its source
        assert since_s[peer] <= min(counts[source_of(peer)], default=101.0)


@given(peers)
def test_below_the_bounds_nothing_is_surplus(since_s: dict[str, float]) -> None:
    assert surplus_of(since_s, of_source=80, in_all=80) == set()


def test_a_source_with_few_keeps_them_when_another_has_many() -> None:
    since_s = {f"ipv4:10.0.0.1:{port}": 50.0 for port in range(100)} | {"ipv4:10.0.0.2:1": 0.0}
    assert "ipv4:10.0.0.2:1" not in surplus_of(since_s, of_source=60, in_all=20)


def _unauthenticated(of_source: int, since_s: float) -> dict[str, float]:
    return {
        f"ipv4:10.0.{since_s:g}.{source}:{port}": since_s for source in range(16) for port in range(of_source)
    }


def test_new_connections_stay_until_the_next_look() -> None:
    new = {f"ipv4:10.0.1.1:{port}": 1.0 for port in range(MAX_WITH_NEW)}
    assert unauthenticated_surplus(new, 1.0) == set()
    assert len(unauthenticated_surplus(new, 1.2)) == MAX_WITH_NEW - MAX_OF_SOURCE


def test_new_connections_are_bounded_however_many_come_between_two_looks() -> None:
    found = _unauthenticated(100, 0.0) | _unauthenticated(600, 1.0) | {"ipv4:10.0.9.9:1": 1.0}
    surplus = unauthenticated_surplus(found, 1.0)
    assert len(found) - len(surplus) == pytest.approx(MAX_WITH_NEW, abs=32)
    assert "ipv4:10.0.9.9:1" not in surplus
    settled = sum(first_s < 1.0 for peer, first_s in found.items() if peer not in surplus)
    assert settled <= MAX_UNAUTHENTICATED


def test_a_caller_keeps_the_connections_that_it_used_last() -> None:
    tenant = {f"ipv4:10.0.0.{port}:{port}": Idle(float(port), "acme") for port in range(9)}
    others = {"ipv4:10.0.1.1:1": Idle(0.0, "other")}
    roles = {f"ipv4:10.0.2.1:{port}": Idle(0.0, "") for port in range(9)}
    assert idle_above(tenant | others | roles, 9) == []
    assert set(idle_above(tenant | others | roles, 6)) == {f"ipv4:10.0.0.{port}:{port}" for port in range(3)}


def test_a_source_has_its_share_whoever_it_calls_as() -> None:
    """Its idle connections end first, the oldest of them; then the newest of those that carry a call."""
    crowd = {f"ipv4:10.0.0.1:{port}": float(port) for port in range(10)}
    others = {f"ipv4:10.0.0.2:{port}": float(port) for port in range(5)}
    busy = {f"ipv4:10.0.0.1:{port}" for port in range(7)}
    assert above_share(crowd | others, busy, 10) == set()
    assert above_share(crowd | others, busy, 8) == {"ipv4:10.0.0.1:7", "ipv4:10.0.0.1:8"}
    assert above_share(crowd | others, busy, 5) == {f"ipv4:10.0.0.1:{port}" for port in (5, 6, 7, 8, 9)}


@given(peers, st.integers(1, 10))
def test_no_source_is_left_with_more_than_its_share(since_s: dict[str, float], share: int) -> None:
    left = since_s.keys() - above_share(since_s, set(list(since_s)[::2]), share)
    for source in {source_of(peer) for peer in since_s}:
        had = sum(source_of(peer) == source for peer in since_s)
        assert sum(source_of(peer) == source for peer in left) == min(had, share)


@pytest.mark.parametrize(
    ("peer", "source"),
    [
        ("ipv4:127.0.0.1:5", "ipv4:127.0.0.1"),
        ("ipv6:%5B2001:db8:0:1:2:3:4:5%5D:80", "2001:db8:0:1::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:80", "fe80::/64"),
        ("unix:", "unix"),
    ],
)
def test_source_of_a_peer(peer: str, source: str) -> None:
    assert source_of(peer) == source


def test_only_the_named_connection_of_the_port_is_shut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        port = listener.getsockname()[1]
        with (
            socket.create_connection(("127.0.0.1", port)) as first,
            socket.create_connection(("127.0.0.1", port)) as second,
            socket.create_connection(other.getsockname()) as elsewhere,
            listener.accept()[0] as accepted,
            listener.accept()[0],
            other.accept()[0],
        ):
            found = connected(port, os.listdir("/dev/fd"))
            name = f"ipv4:127.0.0.1:{first.getsockname()[1]}"
            assert found[name] == accepted.fileno()
            assert set(found) == {name, f"ipv4:127.0.0.1:{second.getsockname()[1]}"}
            shut({name: found[name], "ipv4:127.0.0.1:1": found[name]})
            assert first.recv(1) == b""
            second.settimeout(0.05)
            elsewhere.settimeout(0.05)
            for alive in (second, elsewhere):
                with pytest.raises(TimeoutError):
                    alive.recv(1)
            shut({"ipv4:127.0.0.1:1": accepted.fileno()})  # the descriptor is another connection's by now
            assert accepted.getpeername()
