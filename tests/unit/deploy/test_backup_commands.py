"""The documented backup of an installation is readable by its owner alone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "operations" / "backup.md"


def test_the_archive_is_private_whatever_the_umask_and_what_was_there(tmp_path: Path) -> None:
    section = PAGE.read_text().partition("## `fairway up`")[2]
    commands = re.findall(r"^.*\btar -cf.*$", section, re.MULTILINE)
    assert len(commands) == 1
    (tmp_path / ".fairway").mkdir()
    (tmp_path / ".fairway" / "admin.key").write_text("secret")
    archive = tmp_path / "fairway-backup.tar"
    archive.touch(mode=0o644)
    subprocess.run(["sh", "-c", f"umask 022; {commands[0]}"], cwd=tmp_path, check=True, timeout=30)
    assert archive.stat().st_mode & 0o777 == 0o600
    listed = subprocess.run(["tar", "-tf", archive], capture_output=True, text=True, check=True)
    assert ".fairway/admin.key" in listed.stdout
