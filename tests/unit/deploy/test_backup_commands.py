"""The documented backup of an installation is readable by its owner alone."""

from __future__ import annotations

import os
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
    home = tmp_path / "home"
    home.mkdir()
    archive = home / "fairway-backup.tar"
    archive.touch(mode=0o644)
    subprocess.run(
        ["sh", "-c", f"umask 022; {commands[0]}"],
        cwd=tmp_path, check=True, timeout=30, env={**os.environ, "HOME": str(home)},
    )  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == [".fairway", "home"], "not into the checkout"
    assert archive.stat().st_mode & 0o777 == 0o600
    listed = subprocess.run(["tar", "-tf", archive], capture_output=True, text=True, check=True)
    assert ".fairway/admin.key" in listed.stdout


def test_a_backup_of_the_containers_is_refused_in_a_checkout(tmp_path: Path) -> None:
    """By its absolute path, through a link and where its folders do not exist; nothing is made there."""
    script = PAGE.parents[2] / "deploy" / "compose" / "backup.sh"
    checkout = tmp_path / "checkout"
    (checkout / ".git").mkdir(parents=True)
    (tmp_path / "link").symlink_to(checkout)
    for folder in ("backup-1", "a/b", str(checkout / "c"), "../link/d", str(tmp_path / "link" / "e")):
        done = subprocess.run(
            ["sh", str(script), folder], cwd=checkout, capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 2, folder
        assert "in the checkout" in done.stderr
        assert "next: " in done.stderr
    assert [path.name for path in checkout.iterdir()] == [".git"]
