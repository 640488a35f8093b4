"""Small JSON answers of servers that an operator names, such as an OpenID provider or an Alertmanager.

Blocking, for a thread or the command line. Nothing is sent in clear text except on loopback, no redirect is
followed, and size and time of an answer are bounded.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

MAX_BYTES: Final = 256 * 1024
TIMEOUT_S: Final = 4.0
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_NO_HEADERS: Final[Mapping[str, str]] = {}


class FetchFailed(Exception):
    """There is no usable answer. The message names the address and the cause."""


class WrongIssuer(FetchFailed):
    """The address answers, and is not the named OpenID provider."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any, **more: Any) -> None:
        return None


def checked_url(url: str) -> str:
    """Return the URL. Raises ValueError unless it is https, or http on loopback, without credentials."""
    parts = urlsplit(url)
    if parts.scheme != "https" and (parts.scheme, parts.hostname in _LOOPBACK) != ("http", True):
        raise ValueError(f"{url!r} is no https:// URL; http:// is for loopback alone")
    if not parts.hostname or "@" in parts.netloc or not url.isascii() or not url.isprintable():
        raise ValueError(f"{url!r} is no URL of a host without credentials")
    return url


def request_json(url: str, form: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """Return the status and the object that a server answers; ``form`` is posted to it.

    The answer has at most ``MAX_BYTES``, and each wait for a part of it lasts at most ``TIMEOUT_S``. Raises
    FetchFailed.
    """
    status, body = _answer(url, None if form is None else urlencode(form).encode())
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FetchFailed(f"{url}: {error}") from error
    if not isinstance(found, dict):
        raise FetchFailed(f"{url}: the answer is no JSON object")
    return status, found


def post_json(url: str, value: object) -> None:
    """Return once a server has taken a value, bounded as ``request_json`` is.

    Raises FetchFailed, also when it refuses the value.
    """
    status, body = _answer(url, json.dumps(value).encode(), {"content-type": "application/json"})
    if status // 100 != 2:
        raise FetchFailed(f"{url}: it answers {status}: {body[:200].decode('utf-8', 'replace')}")


def _answer(url: str, data: bytes | None, headers: Mapping[str, str] = _NO_HEADERS) -> tuple[int, bytes]:
    deadline_s = time.monotonic() + TIMEOUT_S
    try:
        request = urllib.request.Request(checked_url(url), data, {"accept": "application/json", **headers})
        try:
            answer = urllib.request.build_opener(_NoRedirects).open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            body = b""
            while piece := answer.read1(MAX_BYTES + 1 - len(body)):
                body += piece
                if len(body) > MAX_BYTES or time.monotonic() > deadline_s:
                    raise FetchFailed(f"{url}: the answer has over {MAX_BYTES} bytes or takes too long")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise FetchFailed(f"{url}: {error}") from error
    return int(answer.status or 0), body


def discovered(issuer: str) -> dict[str, Any]:
    """Return a provider's metadata (OpenID Connect Discovery, section 4). Raises WrongIssuer, FetchFailed."""
    status, found = request_json(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
    if status != 200 or found.get("issuer") != issuer:
        raise WrongIssuer(f"{issuer} is no OpenID provider, or its name is written differently")
    return found
