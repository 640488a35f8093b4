from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fairway.cli.errors import CliError
from fairway.cli.fleet.options import LOOPBACK
from fairway.cli.fleet.ports import choose_ports, load_ports, save_ports, try_bind
from tests.support.local_servers import free_port


def test_ports_are_distinct_and_free() -> None:
    names = [f"port-{number}" for number in range(20)]
    ports = choose_ports(names, fixed={}, remembered={}, preferred={})
    assert len(set(ports.values())) == 20
    for port in ports.values():
        holder = try_bind(port)
        assert holder is not None
        holder.close()


def test_remembered_port_wins_over_the_preferred_one() -> None:
    remembered, preferred = free_port(), free_port()
    ports = choose_ports(["a"], fixed={}, remembered={"a": remembered}, preferred={"a": preferred})
    assert ports == {"a": remembered}


def test_taken_remembered_port_is_replaced() -> None:
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen(1)
        taken = int(other.getsockname()[1])
        ports = choose_ports(["a"], fixed={}, remembered={"a": taken}, preferred={"a": taken})
        assert ports["a"] != taken


def test_taken_fixed_port_names_the_flag() -> None:
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen(1)
        taken = int(other.getsockname()[1])
        with pytest.raises(CliError, match=str(taken)) as caught:
            choose_ports(["gateway_http"], fixed={"gateway_http": taken}, remembered={}, preferred={})
    assert caught.value.reason == "PORT_TAKEN"
    assert "--http-port" in caught.value.next_step


def test_fixed_port_is_not_given_to_another_name() -> None:
    port = free_port()
    ports = choose_ports(["a", "b"], fixed={"b": port}, remembered={"a": port}, preferred={})
    assert ports["b"] == port
    assert ports["a"] != port


def test_of_two_that_start_at_once_one_gets_the_preferred_port() -> None:
    """Neither listens yet."""
    preferred = free_port()
    choose = (
        "import sys\nfrom fairway.cli.fleet.ports import choose_ports\n"
        f"ports = choose_ports(['a'], fixed={{}}, remembered={{}}, preferred={{'a': {preferred}}})\n"
        "print(ports['a'], flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", choose]
    with contextlib.ExitStack() as held:
        processes = [
            held.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for _ in range(2)
        ]
        chosen = [int(process.stdout.readline()) for process in processes if process.stdout is not None]
        for process in processes:
            process.communicate()
    assert chosen.count(preferred) == 1
    assert choose_ports(["a"], fixed={"a": preferred}, remembered={}, preferred={}) == {"a": preferred}


def test_memory_keeps_ports_of_other_runs_and_skips_garbage(tmp_path: Path) -> None:
    path = tmp_path / "ports.json"
    save_ports(path, {"a": 1000, "b": 2000})
    save_ports(path, {"b": 3000})
    assert load_ports(path) == {"a": 1000, "b": 3000}
    path.write_text('{"a": "x", "b": 70000, "c": 5}')
    assert load_ports(path) == {"c": 5}
    path.write_text("{")
    assert load_ports(path) == {}
