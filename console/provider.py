"""Sign-in by an OpenID provider: the authorization code flow with PKCE (RFC 7636) of a public client.

What ties the provider's answer to the browser is in that browser's own short-lived cookie, so that strangers
who begin sign-ins fill no table here. The API verifies the tokens; the console passes them on.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import urlencode

from fairway.http_json import FetchFailed, discovered, request_json
from services.adapters.threads import in_thread
from services.core.errors import Unauthenticated, Unavailable
from services.ports.clock import Clock

BACK_PATH: Final = "/sign-in/provider/back"
METADATA_S: Final = 300.0  # time for which the provider's metadata is used
RETRY_S: Final = 5.0  # time until it is read again after a failure
MAX_REDEEMING: Final = 2  # codes that are redeemed at once, since strangers can make them up


@dataclass(frozen=True, slots=True)
class WebTokens:
    access_token: str
    refresh_token: str = ""
    lifetime_s: float = 300.0  # lifetime of the access token, assumed where the provider states none


@dataclass(slots=True)
class WebProvider:
    """The provider as the client ``client_id``. Its calls raise Unavailable while it does not answer."""

    issuer: str
    client_id: str
    scope: str
    redirect_uri: str
    new_secret: Callable[[], str]
    clock: Clock
    _metadata: dict[str, Any] | Unavailable = field(default_factory=dict)
    _metadata_end_s: float = 0.0
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _redeeming: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_REDEEMING))

    async def begin(self) -> tuple[str, str]:
        """Return the address to send the browser to, and the value of its cookie for the way back."""
        endpoint = await self._endpoint("authorization_endpoint")
        state, verifier = self.new_secret(), self.new_secret()
        digest = hashlib.sha256(verifier.encode()).digest()
        query = {
            "response_type": "code",
            "client_id": self.client_id,
            "redirect_uri": self.redirect_uri,
            "scope": self.scope,
            "state": state,
            "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
        }
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}", f"{state}.{verifier}"

    async def finish(self, query: Mapping[str, str], cookie: str) -> WebTokens:
        """Return the tokens for the provider's answer. Raises Unauthenticated for one of another browser."""
        state, _, verifier = cookie.partition(".")
        if not verifier or not hmac.compare_digest(state.encode(), query.get("state", "").encode()):
            raise Unauthenticated("this sign-in was not begun in this browser, or long ago: begin again")
        if "code" not in query:
            raise Unauthenticated(f"the provider refused the sign-in: {query.get('error', 'no code')[:200]}")
        form = {
            "grant_type": "authorization_code",
            "code": query["code"],
            "redirect_uri": self.redirect_uri,
            "code_verifier": verifier,
        }
        async with self._redeeming:
            return await self._tokens(form)

    async def renew(self, refresh_token: str) -> WebTokens:
        """Return new tokens. Raises Unauthenticated where the provider has ended the login."""
        found = await self._tokens({"grant_type": "refresh_token", "refresh_token": refresh_token})
        return replace(found, refresh_token=found.refresh_token or refresh_token)

    async def _tokens(self, form: dict[str, str]) -> WebTokens:
        endpoint = await self._endpoint("token_endpoint")
        status, answer = await _fetched(request_json, endpoint, {**form, "client_id": self.client_id})
        token = answer.get("access_token")
        if status >= 500:
            raise Unavailable(f"the provider answers with status {status}: try again later")
        if status != 200 or not isinstance(token, str):
            raise Unauthenticated(f"the provider refused: {str(answer.get('error') or status)[:200]}")
        found = WebTokens(token, str(answer.get("refresh_token") or ""))
        stated_s = answer.get("expires_in")
        return replace(found, lifetime_s=float(stated_s)) if isinstance(stated_s, int | float) else found

    async def _endpoint(self, name: str) -> str:
        async with self._reading:
            if self.clock.monotonic_s() >= self._metadata_end_s:
                try:
                    self._metadata = await _fetched(discovered, self.issuer)
                except Unavailable as error:
                    self._metadata = error
                lasts_s = RETRY_S if isinstance(self._metadata, Unavailable) else METADATA_S
                self._metadata_end_s = self.clock.monotonic_s() + lasts_s
        found = self._metadata
        if isinstance(found, Unavailable):
            raise Unavailable(found.message)
        if not isinstance(found.get(name), str):
            raise Unavailable(f"the provider has no {name}: enable the authorization code flow there")
        return str(found[name])


async def _fetched(fetch: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return await in_thread(fetch, *arguments)
    except FetchFailed as error:
        raise Unavailable(f"the provider does not answer: {error}") from error
