"""The drills find what they are there to find: planted results are judged wrong."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass

from tests.security.drills.attacker import parse_target
from tests.security.drills.attacks import ATTACKS
from tests.security.drills.canary import Canary
from tests.security.drills.frames import header_block, message
from tests.security.drills.http import head, server_events, status_of
from tests.security.drills.judge import (
    CROWD_GAP_S,
    Counted,
    Found,
    Row,
    Total,
    line,
    missing_settlements,
    result,
)
from tests.security.drills.strangers import MODULES, empty_submessages
from tests.security.drills.target import Gateway, Target
from tests.security.drills.tenants import Running

ROOT = Path(__file__).parents[2]


def good(**changes: Any) -> Row:
    return Row("attack", **{"found": Found(), "canaries": 9, "gap_s": 0.3, **changes})


def total(*rows: Row, **changes: Any) -> Total:
    return Total(list(rows), **changes)


def test_a_run_without_harm_passes() -> None:
    run = total(good(silences={"gateway": 2.0}), growths={"gateway": 12.0})
    assert run.passed
    assert json.loads(result(run).removeprefix("RESULT ")) == {
        "attacks": 1,
        "roles_lost": 0,
        "canary_failed": 0,
        "canary_worst_gap_s": 0.3,
        "crowd_worst_gap_s": 0.0,
        "rss_growth_mib": 12.0,
        "limits_exceeded": 0,
        "settlements_lost": 0,
    }


@pytest.mark.parametrize(
    ("row", "figure", "value"),
    [
        (good(lost_roles=["gateway"]), "roles_lost", 1),
        (good(failed=["gateway/http: 503", "gateway/grpc: UNAVAILABLE"]), "canary_failed", 2),
        (good(gap_s=1.01), "canary_worst_gap_s", 1.01),
        (good(gap_s=4.01, max_gap_s=4.0), "canary_worst_gap_s", 0.3),
        (good(gap_s=2.01, max_gap_s=CROWD_GAP_S), "crowd_worst_gap_s", 2.01),
        (good(found=Found(exceeded=1)), "limits_exceeded", 1),
        (good(found=Found(skipped="not root")), "attacks", 0),
        (good(found=Found(wrong=["a key in a trailer was accepted"])), "attacks", 1),
        (good(silences={"worker-0 health": 5.5}), "attacks", 1),
    ],
)
def test_each_harm_is_judged_wrong(row: Row, figure: str, value: float) -> None:
    run = total(good(), row)
    assert not row.passed
    assert not run.passed
    assert run.figures[figure] - (figure == "attacks") == value
    assert "ok" not in line(row)


@pytest.mark.parametrize(
    "run",
    [
        total(),
        total(good(canaries=0)),
        total(good(), growths={"gateway": 12.0, "worker-0": 80.1}),
        total(good(), lost=["storm: an accepted request was not settled"]),
    ],
    ids=["nothing ran", "no canary was served", "a role grew", "a settlement is missing"],
)
def test_harm_of_a_whole_run_is_judged_wrong(run: Total) -> None:
    assert not run.passed


@pytest.mark.parametrize(
    ("settled", "missing"),
    [
        (Counted(10, 120), 0),
        (Counted(12, 150), 0),  # a client that leaves early does not see that it was accepted
        (Counted(8, 120), 2),
        (Counted(10, 119), 1),
        (Counted(0, 0), 10),
    ],
)
def test_settlements_that_are_missing_are_counted(settled: Counted, missing: int) -> None:
    assert len(missing_settlements({"a": Counted(10, 120)}, {"a": settled})) == missing


def test_a_tenant_that_was_never_charged_is_missing_all() -> None:
    assert len(missing_settlements({"a": Counted(3, 5)}, {})) == 3


def test_reports_of_several_attackers_are_one() -> None:
    found = Found()
    for exceeded in (1, 2):
        part = Found(did=["x"], wrong=["y"], exceeded=exceeded)
        part.accept("a", 3, 7)
        found.add(Found(**json.loads(json.dumps(asdict(part)))))
    assert (found.exceeded, found.accepted, found.wrong) == (3, {"a": (6, 14)}, ["y", "y"])


@pytest.mark.parametrize(("peak", "accepted", "exceeded"), [(5, 30, 0), (6, 30, 1), (11, 30, 6), (5, 60, 29)])
def test_what_runs_above_a_limit_is_counted(peak: int, accepted: int, exceeded: int) -> None:
    running, found = Running("a", 5, per_minute=30), Found()
    for number in range(accepted):
        running.accept()
        running.spans.append((number // peak, number // peak + 1))  # one that ends makes room for the next
    running.report(found)
    assert (found.exceeded, found.accepted) == (exceeded, {"a": (accepted, 0)})


def test_a_gap_that_is_still_open_counts() -> None:
    canary = Canary("gateway/grpc")
    canary.begin()
    canary.event()
    time.sleep(0.05)
    assert canary.take()[0] >= 0.05
    canary.end()
    assert canary.take() == (0.0, [])


async def answer_with(data: bytes, use: Callable[[str], Any]) -> Any:
    """Return what ``use`` makes of a server that answers every connection so and closes it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        return await use(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def events(address: str) -> list[str]:
    return [event async for event in server_events(address, head("/", "key"))]


async def test_an_event_stream_is_read_whatever_its_chunks_are() -> None:
    body = b"data: one\n\ndata: two\n\n"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:13], body[13:]))
    assert await answer_with(b"HTTP/1.1 200 OK\r\n\r\n" + chunks + b"0\r\n\r\n", events) == ["one", "two"]


@pytest.mark.parametrize(
    "data", [b"", b"HTTP/1.1 503 no\r\n\r\nwhy", b"HTTP/1.1 200 OK\r\n\r\n8\r\ndata: x\n\r\n"]
)
async def test_an_event_stream_that_is_cut_off_or_refused_is_no_end(data: bytes) -> None:
    with pytest.raises((OSError, EOFError)):
        await answer_with(data, events)


@pytest.mark.parametrize(("data", "status"), [(b"HTTP/1.1 400 Bad\r\n\r\n", 400), (b"", 0), (b"\x00", 0)])
async def test_the_status_of_an_answer(data: bytes, status: int) -> None:
    assert (await answer_with(data, lambda address: status_of(address, head("/"))))[0] == status


def test_frames_and_headers_are_those_of_the_standard() -> None:
    assert message(b"ab") == b"\x00\x00\x00\x00\x02ab"
    assert header_block([("x", "y" * 200)]) == b"\x10\x01x" + bytes((127, 73)) + b"y" * 200
    assert header_block([("x", "y" * 300)])[3:6] == bytes((127, 173, 1))


@pytest.mark.parametrize("role", MODULES)
def test_the_payload_of_empty_submessages_is_a_list_of_them(role: str) -> None:
    path, payload = empty_submessages(role, 3000)
    service, _, method = path[1:].rpartition("/")
    module: Any = MODULES[role]
    request = (
        module.DESCRIPTOR.services_by_name[service.rpartition(".")[2]].methods_by_name[method].input_type
    )
    assert str(GetMessageClass(request).FromString(payload)).count("{") >= 1000


def test_a_target_survives_its_way_to_an_attacker() -> None:
    gateways = [Gateway("gateway", "127.0.0.1:1", "127.0.0.1:2")]
    target = Target(Path("/s"), "m", "k", gateways, {"gateway": "a:1"}, {}, {"canary": "key"}, (1, 2))
    assert parse_target(json.dumps(asdict(target), default=str)) == target


def test_every_attack_has_a_name_of_its_own_and_a_bound() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)
    assert all(attack.what and attack.holds and attack.limit_s <= 300 for attack in ATTACKS)
