"""A person's login at an OpenID provider: the device flow (RFC 8628), its tokens, their renewal.

Blocking, except ``Bearer``. The tokens are in one file that only its user may read.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from fairway.cli.state import read_json, write_private
from fairway.http_json import FetchFailed, WrongIssuer, discovered, request_json

_RENEW_S: Final = 60.0  # a token that ends within this time is renewed first
_RETRY_S: Final = 5.0  # pause between attempts while the provider is away and the token is valid
_LIFETIME_S: Final = 300.0  # lifetime of a token whose provider states none
_INTERVAL_S: Final = 5.0
_LONGEST_S: Final = 1800.0
_DEVICE_GRANT: Final = "urn:ietf:params:oauth:grant-type:device_code"


class LoginFailed(Exception):
    """There is no valid token, or none could be obtained. The message states the cause."""


@dataclass(frozen=True, slots=True)
class Login:
    """Tokens of a person, and where they are renewed and revoked; without such an endpoint it is empty."""

    issuer: str
    client_id: str
    token_endpoint: str
    access_token: str
    expire_unix_s: float
    refresh_token: str = ""
    revocation_endpoint: str = ""


def login_file() -> Path:
    """Return the path of this user's login, which may not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "fairway" / "login.json"


def load(path: Path) -> Login | None:
    """Return the stored login, None without a complete one."""
    try:
        return msgspec.convert(read_json(path), Login)
    except msgspec.ValidationError:
        return None


def save(path: Path, login: Login) -> None:
    """Replace the stored login. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(path, json.dumps(asdict(login)) + "\n")


def valid_login(path: Path, now: Callable[[], float] = time.time) -> Login | None:
    """Return the stored login with a token that is valid for a while, None without one.

    One process at a time renews it: providers accept each refresh token once. Raises LoginFailed.
    """
    login = load(path)
    if login is None or now() < login.expire_unix_s - _RENEW_S:
        return login
    with path.with_suffix(".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        login = load(path)
        if login is None or now() < login.expire_unix_s - _RENEW_S:
            return login
        try:
            login = _renewed(login, now())
        except FetchFailed as error:
            if now() >= login.expire_unix_s:
                raise LoginFailed(f"the login could not be renewed: {error}") from error
            return login
        save(path, login)
        return login


def log_in(
    issuer: str,
    client_id: str,
    *,
    asked: Mapping[str, str],
    show: Callable[[str, str], None],
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> Login:
    """Return the login of the person who confirms it at the address that ``show`` receives with a code.

    ``asked``: further fields of the request, such as ``scope``. Raises LoginFailed, FetchFailed.
    """
    try:
        found = discovered(issuer)
    except WrongIssuer as error:
        raise LoginFailed(str(error)) from error
    device = _posted(_endpoint(found, "device_authorization_endpoint"), {"client_id": client_id, **asked})
    wait_s = float(device.get("interval") or _INTERVAL_S)
    end_s = now() + min(float(device.get("expires_in") or _LONGEST_S), _LONGEST_S)
    page = device.get("verification_uri_complete") or device.get("verification_uri")
    show(str(page), str(device.get("user_code")))
    login = Login(
        issuer,
        client_id,
        _endpoint(found, "token_endpoint"),
        access_token="",
        expire_unix_s=0.0,
        revocation_endpoint=str(found.get("revocation_endpoint") or ""),
    )
    grant = {
        "grant_type": _DEVICE_GRANT,
        "device_code": str(device.get("device_code")),
        "client_id": client_id,
    }
    while now() < end_s:
        sleep(wait_s)
        status, answer = request_json(login.token_endpoint, grant)
        problem = answer.get("error")
        if status == 200:
            return _with_tokens(login, answer, now())
        if problem == "slow_down":
            wait_s += _INTERVAL_S
        elif problem != "authorization_pending":
            raise LoginFailed(f"the provider refused the login: {problem or status}")
    raise LoginFailed("the code expired before the login was confirmed")


def log_out(path: Path) -> bool:
    """Remove the login and revoke it at its provider; return whether there was one. Raises FetchFailed when
    the provider could not be reached: the login is removed nevertheless.
    """
    login = load(path)
    path.unlink(missing_ok=True)
    if login is not None and login.refresh_token and login.revocation_endpoint:
        form = {"client_id": login.client_id, "token": login.refresh_token}
        _, _ = request_json(login.revocation_endpoint, {**form, "token_type_hint": "refresh_token"})
    return login is not None


class Bearer:
    """What a client presents: its key, or without one the token of this user's login, renewed in time."""

    def __init__(self, key: str, name: str = "key") -> None:
        """``name``: of the key, for the ValueError without a key and a login."""
        self._path = None if key else login_file()
        if self._path is not None and load(self._path) is None:
            raise ValueError(f"{name} is empty, and nobody is logged in")
        self.metadata: tuple[tuple[str, str], ...] = (("authorization", f"Bearer {key}"),)
        self._until_s = 0.0 if self._path is not None else float("inf")

    @property
    def due(self) -> bool:
        """Whether the token is to be renewed before the next use."""
        return time.time() >= self._until_s

    async def renew(self) -> None:
        """Return once ``metadata`` is valid for a while. Raises LoginFailed."""
        if self._path is None or not self.due:
            return
        login = await asyncio.to_thread(valid_login, self._path)
        if login is None:
            raise LoginFailed("nobody is logged in any more")
        self.metadata = (("authorization", f"Bearer {login.access_token}"),)
        self._until_s = max(login.expire_unix_s - _RENEW_S, time.time() + _RETRY_S)


def _renewed(login: Login, now_s: float) -> Login:
    if not login.refresh_token:
        raise LoginFailed("the login has expired")
    status, answer = request_json(
        login.token_endpoint,
        {"grant_type": "refresh_token", "refresh_token": login.refresh_token, "client_id": login.client_id},
    )
    if status >= 500:
        raise FetchFailed(f"{login.token_endpoint}: status {status}")
    if status != 200:
        raise LoginFailed(f"the login has ended: {answer.get('error') or status}")
    return _with_tokens(login, answer, now_s)


def _with_tokens(login: Login, answer: Mapping[str, Any], now_s: float) -> Login:
    token = answer.get("access_token")
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise LoginFailed("the provider sent no access token")
    return replace(
        login,
        access_token=token,
        refresh_token=str(answer.get("refresh_token") or login.refresh_token),
        expire_unix_s=now_s + float(answer.get("expires_in") or _LIFETIME_S),
    )


def _endpoint(found: Mapping[str, Any], name: str) -> str:
    if not isinstance(found.get(name), str):
        raise LoginFailed(f"the provider has no {name}: enable the device flow for this client there")
    return str(found[name])


def _posted(url: str, form: Mapping[str, str]) -> dict[str, Any]:
    status, answer = request_json(url, form)
    if status != 200:
        problem = answer.get("error_description") or answer.get("error") or status
        raise LoginFailed(f"the provider refused: {problem}")
    return answer
