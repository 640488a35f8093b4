"""What a role is told is read once, and a mistake in it is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.runtime.config import ConfigError, Settings, load, read_password, read_secret, read_secrets

_READ_PASSWORD = """
import sys
from pathlib import Path
from services.runtime.config import read_password
sys.stdout.buffer.write(read_password(Path(sys.argv[1])).encode())
"""


def test_what_is_not_said_has_its_default() -> None:
    assert load({}) == Settings()
    assert load({"PATH": "/bin"}) == Settings()


def test_values_are_parsed() -> None:
    settings = load(
        {
            "FAIRWAY_ETCD_ENDPOINTS": "a:1,b:2",
            "FAIRWAY_LISTEN": "127.0.0.1:9000",
            "FAIRWAY_DRAIN_S": "2.5",
            "FAIRWAY_MODEL_UPLOAD_BYTES_PER_S": "1048576",
            "FAIRWAY_MODEL_DOWNLOAD_BYTES_PER_S": "0",
            "FAIRWAY_CORS_ORIGINS": "https://a.example,http://localhost:3000",
            "FAIRWAY_MODEL_ALIASES": "org/Chat-1B=chat,my_chat=chat",
        }
    )
    assert settings.cors_origins == ("https://a.example", "http://localhost:3000")
    assert settings.model_aliases == {"org/Chat-1B": "chat", "my_chat": "chat"}
    assert settings.etcd_endpoints == ("a:1", "b:2")
    assert settings.advertised == "127.0.0.1:9000"
    assert settings.drain_s == 2.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FAIRWAY_LISTEN", "nowhere"),
        ("FAIRWAY_ETCD_ENDPOINTS", "a:1,b"),
        ("FAIRWAY_DRAIN_S", "-1"),
        ("FAIRWAY_DRAIN_S", "nan"),
        ("FAIRWAY_WORKER_ID", "../etc"),
        ("FAIRWAY_LOG_LEVEL", "loud"),
        ("FAIRWAY_QUEUE_TTL_S", "0"),
        ("FAIRWAY_METRICS_LISTEN", "9464"),
        ("FAIRWAY_OTLP_ENDPOINT", "collector"),
        ("FAIRWAY_TRACE_RATIO", "1.5"),
        ("FAIRWAY_CORS_ORIGINS", "a.example"),
        ("FAIRWAY_CORS_ORIGINS", "https://a.example/"),
        ("FAIRWAY_MODEL_ALIASES", "chat=other"),
        ("FAIRWAY_MODEL_ALIASES", "a/B/c=chat"),
        ("FAIRWAY_MODEL_ALIASES", "/B=chat"),
        ("FAIRWAY_MODEL_UPLOAD_BYTES_PER_S", "1048575"),
        ("FAIRWAY_MODEL_DOWNLOAD_BYTES_PER_S", "1"),
        ("FAIRWAY_MODEL_DOWNLOAD_BYTES_PER_S", "-1"),
        ("FAIRWAY_DRIAN_S", "1"),
    ],
)
def test_a_mistake_stops_the_start_and_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({name: value})
    assert name in str(caught.value)


def test_settings_like_an_unknown_one_are_named() -> None:
    with pytest.raises(ConfigError, match="FAIRWAY_DRIAN_S; did you mean FAIRWAY_DRAIN_S"):
        load({"FAIRWAY_DRIAN_S": "1"})
    with pytest.raises(ConfigError, match=r"known: .*FAIRWAY_DRAIN_S"):
        load({"FAIRWAY_" + "Q" * 40: "1"})


def test_a_short_or_missing_secret_is_refused_without_its_text(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ConfigError):
        read_secret(path)
    path.write_text("hunter2\n")
    with pytest.raises(ConfigError) as caught:
        read_secret(path)
    assert "hunter2" not in str(caught.value)
    path.write_text("x" * 40 + "\n")
    assert read_secret(path) == "x" * 40


def test_secrets_are_utf8_in_every_locale(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes("pässwörd\n".encode())
    command = [sys.executable, "-X", "utf8=0", "-c", _READ_PASSWORD, str(path)]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=True)
    assert done.stdout == "pässwörd".encode()
    path.write_bytes(b"hunter2\xe4\n")
    with pytest.raises(ConfigError, match="not UTF-8 text") as caught:
        read_password(path)
    assert "hunter2" not in str(caught.value)


def test_a_password_may_be_short_but_not_empty(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("\n")
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            read_password(path)
        assert str(path) in str(caught.value)
        path.unlink(missing_ok=True)
    path.write_text("hunter2\n")
    assert read_password(path) == "hunter2"


def test_a_file_of_secrets_has_one_per_line(tmp_path: Path) -> None:
    path = tmp_path / "secrets"
    for text in ("", "\n", "short\n", f"{'x' * 32}\nshort\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="less than 32"):
            read_secrets(path)
    path.write_text(f" {'x' * 32}\n\n{'y' * 40}\n")
    assert read_secrets(path) == ("x" * 32, "y" * 40)


@pytest.mark.parametrize(
    ("listen", "given", "secured"),
    [
        ("127.0.0.1:1", {}, False),
        ("localhost:1", {"tls_dir": "certs"}, False),
        ("0.0.0.0:1", {"tls_dir": "certs"}, True),
        ("10.0.0.1:1", {"spiffe_socket": "unix:/run/agent.sock"}, True),
        ("0.0.0.0:1", {"insecure": "true"}, False),
        ("0.0.0.0:1", {"client_tls": "off"}, False),
        ("127.0.0.1:1", {"client_tls": "on", "tls_dir": "certs"}, True),
        ("0.0.0.0:1", {}, None),
        ("127.0.0.1:1", {"client_tls": "on"}, None),
    ],
)
def test_ports_beyond_loopback_have_tls(listen: str, given: dict[str, str], secured: bool | None) -> None:
    settings = load({f"FAIRWAY_{name.upper()}": value for name, value in given.items()})
    if secured is None:
        with pytest.raises(ConfigError, match=r"FAIRWAY_TLS_DIR .*FAIRWAY_INSECURE=true"):
            settings.secures(settings.client_tls, listen)
    else:
        assert settings.secures(settings.client_tls, listen) is secured
