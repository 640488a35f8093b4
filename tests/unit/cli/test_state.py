from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fairway.cli.errors import CliError
from fairway.cli.state import Endpoints, StateDir, ensure_secrets, read_json, read_secret, write_private
from services.runtime.secrets import parse_key

SECRETS = ("admin_key", "internal_token", "ticket_key", "record_keys", "audit_key")


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir.at(tmp_path / "state")
    state.create()
    return state


def test_secrets_are_private_distinct_and_kept(state: StateDir) -> None:
    ensure_secrets(state)
    first = {name: read_secret(state, name) for name in SECRETS}
    assert len(set(first.values())) == len(SECRETS)
    assert all(_mode(state.secret(name)) == 0o600 for name in SECRETS)
    assert _mode(state.secrets) == 0o700
    ensure_secrets(state)
    assert {name: read_secret(state, name) for name in SECRETS} == first


def test_widened_mode_is_narrowed_again(state: StateDir) -> None:
    ensure_secrets(state)
    state.secret("ticket_key").chmod(0o644)
    ensure_secrets(state)
    assert _mode(state.secret("ticket_key")) == 0o600


def test_truncated_secret_is_replaced(state: StateDir) -> None:
    state.secret("internal_token").write_text("short")
    ensure_secrets(state)
    assert len(read_secret(state, "internal_token")) == 64


def test_admin_key_has_the_form_that_the_control_plane_parses(state: StateDir) -> None:
    ensure_secrets(state)
    name, _ = parse_key(read_secret(state, "admin_key"))
    assert name == "admin"


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_private(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_private(path, "\ud800")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_unusable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CliError, match="file") as caught:
        StateDir.at(tmp_path / "file" / "state").create()
    assert "--state-dir" in caught.value.next_step


def test_endpoints_survive_a_round_trip_and_are_private(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.json"
    endpoints = Endpoints(
        http="http://127.0.0.1:1", grpc="127.0.0.1:2", api_key="fw_a_b", admin_key="fw_c_d", model="m",
        workers=("127.0.0.1:3",), pids={"etcd": 4},
    )  # fmt: skip
    endpoints.save(path)
    assert _mode(path) == 0o600
    assert Endpoints.load(path) == endpoints
    raw = read_json(path)
    assert raw is not None
    assert {"http", "grpc", "api_key", "admin_key", "model"} <= raw.keys()


_FIVE = '"http": "x", "grpc": "y", "api_key": "k", "admin_key": "a"'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"http": "x"}',
        "{" + _FIVE + ', "model": 5}',
        "{" + _FIVE + ', "model": "m", "workers": 5}',
        "{" + _FIVE + ', "model": "m", "pids": null}',
    ],
)
def test_incomplete_endpoints_count_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "endpoints.json"
    path.write_text(text)
    assert Endpoints.load(path) is None


def test_refused_write_is_named_with_its_file(state: StateDir) -> None:
    state.endpoints.mkdir()
    with pytest.raises(CliError, match=r"endpoints\.json") as caught, state.writing():
        state.endpoints.read_text()
    assert caught.value.reason == "STATE_DIR_UNUSABLE"


def test_folders_of_an_older_installation_become_private_whatever_they_were(tmp_path: Path) -> None:
    state = StateDir.at(tmp_path / ".fairway")
    (state.data("registry") / "deep").mkdir(parents=True)
    state.logs.mkdir()
    state.log("gateway").write_text("")
    state.endpoints.write_text("{}")
    for path in (state.root, *state.root.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    outside = tmp_path / "outside"
    outside.write_text("")
    outside.chmod(0o644)
    (state.logs / "link").symlink_to(outside)
    state.create()
    for path in (state.root, *state.root.rglob("*")):
        assert path.is_symlink() or not _mode(path) & 0o077, path
    assert _mode(outside) == 0o644


def test_folder_that_holds_other_things_keeps_its_modes_and_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "home"
    root.mkdir()
    root.chmod(0o755)
    (root / "letter").write_text("")
    with pytest.raises(CliError, match="other files") as caught:
        StateDir.at(root).create()
    assert caught.value.reason == "STATE_DIR_UNUSABLE"
    assert _mode(root) == 0o755
    (root / "letter").unlink()
    root.chmod(0o1777)
    with pytest.raises(CliError, match="other files"):
        StateDir.at(root).create()
    root.chmod(0o755)
    StateDir.at(root).create()
    assert _mode(root) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("what", ["", "logs", "secrets", "sockets", "secrets/admin_key"])
def test_folder_of_another_user_is_refused(state: StateDir, what: str) -> None:
    ensure_secrets(state)
    state.root.chmod(0o755)
    os.chown(state.root / what, 65534, 65534)
    with pytest.raises(CliError, match="belongs to the user 65534"):
        state.create()


def test_sockets_of_a_long_or_odd_path_are_below_tmp(tmp_path: Path) -> None:
    for root in (tmp_path / ("x" * 100), tmp_path / "a, b"):
        state = StateDir.at(root)
        state.create()
        try:
            assert state.sockets.parent == Path("/tmp")
            assert _mode(state.sockets) == 0o700
            assert state.sockets == StateDir.at(root).sockets
        finally:
            state.sockets.rmdir()
    assert StateDir.at(Path("/srv/fairway")).sockets == Path("/srv/fairway/sockets")
