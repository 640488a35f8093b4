"""A parallel run whose process dies in a test goes on with the others, and ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

CONFTEST = """
import pytest
from tests.support import groups

groups.group_of = lambda nodeid: nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config, log):
    return groups.ByGroup(config, log)
"""


def test_a_process_that_dies_fails_its_test_once(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name in ("a", "b", "c"):
        (tmp_path / f"test_{name}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    (tmp_path / "test_d.py").write_text("import os\ndef test_dies(): os._exit(1)\ndef test_after(): pass\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "1 failed, 7 passed" in run.stdout, run.stdout + run.stderr
    assert run.stdout.count("replacing crashed worker") == 1
