"""What a user does with it: publish a model, make a key, stream with curl, the SDK and the stubs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.compose.fleet import ROOT, Failed, Fleet, command
from tests.compose.load import MODEL, served

OPENAI = ROOT / ".venv-openai" / "bin" / "python"


async def test_the_stubs_stream(fleet: Fleet) -> None:
    assert (await served(fleet)).complete


def test_curl_streams(fleet: Fleet) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl: it runs where curl is installed")
    body = {"model": MODEL, "prompt": "def fibonacci(n):", "max_tokens": 16, "stream": True}
    answer = command(
        "curl", "-sSN", "--fail", "--cacert", str(fleet.authorities), f"{fleet.http()}/v1/completions",
        "-H", f"Authorization: Bearer {fleet.secret('api_key')}",
        "-H", "Content-Type: application/json", "-d", json.dumps(body),
    )  # fmt: skip
    frames = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    assert frames[-1] == "[DONE]"
    assert "".join(json.loads(frame)["choices"][0]["text"] for frame in frames[:-1])


def test_the_openai_sdk_streams(fleet: Fleet) -> None:
    if not OPENAI.exists():
        pytest.skip("make e2e-env installs the SDK")
    client = ROOT / "tests" / "e2e" / "openai_client.py"
    fleet.cli("tenants", "create", "limited", "--requests-per-minute", "3", "--tokens-per-minute", "6000")
    limited = fleet.cli("keys", "create", "limited-key", "--tenant", "limited").strip()
    done = subprocess.run(
        [str(OPENAI), str(client), fleet.http(), fleet.secret("api_key"), MODEL, limited],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": "/usr/bin:/bin", "SSL_CERT_FILE": str(fleet.authorities)},
    )
    assert done.returncode == 0, done.stderr
    heard = json.loads(done.stdout.splitlines()[-1])
    assert [each["got"] for each in heard["streams"]] == [each["asked"] for each in heard["streams"]]


def test_a_model_of_ones_own_is_published(fleet: Fleet) -> None:
    checkpoint = ROOT / "models" / "tiny" / "checkpoint"
    fleet.run(
        "run", "--rm", "-T", "-v", f"{checkpoint}:/model:ro", "cli",
        "models", "publish", "/model", "--name", "own", profile="tools",
    )  # fmt: skip
    assert "own" in fleet.cli("models", "list")


def test_a_key_opens_and_a_wrong_one_does_not(fleet: Fleet, tmp_path: Path) -> None:
    made = fleet.cli("keys", "create", "second").split()[-1]
    assert made.startswith("fw_second_")
    for key, status in ((made, "200"), (made[:-4] + "aaaa", "401")):
        found = command(
            "curl", "-s", "--retry", "5", "--cacert", str(fleet.authorities),
            "-o", str(tmp_path / "out"), "-w", "%{http_code}",
            f"{fleet.http()}/v1/models", "-H", f"Authorization: Bearer {key}",
        )  # fmt: skip
        assert found == status


def test_the_console_shows_the_fleet_to_who_has_a_key(fleet: Fleet, tmp_path: Path) -> None:
    url, page = f"https://localhost:{fleet.ports['FLEET_CONSOLE_PORT']}", tmp_path / "page"

    def ask(path: str, *options: str) -> str:
        return command(
            "curl", "-s", "--cacert", str(fleet.authorities), "-H", f"Origin: {url}",
            "-b", str(tmp_path / "cookies"), "-c", str(tmp_path / "cookies"),
            "-o", str(page), "-w", "%{http_code} %{redirect_url}", f"{url}{path}", *options,
        )  # fmt: skip

    assert ask("/") == f"303 {url}/sign-in"
    assert ask("/sign-in", "--data-urlencode", "key=fw_wrong_key").startswith("401")
    for name in ("api_key", "admin_key"):
        key = fleet.secret(name)
        assert ask("/sign-in", "--data-urlencode", f"key={key}") == f"303 {url}/"
        assert ask("/").startswith("200" if name == "admin_key" else f"303 {url}/tenants/default")
    assert all(worker in page.read_text() for worker in ("worker-0", "worker-1"))


def test_metrics_answer_monitors_alone(fleet: Fleet) -> None:
    """A role's own certificate is refused; Prometheus has one that is not."""
    code = (
        "import ssl, urllib.request as u; at = '/run/fairway/tls/'; "
        "c = ssl.create_default_context(cafile=at + 'ca.crt'); "
        "c.load_cert_chain(at + 'tls.crt', at + 'tls.key'); "
        "print(u.urlopen('https://127.0.0.1:9464/metrics', context=c).read())"
    )
    for service in ("gateway", "scheduler", "worker-0", "registry", "controlplane"):
        with pytest.raises(Failed, match="403"):
            fleet.execute(service, "python", "-c", code)
