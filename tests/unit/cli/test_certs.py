"""`fairway certs`: what it makes, for whom, and what it refuses."""

from __future__ import annotations

import json
import stat
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fairway.cli.authority import Authority, opened_authority
from fairway.cli.calls import certificate_problem, credentials_of
from fairway.cli.errors import CliError
from fairway.cli.fleet.options import UpOptions
from fairway.cli.fleet.roles import Addresses, port_names, role_environment, write_certificates
from fairway.cli.state import StateDir
from fairway.tls import CertificateProblem, SpiffeId, read_folder
from tests.support.certificates import authority_in, issued
from tests.support.command_line import CommandLine


def test_files_are_private_and_have_the_identity(tmp_path: Path) -> None:
    authority = authority_in(tmp_path / "certs")
    made = authority.issue("gateway", "gateway-1", dns=("api.example.com",), addresses=("10.0.0.7",))
    identity = read_folder(made.folder)
    assert str(identity.id) == "spiffe://fairway.internal/gateway/gateway-1"
    assert identity.id.server_name == "gateway.fairway.internal"
    names = [str(each.value) for each in made.names]
    assert {"localhost", "gateway-1", "api.example.com", "127.0.0.1", "10.0.0.7"} <= set(names)
    assert not identity.leaf.problem(time.time())
    assert not identity.issuer_problem()
    for path in (tmp_path / "certs").rglob("*"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


@pytest.mark.parametrize(
    ("role", "name"), [("admin", "a"), ("worker", "../a"), ("worker", ""), ("worker", "authority")]
)
def test_identities_that_cannot_be_are_refused(tmp_path: Path, role: str, name: str) -> None:
    with pytest.raises(CliError, match="cannot be issued"):
        authority_in(tmp_path / "certs").issue(role, name)


def test_what_is_not_due_stays(tmp_path: Path) -> None:
    authority = authority_in(tmp_path / "certs")
    first = authority.issue("worker", "w", dns=("w.example.com",), days=30)
    kept = authority.issue("worker", "w", days=30, due_only=True)
    assert kept.leaf == first.leaf
    later = Authority(authority.root, lambda: datetime.now(UTC) + timedelta(days=21))
    assert first.leaf.is_due(later._now().timestamp())
    (renewed,) = later.renew(due_only=True)
    assert renewed.leaf.serial != first.leaf.serial
    assert renewed.names == first.names
    assert renewed.life == first.life
    wider = later.issue("worker", "w", addresses=("10.0.0.1",), days=30, due_only=True)
    assert set(first.names) < set(wider.names), "names that were added stay"


def test_an_interrupted_rotation_of_the_authority_continues(tmp_path: Path) -> None:
    authority = authority_in(tmp_path / "certs")
    before = issued(authority, "worker").leaf

    class Killed(Exception):
        pass

    def kill(done: str) -> None:
        raise Killed

    with pytest.raises(Killed):
        authority.rotate(kill)
    between = read_folder(authority.root / "worker")
    assert between.leaf == before
    assert between.roots_pem.count(b"BEGIN") == 2
    authority.rotate(lambda done: None)
    after = read_folder(authority.root / "worker")
    assert after.roots_pem.count(b"BEGIN") == 1
    assert not after.issuer_problem()
    assert {path.name for path in (authority.root / "authority").iterdir()} == {"2.crt", "2.key"}


def test_a_revoked_one_is_listed_in_every_folder_and_not_renewed(tmp_path: Path) -> None:
    authority = authority_in(tmp_path / "certs")
    worker, gateway = issued(authority, "worker"), issued(authority, "gateway")
    authority.revoke(worker.leaf.serial)
    assert read_folder(gateway.folder).revoked == {worker.leaf.serial}
    assert [each.folder.name for each in authority.renew()] == ["gateway"]
    authority.rotate(lambda done: None)
    assert read_folder(gateway.folder).revoked == {worker.leaf.serial}


def test_a_list_of_another_authority_is_refused(tmp_path: Path) -> None:
    """Otherwise whoever can write that file could have any certificate refused or accepted."""
    folder = issued(authority_in(tmp_path / "certs"), "worker").folder
    other = issued(authority_in(tmp_path / "other"), "worker").folder
    (folder / "ca.crl").write_bytes((other / "ca.crl").read_bytes())
    with pytest.raises(CertificateProblem, match=r"ca.crl is not signed by an authority in ca.crt"):
        read_folder(folder)


@pytest.mark.parametrize("uri", ["https://a/b/c", "spiffe://", "spiffe://a", "spiffe://a/b", "spiffe://a//c"])
def test_other_uris_are_no_identity(uri: str) -> None:
    assert SpiffeId.parse(uri) is None


def test_the_command_line_states_what_is_wrong_with_its_certificate(tmp_path: Path) -> None:
    late = issued(authority_in(tmp_path / "certs", days_ago=3), "operator", days=1)
    assert "`fairway certs rotate`" in certificate_problem(late.folder)
    assert "expired" in certificate_problem(late.folder)
    fresh = issued(authority_in(tmp_path / "certs"), "operator")
    assert certificate_problem(fresh.folder) == ""
    other = issued(authority_in(tmp_path / "other"), "operator").folder
    for name in ("ca.crt", "ca.crl"):
        (fresh.folder / name).write_bytes((other / name).read_bytes())
    assert "not signed by an authority" in certificate_problem(fresh.folder)
    with pytest.raises(CliError, match="No such file"):
        credentials_of(tmp_path / "nowhere")


def test_an_installation_has_certificates_of_its_processes(tmp_path: Path) -> None:
    state = StateDir.at(tmp_path)
    options = UpOptions(state_dir=str(tmp_path), workers=2, host="0.0.0.0")
    ports = dict.fromkeys(port_names(options), 1)
    addresses = Addresses.for_options(options, ports)
    write_certificates(state, addresses)
    for name in (*addresses.role_names, "operator"):
        assert read_folder(state.certs / name).id.role == name.partition("-")[0]
    assert addresses.http_url("gateway") == "https://127.0.0.1:1"
    environment = role_environment(state, addresses, {}, "worker-1")
    assert environment["FAIRWAY_TLS_DIR"] == str(state.certs / "worker-1")
    plain = Addresses.for_options(UpOptions(state_dir=str(tmp_path), insecure=True, host="0.0.0.0"), ports)
    assert plain.http_url("gateway") == "http://127.0.0.1:1"
    assert role_environment(state, plain, {}, "gateway")["FAIRWAY_INSECURE"] == "true"
    on_loopback = Addresses.for_options(UpOptions(state_dir=str(tmp_path)), ports)
    assert on_loopback.tls_of("gateway") is None
    assert on_loopback.tls_of("registry") == state.operator_certs


def test_commands_make_list_and_revoke(tmp_path: Path) -> None:
    cli = CommandLine(tmp_path)
    refused = cli("certs", "issue", "worker", code=3)
    assert "`fairway certs init`" in refused.err
    cli("certs", "init")
    cli("certs", "issue", "worker", "worker-0", "worker-1")
    listed = json.loads(cli("certs", "list", "-o", "json").out)["certificates"]
    assert [each["name"] for each in listed] == ["worker-0", "worker-1"]
    cli("certs", "revoke", listed[0]["serial"])
    assert "renewed: worker-1" in cli("certs", "rotate").out
    cli("certs", "rotate", "--ca", "--pause", "0.01s")
    states = json.loads(cli("certs", "list", "-o", "json").out)["certificates"]
    assert [each["state"] for each in states] == ["revoked", "valid"]
    with opened_authority(StateDir.at(tmp_path).certs) as authority:
        assert len(authority.issued()) == 2
