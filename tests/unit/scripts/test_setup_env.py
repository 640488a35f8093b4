"""The installation's steps, with a stand-in interpreter that writes down what it is called with."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts import setup_env

STANDIN = """#!{python}
import json, os, sys
names = ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_INDEX_URL")
call = {{"args": sys.argv[1:], "env": {{name: os.environ[name] for name in names if name in os.environ}}}}
with open({log!r}, "a") as log:
    log.write(json.dumps(call) + "\\n")
fails = {fails!r}
sys.exit(any(all(word in sys.argv for word in words) for words in fails))
"""


class Call(NamedTuple):
    args: list[str]
    env: dict[str, str]


Interpreter = Callable[..., tuple[str, Callable[[], list[Call]]]]


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Interpreter:
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)

    def make(*fails: tuple[str, ...]) -> tuple[str, Callable[[], list[Call]]]:
        path, log = tmp_path / "python", tmp_path / "calls"
        path.write_text(STANDIN.format(python=sys.executable, log=str(log), fails=fails))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path), lambda: [Call(**json.loads(line)) for line in log.read_text().splitlines()]

    return make


def test_without_a_gpu_torch_alone_comes_from_the_cpu_index(interpreter: Interpreter) -> None:
    python, calls = interpreter()
    setup_env.install_torch(python, gpu=False)
    question, install = calls()
    assert question.args[:3] == ["-m", "pip", "--disable-pip-version-check"]
    assert {"index", "versions", "torch", "--timeout", "5"} <= set(question.args)
    assert {"install", "--no-deps", "--index-url", setup_env.CPU_INDEX} <= set(install.args)
    requirements = [each for each in install.args[5:] if not each.startswith("-")]
    values = {setup_env.CPU_INDEX, setup_env.CONSTRAINTS, "30", "2"}
    assert [each for each in requirements if each not in values] == ["torch"]
    assert install.env["PIP_EXTRA_INDEX_URL"] == setup_env.CPU_INDEX


@pytest.mark.parametrize("fails", [("index",), ("install", "--index-url")])
def test_unreachable_cpu_index_falls_back_to_pips_own(
    interpreter: Interpreter, fails: tuple[str, ...]
) -> None:
    python, calls = interpreter(fails)
    setup_env.install_torch(python, gpu=False)
    last = calls()[-1]
    assert "--index-url" not in last.args
    assert setup_env.CPU_INDEX not in last.args
    assert last.env == {}
    assert {"install", "--no-deps", "torch"} <= set(last.args)


def test_with_a_gpu_only_pips_own_index_is_asked(interpreter: Interpreter) -> None:
    python, calls = interpreter()
    setup_env.install_torch(python, gpu=True)
    (install,) = calls()
    assert setup_env.CPU_INDEX not in " ".join(install.args)
    assert install.env == {}
    assert "--no-deps" not in install.args


def test_failed_installation_says_what_to_do(
    interpreter: Interpreter, capsys: pytest.CaptureFixture[str]
) -> None:
    python, _ = interpreter(("install",))
    with pytest.raises(SystemExit) as caught:
        setup_env.pip(python, ["install", "x"])
    assert caught.value.code == 1
    assert "next:" in capsys.readouterr().err


def test_a_long_installation_reports_its_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported, report = tmp_path / "reported", setup_env.report

    def noted(text: str) -> None:
        report(text)
        if text.endswith("installing 2 packages"):
            reported.touch()

    monkeypatch.setattr(setup_env, "report", noted)
    code = f"""
import os, sys, time
print('Collecting a')
print('Installing collected packages: a, b', flush=True)
ends_s = time.monotonic() + 60
while not os.path.exists({str(reported)!r}) and time.monotonic() < ends_s:
    time.sleep(0.02)
sys.exit(3)
"""
    assert setup_env.run_reporting([sys.executable, "-c", code], every_s=0.1) == 3
    said = capsys.readouterr().out.splitlines()
    assert said
    assert said[-1].startswith("setup:")
    assert said[-1].endswith("installing 2 packages")


def test_missing_disk_space_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    setup_env.check_disk(1)
    with pytest.raises(SystemExit):
        setup_env.check_disk(2**62)
    assert "GiB are free" in capsys.readouterr().err


def test_torch_of_the_constraints_counts_as_present(interpreter: Interpreter) -> None:
    assert setup_env.pinned("torch") == "2.13.0"
    assert setup_env.torch_present(sys.executable)
    python, _ = interpreter(("-c",))
    assert not setup_env.torch_present(python)


def test_environment_without_pip_is_made_again(tmp_path: Path) -> None:
    """What an interruption between the interpreter and pip leaves."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True, timeout=60)
    assert not setup_env.venv_is_whole(str(tmp_path / "bin" / "python"))
    assert not setup_env.venv_is_whole(str(tmp_path / "bin" / "none"))
    assert setup_env.venv_is_whole(sys.executable)


def test_makefile_says_what_is_missing_without_a_python() -> None:
    done = subprocess.run(
        ["make", "up", "PYTHON="], cwd=setup_env.ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode != 0
    assert "no Python 3.11 or later" in done.stderr
    assert "next:" in done.stderr


def test_the_build_of_torch_can_be_named_for_another_machine() -> None:
    assert setup_env.wants_gpu(["--torch", "cuda"])
    assert not setup_env.wants_gpu(["--dev", "--torch", "cpu"])


@pytest.mark.parametrize("argv", [["--torch"], ["--torch", "rocm"]])
def test_an_unknown_build_of_torch_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        setup_env.wants_gpu(argv)
    assert "write --torch cpu or --torch cuda" in capsys.readouterr().err
