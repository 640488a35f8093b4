"""Signed versions on a whole installation, and a verifier that is not ours."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import CommandLine
from tests.support.signing import key_file
from tests.support.stack import ROOT, Stack

BUNDLED = ROOT / "models" / "tiny" / "checkpoint"


@pytest.fixture
def cli(stack: Stack) -> CommandLine:
    return CommandLine(stack.state)


def stock_verify(folder: Path, signature: Path, key: Path) -> subprocess.CompletedProcess[str]:
    """Run model_signing's own command line."""
    options = ("--signature", str(signature), "--public_key", str(key))
    return subprocess.run(
        [sys.executable, "-m", "model_signing", "verify", "key", str(folder), *options],
        capture_output=True,
        text=True,
        check=False,
    )


def test_versions_are_published_signed_verified_and_deployed(cli: CommandLine, tmp_path: Path) -> None:
    key, foreign = key_file(tmp_path, "release"), key_file(tmp_path, "foreign")
    public = key.with_suffix(".pub")
    cli("models", "update", "signed", "--signer", str(public), "--required")
    assert json.loads(cli("models", "signers", "signed", "-o", "json").out)["policy"]["required"]
    publish = ("models", "publish", str(BUNDLED), "--name", "signed")
    cli(*publish, "--tag", "bare")
    refused = cli("deployments", "create", "signed", "--version", "bare", code=4)
    assert "SIGNATURE_MISSING" in refused.err
    assert "SIGNATURE_MISSING" in cli("models", "verify", "signed", "bare", code=4).err

    cli("models", "sign", "signed", "bare", "--key", str(foreign))
    assert "SIGNER_NOT_ALLOWED" in cli("deployments", "create", "signed", "--version", "bare", code=4).err
    assert "KEY_REFUSED" in cli(*publish, "--sign-key", str(public), code=4).err
    digest = cli(*publish, "--sign-key", str(key)).out.strip()
    assert cli("models", "verify", "signed").out == f"{digest}\tverified\n"
    assert (
        "SIGNER_NOT_ALLOWED"
        in cli(
            "models",
            "verify",
            "signed",
            "--public-key",
            str(key_file(tmp_path, "nobody").with_suffix(".pub")),
            code=4,
        ).err
    )
    cli("deployments", "create", "signed", "--replicas", "1", "--wait")
    cli("deployments", "delete", "signed", "--yes")
    cli("models", "update", "signed", "--no-signers")


def test_model_signings_own_command_accepts_an_export_and_we_accept_what_it_signs(
    cli: CommandLine, tmp_path: Path
) -> None:
    key = key_file(tmp_path, "release")
    cli("models", "publish", str(BUNDLED), "--name", "signed", "--tag", "exported")
    cli("models", "sign", "signed", "exported", "--key", str(key))
    public = key.with_suffix(".pub")
    export = tmp_path / "export"
    cli("models", "verify", "signed", "exported", "--public-key", str(public), "--export", str(export))
    signatures = sorted(export.glob("signature-*.json"))
    accepted = [stock_verify(export / "version", one, public).returncode == 0 for one in signatures]
    assert accepted.count(True) >= 1
    spoiled = shutil.copytree(export / "version", tmp_path / "spoiled") / "manifest.json"
    spoiled.write_bytes(spoiled.read_bytes().replace(b"causal-lm", b"casual-lm"))
    verdicts = [stock_verify(spoiled.parent, one, public) for one in signatures]
    assert all(verdict.returncode for verdict in verdicts)
    # The rest of its message is a repr of bytes, which decides how quotes are written.
    assert any(re.search("Hash mismatch for .*manifest.json", verdict.stderr) for verdict in verdicts)

    other = key_file(tmp_path, "other")
    made = tmp_path / "made.json"
    options = ("--signature", str(made), "--private_key", str(other))
    subprocess.run(
        [sys.executable, "-m", "model_signing", "sign", "key", str(export / "version"), *options], check=True
    )
    cli("models", "sign", "signed", "exported", "--bundle", str(made))
    cli("models", "verify", "signed", "exported", "--public-key", str(other.with_suffix(".pub")))
    (made).write_text("{}")
    assert (
        "SIGNATURE_INVALID" in cli("models", "sign", "signed", "exported", "--bundle", str(made), code=4).err
    )
