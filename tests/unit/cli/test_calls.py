"""Errors of the services become what the command line says and exits with."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fairway.cli.calls import admin_client, checked
from fairway.cli.commands.lifecycle import command_line, curl_lines
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.main import main
from fairway.cli.state import Endpoints, StateDir
from fairway.cli.targets import DEFAULT_STATE_DIR
from fairway.v1 import controlplane_pb2_grpc
from services.core import errors
from services.rpc.status import to_grpc_status

FAILURES = {
    "missing": errors.NotFound("no key missing"),
    "busy": errors.RequestRateExceeded("too many", retry_after_s=1.5),
    "closed": errors.Unauthenticated("who are you"),
    "denied": errors.PermissionDenied("not you"),
    "away": errors.StoreUnavailable("etcd does not answer", retry_after_s=2.0),
}


class ControlPlane(controlplane_pb2_grpc.ControlPlaneServiceServicer):
    async def GetKey(self, request: Any, context: Any) -> Any:
        await context.abort_with_status(to_grpc_status(FAILURES[request.name]))


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = grpc.aio.server()
    controlplane_pb2_grpc.add_ControlPlaneServiceServicer_to_server(ControlPlane(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def _error(address: str, name: str) -> CliError:
    async with admin_client(address, admin_key="k", call_s=5) as admin:
        with pytest.raises(CliError) as caught:
            await checked(admin.keys.get(name), what="cannot look")
    return caught.value


@pytest.mark.parametrize(
    ("name", "reason", "code", "step"),
    [
        ("missing", "NOT_FOUND", ExitCode.REFUSED, "list"),
        ("busy", "REQUEST_RATE_EXCEEDED", ExitCode.UNAVAILABLE, "try again in 2 s"),
        ("closed", "UNAUTHENTICATED", ExitCode.UNAUTHENTICATED, "--api-key"),
        ("denied", "PERMISSION_DENIED", ExitCode.UNAUTHENTICATED, "--admin-key"),
        ("away", "STORE_UNAVAILABLE", ExitCode.UNAVAILABLE, "try again in 2 s"),
    ],
)
async def test_reason_and_next_step(address: str, name: str, reason: str, code: ExitCode, step: str) -> None:
    error = await _error(address, name)
    assert (error.reason, error.exit_code) == (reason, code)
    assert error.message.startswith("cannot look: ")
    assert step in error.next_step


async def test_first_of_several_servers_that_answers_is_asked(address: str) -> None:
    error = await _error(f"127.0.0.1:9,nowhere.invalid:1,localhost:{address.rpartition(':')[2]}", "missing")
    assert error.reason == "NOT_FOUND"
    error = await _error("nowhere.invalid:1,nobody.invalid:2", "missing")
    assert (error.reason, error.exit_code) == ("UNAVAILABLE", ExitCode.UNAVAILABLE)
    assert "no control plane could be reached" in error.message
    with pytest.raises(CliError, match="address") as caught:
        admin_client(",", admin_key="k")
    assert caught.value.exit_code is ExitCode.UNAVAILABLE


async def test_unreachable_server_says_how_to_start_one() -> None:
    error = await _error("127.0.0.1:9", "missing")
    assert (error.reason, error.exit_code) == ("UNAVAILABLE", ExitCode.UNAVAILABLE)
    assert "fairway up" in error.next_step


@pytest.mark.parametrize(
    ("arguments", "code", "texts"),
    [
        (["complete", "x"], ExitCode.NOT_RUNNING, ("NO_ADDRESS", "fairway up", "--grpc")),
        (["complete", "x", "--grpc", "127.0.0.1:9"], ExitCode.UNAUTHENTICATED, ("NO_KEY", "--api-key")),
        (
            ["complete", "x", "--grpc", "127.0.0.1:9", "--api-key", "k"],
            ExitCode.USAGE,
            ("NO_MODEL", "--model"),
        ),
        (
            ["keys", "list", "--controlplane", "127.0.0.1:9", "--admin-key", "ü"],
            ExitCode.UNAUTHENTICATED,
            ("BAD_KEY", "copy it again"),
        ),
        (["complete", "x", "--timeout", "0"], ExitCode.USAGE, ("above 0", "--help")),
        (["chat"], ExitCode.NOT_RUNNING, ("NO_ADDRESS", "--grpc")),
        (["queue"], ExitCode.NOT_RUNNING, ("NO_ADDRESS", "--controlplane")),
        (["events", "--watch"], ExitCode.NOT_RUNNING, ("NO_ADDRESS", "--controlplane")),
        (["up", "--set", "worker"], ExitCode.USAGE, ("--set", "worker-1:FAIRWAY_DRAIN_S=5")),
        (["up", "--set", "worker-9:FAIRWAY_ZONE=a"], ExitCode.USAGE, ("NO_SUCH_PROCESS", "worker-0")),
        (["complete", "x", "-f", "y"], ExitCode.USAGE, ("USAGE", "fairway complete --help")),
        (["keys", "list"], ExitCode.NOT_RUNNING, ("NO_ADDRESS", "--controlplane")),
        (["models", "list"], ExitCode.NOT_RUNNING, ("NO_ADDRESS", "--registry")),
        (["status"], ExitCode.NOT_RUNNING, ("NOT_RUNNING", "fairway up")),
        (["up", "--replicas", "2"], ExitCode.USAGE, ("TOO_MANY_REPLICAS", "--workers 2")),
        (["up", "--model-dir", "nowhere"], ExitCode.USAGE, ("MODEL_MISSING", "--no-model")),
        (["down"], ExitCode.OK, ("nothing runs",)),
    ],
)
def test_command_without_an_installation(
    arguments: list[str],
    code: ExitCode,
    texts: tuple[str, ...],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "FAIRWAY_GRPC",
        "FAIRWAY_API_KEY",
        "FAIRWAY_ADMIN_KEY",
        "FAIRWAY_CONTROLPLANE",
        "FAIRWAY_REGISTRY",
    ):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert int(caught.value.code or 0) == code
    said = capsys.readouterr().err
    for text in texts:
        assert text in said


def test_lines_to_paste_are_shell_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = Endpoints("http://127.0.0.1:1", "127.0.0.1:2", "fw_local_secret", "fw_admin_x", "tiny")
    words = shlex.split(curl_lines(endpoints).replace("\\\n", " "))
    assert words[:3] == ["curl", "-sN", "http://127.0.0.1:1/v1/completions"]
    assert "Authorization: Bearer fw_local_secret" in words
    assert json.loads(words[-1])["model"] == "tiny"
    assert max(map(len, curl_lines(endpoints).splitlines())) <= 110
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(command_line(StateDir.at(tmp_path / "a b"), "complete", "def f(n):"))
    assert arguments[-4:] == ["complete", "def f(n):", "--state-dir", "a b"]
    assert shutil.which(program) is not None, "the command works as printed"
    assert "--state-dir" not in command_line(StateDir.at(DEFAULT_STATE_DIR), "chat")
