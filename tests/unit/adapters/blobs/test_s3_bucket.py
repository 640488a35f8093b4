"""How a bucket is opened from the settings; requests are in ``tests/contract/test_blobs.py``."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from services.adapters.blobs.s3 import credentials_of, open_bucket
from services.core.errors import StoreUnavailable
from services.runtime.clock import SystemClock
from services.runtime.config import ConfigError, load

CLOCK = SystemClock()


def credentials(path: Path, secret: str, token: str = "") -> Path:
    lines = ["[default]", "aws_access_key_id = key%1", f"aws_secret_access_key = {secret}"]
    path.write_text("\n".join([*lines, *([f"aws_session_token = {token}"] if token else [])]))
    return path


def test_a_rotated_secret_is_taken_up(tmp_path: Path) -> None:
    path = credentials(tmp_path / "credentials", "first")
    provide = credentials_of(path, CLOCK)
    found = provide()
    assert (found["access_key_id"], found["secret_access_key"], found["token"]) == ("key%1", "first", None)
    left = found["expires_at"] - datetime.fromtimestamp(CLOCK.unix_s(), UTC)
    assert 0 < left.total_seconds() <= 600
    credentials(path, "second", token="session")
    assert (provide()["secret_access_key"], provide()["token"]) == ("second", "session")
    path.unlink()
    with pytest.raises(StoreUnavailable):
        provide()


@pytest.mark.parametrize(
    "text", ["", "[default]\n", "[other]\naws_access_key_id = a\naws_secret_access_key = b\n", "no section"]
)
def test_a_file_without_credentials_stops_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "credentials").write_text(text)
    with pytest.raises(ConfigError, match="credentials"):
        credentials_of(tmp_path / "credentials", CLOCK)
    with pytest.raises(ConfigError):
        credentials_of(tmp_path / "absent", CLOCK)


def test_a_bucket_has_its_prefix_and_address(tmp_path: Path) -> None:
    store = open_bucket(
        load(
            {
                "FAIRWAY_BLOB_STORE": "s3://models/team/a/",
                "FAIRWAY_S3_ENDPOINT": "https://store.example.com:9000",
                "FAIRWAY_S3_REGION": "eu-west-3",
                "FAIRWAY_S3_PATH_STYLE": "false",
                "FAIRWAY_S3_CREDENTIALS_FILE": str(credentials(tmp_path / "c", "s")),
            }
        ),
        CLOCK,
    )
    assert store.prefix == "team/a"
    assert store.config["bucket"] == "models"
    assert store.config["region"] == "eu-west-3"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BLOB_STORE", "s3://"),
        ("BLOB_STORE", "s3://Bad_Bucket/x"),
        ("BLOB_STORE", "gs://bucket"),
        ("BLOB_STORE", "s3://bucket/../x y"),
        ("S3_ENDPOINT", "store.example.com"),
        ("S3_ENDPOINT", "https://user:secret@store.example.com"),
        ("S3_PATH_STYLE", "perhaps"),
    ],
)
def test_a_setting_that_cannot_work_stops_the_start(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="FAIRWAY_" + name):
        load({"FAIRWAY_" + name: value})
