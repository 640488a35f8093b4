"""Opens a bucket from the settings: address, credentials, timeouts.

Sources of credentials, in this order: ``FAIRWAY_S3_CREDENTIALS_FILE``, the ``AWS_*`` environment variables, a
web identity token or the container's endpoint, the instance's role.
"""

from __future__ import annotations

import configparser
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from obstore.store import S3Store

from services.core.errors import StoreUnavailable
from services.ports.clock import Clock
from services.runtime.config import ConfigError, Settings

_CONNECT_S: Final = 3
_REQUEST_S: Final = 30
_RETRIES: Final = 3
_NO_PROXY: Final = "http://127.0.0.1:9"
_REREAD: Final = timedelta(minutes=5)  # the longest time until a rotated secret is used


def open_bucket(settings: Settings, clock: Clock) -> S3Store:
    """Return the bucket of ``FAIRWAY_BLOB_STORE`` without any request. Raises ConfigError."""
    url = urlsplit(settings.blob_store)
    assert url.scheme == "s3", "no bucket is configured"
    options: dict[str, Any] = {}
    if settings.s3_endpoint:
        options["endpoint"] = settings.s3_endpoint
    if settings.s3_credentials_file is not None:
        options["credential_provider"] = credentials_of(settings.s3_credentials_file, clock)
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        "timeout": timedelta(seconds=_REQUEST_S),
        "allow_http": settings.s3_endpoint.startswith("http://"),
    }
    if client["allow_http"]:
        # A store without TLS is inside the fleet. Only a proxy of its own replaces the environment's: it is
        # excluded for the one host that there is.
        client |= {"proxy_url": _NO_PROXY, "proxy_excludes": urlsplit(settings.s3_endpoint).hostname or ""}
    if settings.s3_ca_file is not None:
        client["root_certificate"] = _read(settings.s3_ca_file)
    return S3Store(
        url.netloc,
        prefix=url.path.strip("/") or None,
        region=settings.s3_region,
        virtual_hosted_style_request=not settings.s3_path_style,
        conditional_put="etag",
        client_options=client,  # type: ignore[arg-type]
        retry_config={
            "max_retries": _RETRIES,
            "retry_timeout": timedelta(seconds=_REQUEST_S),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=2),
                "base": 2,
            },
        },
        **options,
    )


def credentials_of(path: Path, clock: Clock) -> Callable[[], dict[str, Any]]:
    """Return a reader of a credentials file's ``[default]`` section. Raises ConfigError for a bad one."""
    _parse(_read(path), path)

    def provide() -> dict[str, Any]:
        try:
            section = _parse(_read(path), path)
        except ConfigError as error:
            raise StoreUnavailable(str(error)) from error
        return {
            "access_key_id": section["aws_access_key_id"],
            "secret_access_key": section["aws_secret_access_key"],
            "token": section.get("aws_session_token"),
            "expires_at": datetime.fromtimestamp(clock.unix_s(), UTC) + _REREAD,
        }

    return provide


def _parse(text: str, path: Path) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
        section = dict(parser["default"])
        if not (section["aws_access_key_id"] and section["aws_secret_access_key"]):
            raise KeyError("aws_access_key_id")
    except (configparser.Error, KeyError) as error:
        raise ConfigError(
            f"{path} has no [default] section with aws_access_key_id and aws_secret_access_key"
        ) from error
    return section


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
