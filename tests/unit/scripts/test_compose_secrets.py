"""The secrets of the containers: complete, private, and never replaced."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import pytest

from scripts import compose_secrets
from services.runtime.config import read_secret
from services.runtime.secrets import parse_key

OWNER = (os.getuid(), os.getgid())
NAMES = {
    "admin_key",
    "internal_token",
    "ticket_key",
    "record_keys",
    "audit_key",
    "redis_password",
    "redis_acl",
    "grafana_password",
}


def texts(state: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (state / "secrets").iterdir()}


def test_all_are_made_once_and_private(tmp_path: Path) -> None:
    state = tmp_path / "compose"
    assert set(compose_secrets.make_secrets(state, OWNER)) == NAMES
    first = texts(state)
    assert set(first) == NAMES
    assert len(set(first.values())) == len(NAMES)
    for path in [state, state / "secrets", *(state / "secrets").iterdir()]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    assert compose_secrets.make_secrets(state, OWNER) == []
    assert texts(state) == first


def test_a_lost_one_is_made_again_and_an_open_one_closed(tmp_path: Path) -> None:
    compose_secrets.make_secrets(tmp_path, OWNER)
    (tmp_path / "secrets" / "ticket_key").unlink()
    (tmp_path / "secrets" / "admin_key").chmod(0o644)
    assert compose_secrets.make_secrets(tmp_path, OWNER) == ["ticket_key"]
    assert stat.S_IMODE((tmp_path / "secrets" / "admin_key").stat().st_mode) == 0o600


def test_the_services_accept_them(tmp_path: Path) -> None:
    compose_secrets.make_secrets(tmp_path, OWNER)
    assert parse_key(read_secret(tmp_path / "secrets" / "admin_key"))[0] == "admin"
    for name in ("internal_token", "ticket_key"):
        assert read_secret(tmp_path / "secrets" / name)


def test_redis_gets_the_hash_and_not_the_password(tmp_path: Path) -> None:
    compose_secrets.make_secrets(tmp_path, OWNER)
    password = (tmp_path / "secrets" / "redis_password").read_text().strip()
    acl = (tmp_path / "secrets" / "redis_acl").read_text()
    assert hashlib.sha256(password.encode()).hexdigest() in acl
    assert password not in acl


def test_variables_that_are_there_stay(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("FLEET_UID=7\nOTHER=1")
    assert compose_secrets.add_variables(path, {"FLEET_UID": "8", "FLEET_GID": "9"}) == ["FLEET_GID"]
    assert path.read_text() == "FLEET_UID=7\nOTHER=1\nFLEET_GID=9\n"
    assert compose_secrets.add_variables(path, {"FLEET_UID": "8", "FLEET_GID": "9"}) == []


def test_the_command_says_whose_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compose_secrets.main(["--state", str(tmp_path / "s"), "--env", str(tmp_path / ".env")])
    owner = (tmp_path / "s" / "secrets" / "admin_key").stat().st_uid
    assert f"FLEET_UID={owner}\n" in (tmp_path / ".env").read_text()
    assert owner != 0
    assert "fw_admin" not in capsys.readouterr().out
