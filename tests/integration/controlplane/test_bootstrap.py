"""The first admin key, from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.adapters.memory.store import MemoryStore
from services.controlplane.resources.accounts import bootstrap
from services.core.errors import FailedPrecondition, FairwayError
from services.core.records import KEYS, ApiKey, KeyRole, load
from services.runtime import secrets
from services.runtime.clock import SystemClock


async def test_bootstrap_makes_and_replaces_the_admin_key(tmp_path: Path) -> None:
    clock = SystemClock()
    store, file = MemoryStore(clock), tmp_path / "admin_key"
    text, _ = secrets.new_key("admin", b"1" * 32)
    file.write_text(text + "\n")
    file.chmod(0o600)
    assert await bootstrap(store, clock, file) == "admin"
    entry = await store.get(KEYS + "admin")
    assert entry is not None
    assert load(entry.value, ApiKey).role is KeyRole.ADMIN
    assert await bootstrap(store, clock, file) == "admin"
    assert await store.get(KEYS + "admin") == entry, "an unchanged file writes nothing"
    other, _ = secrets.new_key("admin", b"2" * 32)
    file.write_text(other)
    await bootstrap(store, clock, file)
    changed = await store.get(KEYS + "admin")
    assert changed is not None
    assert secrets.verify(secrets.parse_key(other)[1], load(changed.value, ApiKey).secret_hash)
    assert secrets.parse_key(other)[1].encode() not in changed.value


@pytest.mark.parametrize(
    ("content", "mode"), [("fw_admin_" + "a" * 52, 0o644), ("hello", 0o600), ("", 0o600)]
)
async def test_bootstrap_refuses_a_file_that_others_read_or_that_is_no_key(
    tmp_path: Path, content: str, mode: int
) -> None:
    clock, file = SystemClock(), tmp_path / "admin_key"
    store = MemoryStore(clock)
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(FailedPrecondition) as caught:
        await bootstrap(store, clock, file)
    assert "aaaa" not in str(caught.value)
    assert (await store.list(KEYS)).entries == ()
    with pytest.raises(FairwayError):
        await bootstrap(store, clock, tmp_path / "absent")
