"""What `fairway up` gives its processes is what they read."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairway.cli.errors import CliError
from fairway.cli.fleet.installation import check_disk, check_model
from fairway.cli.fleet.options import UpOptions
from fairway.cli.fleet.roles import (
    Addresses,
    check_settings,
    port_names,
    role_environment,
    role_specs,
    store_specs,
)
from fairway.cli.state import StateDir
from services.runtime import config

ROLES = ("registry", "controlplane", "scheduler", "worker-0", "worker-1", "gateway")


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir.at(tmp_path)
    state.create()
    return state


@pytest.fixture
def addresses(tmp_path: Path) -> Addresses:
    names = port_names(UpOptions(state_dir=str(tmp_path), workers=2))
    return Addresses({name: 40000 + number for number, name in enumerate(names)}, workers=2)


@pytest.mark.parametrize("name", ROLES)
def test_environment_is_one_that_the_role_accepts(state: StateDir, addresses: Addresses, name: str) -> None:
    theirs = {"FAIRWAY_API_KEY": "k", "FAIRWAY_GRPC": "x", "FAIRWAY_TRACES": "traces"}
    caller = {**theirs, "FAIRWAY_LOG_LEVEL": "debug", "PATH": "/bin"}
    environment = role_environment(state, addresses, caller, name)
    settings = config.load(environment)
    assert settings.etcd_endpoints == (state.etcd_address,)
    assert settings.redis_url == state.redis_url
    assert settings.internal_token_file == state.secret("internal_token")
    assert settings.ticket_key_file == state.secret("ticket_key")
    assert settings.registry == addresses.of("registry")
    assert settings.log_level == "debug"
    assert environment["PATH"] == "/bin"
    assert not environment.keys() & theirs.keys()


def test_each_role_has_an_address_and_a_folder_of_its_own(state: StateDir, addresses: Addresses) -> None:
    settings = [config.load(role_environment(state, addresses, {}, name)) for name in ROLES]
    assert len({each.listen for each in settings}) == len(ROLES)
    assert len({each.state_dir for each in settings}) == len(ROLES)
    assert [each.worker_id for each in settings[3:5]] == ["worker-0", "worker-1"]
    assert settings[1].audit_key_file == state.secret("audit_key")
    assert settings[1].audit_dir == state.data("audit")
    assert settings[1].admin_key_file == state.secret("admin_key")
    assert settings[5].http_listen == addresses.of("gateway_http")
    assert {each.admin_key_file for each in (*settings[:1], *settings[2:])} == {None}


def test_callers_settings_do_not_override_what_the_installation_decides(
    state: StateDir, addresses: Addresses
) -> None:
    environment = role_environment(state, addresses, {"FAIRWAY_LISTEN": "0.0.0.0:1"}, "scheduler")
    assert environment["FAIRWAY_LISTEN"] == addresses.of("scheduler")


def test_drain_time_reaches_the_stop_time(state: StateDir, addresses: Addresses) -> None:
    specs = role_specs(state, addresses, {"FAIRWAY_DRAIN_S": "42"})
    assert {spec.stop_s for spec in specs} == {47.0}
    assert [spec.name for spec in specs] == list(ROLES)
    assert specs[3].argv[-4:] == ("-P", "-m", "services", "worker")


def test_several_of_each_role_have_names_ports_and_folders_of_their_own(state: StateDir) -> None:
    options = UpOptions(state_dir="", workers=2, gateways=3, schedulers=2, controlplanes=2)
    names = port_names(options)
    assert len(set(names)) == len(names)
    addresses = Addresses.for_options(options, {name: 40000 + number for number, name in enumerate(names)})
    specs = role_specs(state, addresses, {})
    assert [spec.name for spec in specs] == [
        *("registry", "controlplane", "controlplane-1", "scheduler", "scheduler-1"),
        *("worker-0", "worker-1", "gateway", "gateway-1", "gateway-2"),
    ]
    settings = [config.load(spec.env) for spec in specs]
    assert len({each.listen for each in settings}) == len(specs)
    assert len({each.state_dir for each in settings}) == len(specs)
    assert len({each.http_listen for each in settings[7:]}) == 3
    assert [each.admin_key_file for each in settings[1:3]] == [state.secret("admin_key")] * 2
    assert {spec.argv[-1] for spec in specs} == {
        *("registry", "controlplane", "scheduler", "worker", "gateway")
    }


def test_setting_of_a_role_and_of_one_process_go_over_the_rest(state: StateDir, addresses: Addresses) -> None:
    settings = (
        ("worker-1", "FAIRWAY_DRAIN_S", "3"),
        ("worker", "FAIRWAY_DRAIN_S", "4"),
        ("worker", "FAIRWAY_REGISTRY", "127.0.0.1:1"),
    )
    found = [
        config.load(role_environment(state, addresses, {"FAIRWAY_DRAIN_S": "9"}, name, settings))
        for name in ("worker-0", "worker-1", "gateway")
    ]
    assert [each.drain_s for each in found] == [4, 3, 9]
    assert [each.registry for each in found] == ["127.0.0.1:1"] * 2 + [addresses.of("registry")]


def test_setting_of_an_unknown_process_is_refused() -> None:
    check_settings(UpOptions(state_dir="", settings=(("worker", "FAIRWAY_ZONE", "a"),)))
    with pytest.raises(CliError, match="worker-7") as caught:
        check_settings(UpOptions(state_dir="", settings=(("worker-7", "FAIRWAY_ZONE", "a"),)))
    assert "worker-0" in caught.value.next_step


def test_stores_keep_their_data_private_and_see_no_settings(state: StateDir) -> None:
    etcd, redis = store_specs(state, {"ETCD_NAME": "x", "FAIRWAY_LISTEN": "y", "PATH": "/bin"})
    assert dict(redis.env) == {"PATH": "/bin"}
    assert dict(etcd.env) == {"PATH": "/bin", "GOMAXPROCS": "1"}
    assert state.data("etcd").stat().st_mode & 0o077 == 0
    assert "--appendonly" in redis.argv


def test_stores_listen_on_no_port(state: StateDir) -> None:
    etcd, redis = store_specs(state, {})
    assert not [word for word in etcd.argv if "http:" in word or "https:" in word]
    assert sum("unix://" in word for word in etcd.argv) == 5
    assert etcd.cwd == state.sockets
    assert redis.argv[redis.argv.index("--port") + 1] == "0"


def test_full_disk_is_refused_where_the_folder_will_be(tmp_path: Path) -> None:
    check_disk(tmp_path / "not" / "there" / "yet")
    with pytest.raises(CliError, match=str(tmp_path)) as caught:
        check_disk(tmp_path / "not" / "there" / "yet", needed=2**60)
    assert caught.value.reason == "NO_DISK_SPACE"
    assert "--state-dir" in caught.value.next_step


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    options = UpOptions(state_dir="", model_dir=str(tmp_path))
    with pytest.raises(CliError, match=r"config\.json"):
        check_model(options)
    (tmp_path / "config.json").write_text("{}")
    check_model(options)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("", "fairway-tiny"),
        ("/m/My_Model.7B", "my-model-7b"),
        ("/m/Qwen/checkpoint", "qwen"),
        ("/m/_", "model"),
    ],
)
def test_model_takes_the_name_of_its_folder(folder: str, name: str) -> None:
    assert UpOptions(state_dir="", model_dir=folder).model_name == name


def test_options_survive_the_way_to_the_detached_process() -> None:
    options = UpOptions(
        state_dir="/s",
        http_port=1,
        workers=2,
        replicas=2,
        model_dir="/m",
        deploy=False,
        gateways=2,
        settings=(("worker", "FAIRWAY_ZONE", "a"), ("gateway", "FAIRWAY_DRAIN_S", "1")),
    )
    assert UpOptions.from_json(options.to_json()) == options


def test_the_gateway_alone_runs_without_caches_of_small_blocks(state: StateDir, addresses: Addresses) -> None:
    environments = {name: role_environment(state, addresses, {}, name) for name in ROLES}
    assert {name for name, found in environments.items() if "GLIBC_TUNABLES" in found} == {"gateway"}
