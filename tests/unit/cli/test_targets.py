"""Which key a command uses: the given one, the local installation's for its own servers, else the login."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from fairway.cli import targets
from fairway.cli.errors import CliError
from fairway.cli.state import Endpoints, StateDir
from fairway.cli.targets import Target
from fairway.login import Login, login_file, save


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def installed(folder: Path) -> Path:
    state = folder / ".fairway"
    state.mkdir()
    known = Endpoints("http://h", "g:1", "api", "admin", "m", registry="r:1", controlplane="c:1")
    known.save(StateDir.at(state).endpoints)
    return state


def log_in(left_s: float = 600.0) -> None:
    token = "https://id.example.com/token"
    save(login_file(), Login("https://id.example.com", "cli", token, "to.ke.n", time.time() + left_s))


def test_the_given_key_comes_first(tmp_path: Path) -> None:
    log_in()
    state = installed(tmp_path)
    assert targets.controlplane("", "given", state) == Target("c:1", "given")
    assert targets.controlplane("other:1", "given", state) == Target("other:1", "given")


def test_an_installation_of_this_machine_keeps_its_keys(tmp_path: Path) -> None:
    log_in()
    state = installed(tmp_path)
    assert targets.controlplane("", "", state) == Target("c:1", "admin")
    assert targets.registry("", "", state) == Target("r:1", "admin")
    assert targets.gateway("", "", state) == Target("g:1", "api")
    assert targets.http_api("", "", state) == Target("http://h", "api")


def test_another_server_gets_the_login_and_no_key_of_this_machine(tmp_path: Path) -> None:
    log_in()
    state = installed(tmp_path)
    for find in (targets.controlplane, targets.registry, targets.gateway):
        assert find("other:1", "", state) == Target("other:1", "")  # the client reads and renews it
    assert targets.http_api("https://other", "", state) == Target("https://other", "to.ke.n")


def test_keys_of_an_installation_are_sent_to_its_own_servers_alone(tmp_path: Path) -> None:
    state = installed(tmp_path)
    assert targets.controlplane("c:1", "", state) == Target("c:1", "admin")
    for find, option in (
        (targets.controlplane, "--admin-key"),
        (targets.registry, "--admin-key"),
        (targets.gateway, "--api-key"),
        (targets.http_api, "--api-key"),
    ):
        for foreign in ("evil:1", "c:1,evil:1", "http://h.evil"):
            with pytest.raises(CliError, match="for its own servers") as caught:
                find(foreign, "", state)
            assert caught.value.reason == "NO_KEY"
            assert option in caught.value.next_step


def test_the_certificate_of_an_installation_is_for_its_own_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / ".fairway"
    state.mkdir()
    known = Endpoints("https://h", "g:1", "api", "admin", "m", controlplane="c:1", tls_dir="/certs")
    replace(known, controlplanes=("c:1", "c:2")).save(StateDir.at(state).endpoints)
    for own in ("", "c:2", "c:1,c:2"):
        assert targets.controlplane(own, "k", state).tls_dir == Path("/certs")
    assert targets.gateway("", "k", state).tls_dir == Path("/certs")
    assert targets.controlplane("other:1", "k", state).tls_dir is None
    StateDir.at(state).operator_certs.mkdir(parents=True)  # as an installation that was stopped leaves it
    StateDir.at(state).endpoints.unlink()
    assert targets.controlplane("other:1", "k", state).tls_dir is None
    monkeypatch.setenv("FAIRWAY_TLS_DIR", "/mine")
    assert targets.controlplane("other:1", "k", state).tls_dir == Path("/mine")


def test_without_key_and_login_there_is_nothing_to_present(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="no key") as caught:
        targets.controlplane("other:1", "", tmp_path / "none")
    assert "fairway login" in caught.value.next_step


def test_a_login_that_ended_is_named(tmp_path: Path) -> None:
    log_in(-1)
    with pytest.raises(CliError, match="expired") as caught:
        targets.http_api("https://other", "", tmp_path / "none")
    assert caught.value.reason == "LOGIN_ENDED"
