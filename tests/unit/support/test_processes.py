"""What ``-n`` runs, reports and ends: a small suite of its own, run as a person runs this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONFTEST = """
import os
import pytest
from tests.support import processes

def pytest_addoption(parser):
    processes.add_option(parser)

def pytest_configure(config):
    processes.configure(config, lambda nodeid: nodeid.partition("::")[0])

@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    yield tmp_path_factory.mktemp("shared")
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"closed {os.getpid()}\\n")

@pytest.fixture(scope="module")
def of_module(request):
    yield
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"module {request.module.__name__}\\n")
"""
FILES = {
    "test_a.py": """
        import os, pytest
        @pytest.mark.parametrize("number", range(3))
        def test_same_process(number, shared, of_module):
            (shared / str(os.getpid())).touch()
            assert len(list(shared.iterdir())) == 1
        """,
    "test_b.py": """
        import pytest
        def test_fails(shared, of_module):
            print("what it printed")
            assert 1 == 2
        def test_skipped():
            pytest.skip("not here")
        """,
    "test_c.py": """
        import warnings
        def test_warns():
            warnings.warn("look out", UserWarning)
        """,
}
DIES = """
    import os
    def test_before(): pass
    def test_dies(): os._exit(3)
    def test_after(): pass
    """


def _run(folder: Path, files: dict[str, str], *options: str) -> tuple[int, str, list[str]]:
    """Return the exit status, the output, and what the fixtures wrote down."""
    notes = folder / "notes"
    notes.touch()
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        (folder / name).write_text("\n".join(line[indent:] for line in lines) + "\n")
    others = ("xdist", "cacheprovider", "hypothesispytest", "asyncio", "anyio")
    plugins = [option for name in others for option in ("-p", f"no:{name}")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, f"--basetemp={folder}/base", "-rA", *options],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "NOTES": str(notes)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, notes.read_text().split("\n")


def test_every_test_is_reported_once_and_every_fixture_closed(tmp_path: Path) -> None:
    status, output, notes = _run(tmp_path, FILES, "-n", "2")
    assert status == 1
    assert "1 failed, 4 passed, 1 skipped, 1 warning" in output
    assert "what it printed" in output
    assert "UserWarning: look out" in output
    processes = [line for line in notes if line.startswith("closed")]
    assert len(processes) == len(set(processes)), "once for each process that used it"
    assert sorted(line for line in notes if line.startswith("module")) == ["module test_a", "module test_b"]


@pytest.mark.parametrize(("option", "passed"), [("--maxfail=3", 6), ("-x", 0)])
def test_a_process_that_ends_fails_its_tests(tmp_path: Path, option: str, passed: int) -> None:
    """The others go on, but for a run that is to end with its first failure."""
    status, output, _ = _run(tmp_path, {"test_a.py": DIES, **_many(5)}, "-n", "2", option)
    assert status == 1
    assert "test_a.py::test_dies" in output
    assert "ended with it" in output
    if option == "-x":
        assert "stopping after 1 failures" in output
    else:
        assert f"2 failed, {passed} passed" in output
        assert "it never ran" in output


def _many(count: int) -> dict[str, str]:
    return {f"test_m{number}.py": "def test_it(): pass" for number in range(count)}


def test_a_fixture_that_fails_to_close_fails_the_run(tmp_path: Path) -> None:
    broken = """
        import pytest
        @pytest.fixture(scope="session")
        def broken():
            yield
            raise RuntimeError("does not close")
        def test_it(broken): pass
        """
    status, output, _ = _run(tmp_path, {"test_a.py": broken, **_many(1)}, "-n", "2")
    assert status == 1
    assert "does not close" in output
