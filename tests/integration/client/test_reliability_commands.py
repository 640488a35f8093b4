"""`fairway quarantine` and `fairway slis`, against a control plane."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fairway.client import NotFound
from services.core.manifest import sha256_of
from services.core.records import quarantine_key
from services.ports.poison.quarantine import Quarantined
from tests.integration.client.planes import CLOCK, Fleet, fleet
from tests.integration.client.test_limit_commands import document, said
from tests.support.slis import DIGEST, key_of, sums_of

OLD, NEW = sha256_of(b"1"), sha256_of(b"2")
ONE, TWO = "1" * 32, "12" * 16


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path) as found:
        yield found


async def quarantine(admin: Fleet, digest: str, fingerprint: str, model: str = "chat") -> None:
    entry = Quarantined(digest, fingerprint, model, 2, CLOCK.unix_s() + 3000)
    await admin.put(quarantine_key(digest, fingerprint), entry)


async def test_an_input_is_listed_and_lifted(admin: Fleet) -> None:
    for digest, fingerprint in ((OLD, ONE), (NEW, ONE), (OLD, TWO)):
        await quarantine(admin, digest, fingerprint)
    await quarantine(admin, OLD, "3" * 32, "other")
    rows = [line.split("\t") for line in (await said(admin, "quarantine list --model chat")).splitlines()]
    assert [row[:4] for row in rows] == sorted(
        ([one, "chat", digest, "2"] for digest, one in ((OLD, ONE), (NEW, ONE), (OLD, TWO))),
        key=lambda row: (row[2], row[0]),
    )
    assert rows[0][4].startswith(("49m", "50m"))
    assert len((await document(admin, f"quarantine list --version {NEW}"))["inputs"]) == 1
    assert "2 inputs match" in await said(admin, f"quarantine lift {ONE} --yes", code=4)
    assert "no input 9" in await said(admin, "quarantine lift 9 --yes", code=4)
    short = NEW.removeprefix("sha256:")[:6]
    lifted = await document(admin, f"quarantine lift {ONE[:8]} --version {short} --yes")
    assert lifted == {"name": ONE, "deleted": True}
    assert await said(admin, "quarantine lift 1212 --yes") == TWO + "\n"
    left = (await document(admin, "quarantine list"))["inputs"]
    assert sorted((one["version_digest"], one["fingerprint"]) for one in left) == sorted(
        [(OLD, ONE), (OLD, "3" * 32)]
    )


async def test_a_script_lifts_an_input(admin: Fleet) -> None:
    await quarantine(admin, OLD, ONE)
    async with admin.client() as client:
        (one,) = await client.quarantine.list(version_digest=OLD)
        await client.quarantine.lift(one.version_digest, one.fingerprint)
        assert await client.quarantine.list() == []
        with pytest.raises(NotFound):
            await client.quarantine.lift(one.version_digest, one.fingerprint)


async def test_indicators_are_shown_by_series(admin: Fleet) -> None:
    sums = sums_of([0.1, 0.1], [0.02], requests=3, errors=1, started=2, broken=1, output_tokens=40)
    admin.measured.report(key_of(), sums)
    admin.measured.report(key_of(tenant="other", zone="", digest=""), sums_of(requests=1, errors=1))
    for number in range(300):
        admin.measured.report(key_of("big", tenant=f"t{number:03}"), sums_of(requests=1))
    rows = [line.split("\t") for line in (await said(admin, "slis --model chat")).splitlines()]
    assert [row[:9] for row in rows] == [
        ["chat", "-", "other", "standard", "-", "1", "1", "0/0", "0"],
        ["chat", DIGEST, "acme", "standard", "a", "3", "1", "1/2", "0"],
    ]
    assert rows[0][9:] == ["-", "-", "0", "0.0"]
    assert [float(one) for one in rows[1][9].split("/")] == pytest.approx([100.0] * 3, rel=0.02)
    assert rows[1][11] == "40"
    assert len((await document(admin, "slis --class standard --window 10m"))["slis"]) == 302
    (only,) = (await document(admin, "slis --tenant other --zone="))["slis"]
    assert (only["errors"], "ttft_p50_s" in only) == ("1", False)
    assert "window" in await said(admin, "slis --window 2h", code=4)


async def test_without_a_leader_the_indicators_are_unavailable(admin: Fleet) -> None:
    admin.measured.election.turn(None)
    assert "NO_LEADER" in await said(admin, "slis", code=6)
