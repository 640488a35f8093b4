"""A small OpenID provider on loopback: discovery, keys that rotate, the device flow, renewal, revocation."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import ECKey, RSAKey

AUDIENCE = "fairway"
CLIENT = "fairway-cli"


class OidcProvider:
    def __init__(self, url: str) -> None:
        self.issuer = url
        self.keys: list[RSAKey | ECKey] = []
        self.requests: list[str] = []  # paths
        self.down = False
        self.claims: dict[str, Any] = {"groups": ["admins"]}
        self.lifetime_s = 600
        self.pending = 1  # answers of "authorization_pending" before a device is confirmed
        self.refused = ""  # error of the next token request
        self.refreshes: set[str] = set()
        self.codes: dict[str, dict[str, str]] = {}  # the request of each code of the authorization flow
        self.rotate()

    def rotate(self, *, keep: int = 0, kind: str = "RSA") -> RSAKey | ECKey:
        """Sign with a new key from now on; publish it and the ``keep`` newest before it."""
        parameters: Any = {"kid": f"key-{time.monotonic_ns()}", "use": "sig"}
        key: RSAKey | ECKey
        if kind == "RSA":
            key = RSAKey.generate_key(2048, parameters)
        else:
            key = ECKey.generate_key("P-256", parameters)
        self.keys = [key, *self.keys[:keep]]
        return key

    @property
    def jwks_url(self) -> str:
        return f"{self.issuer}/jwks"

    def token(
        self, *, key: RSAKey | ECKey | None = None, header: dict[str, Any] | None = None, **claims: Any
    ) -> str:
        """Return a token; a claim of None is left out."""
        key = key or self.keys[0]
        now_s = int(time.time())
        found = {
            "iss": self.issuer,
            "aud": AUDIENCE,
            "sub": "ann",
            "iat": now_s,
            "exp": now_s + self.lifetime_s,
            **self.claims,
            **claims,
        }
        algorithm = "RS256" if isinstance(key, RSAKey) else "ES256"
        made = {"alg": algorithm, "kid": key.kid, **(header or {})}
        kept = {name: value for name, value in found.items() if value is not None}
        return jwt.encode(made, kept, key, algorithms=[algorithm])

    def answer(self, path: str, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        if self.down:
            return 503, {}
        match path:
            case "/.well-known/openid-configuration":
                names = {"device_authorization_endpoint": "device", "token_endpoint": "token"}
                names["revocation_endpoint"] = "revoke"
                names["authorization_endpoint"] = "authorize"
                urls = {name: f"{self.issuer}/{each}" for name, each in names.items()}
                return 200, {"issuer": self.issuer, "jwks_uri": self.jwks_url, **urls}
            case "/jwks":
                return 200, {"keys": [key.as_dict(private=False) for key in self.keys]}
            case "/device" if form.get("client_id") == CLIENT:
                page = f"{self.issuer}/confirm"
                device = {"device_code": "device-1", "user_code": "ABCD-EFGH", "verification_uri": page}
                return 200, {**device, "expires_in": 60, "interval": 0.01}
            case "/token" if self.refused:
                return 400, {"error": self.refused}
            case "/token" if form.get("device_code") == "device-1" and self.pending > 0:
                self.pending -= 1
                return 400, {"error": "authorization_pending"}
            case "/token" if form.get("device_code") == "device-1":
                return self._tokens()
            case "/token" if form.get("code") in self.codes:
                return self._for_code(form)
            case "/token" if form.get("refresh_token") in self.refreshes:
                self.refreshes.remove(form["refresh_token"])  # each is accepted once
                return self._tokens()
            case "/token":
                return 400, {"error": "invalid_grant"}
            case "/revoke":
                self.refreshes.discard(form["token"])
                return 200, {}
        return 404, {"error": "not_found"}

    def consent(self, url: str) -> str:
        """Return the address that a person who consents at the provider's page is sent back to."""
        query = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        code = f"code-{len(self.codes)}"
        self.codes[code] = query
        return f"{query['redirect_uri']}?{urlencode({'code': code, 'state': query['state']})}"

    def _for_code(self, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        """Return tokens for a code, once and with the verifier of its challenge (RFC 7636)."""
        asked = self.codes.pop(form["code"])
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        matches = challenge == asked["code_challenge"] and asked["code_challenge_method"] == "S256"
        names = ("client_id", "redirect_uri")
        if not matches or any(form.get(name) != asked[name] for name in names):
            return 400, {"error": "invalid_grant"}
        return self._tokens()

    def _tokens(self) -> tuple[int, dict[str, Any]]:
        refresh = f"refresh-{time.monotonic_ns()}"
        self.refreshes.add(refresh)
        tokens = {"access_token": self.token(jti=refresh), "refresh_token": refresh}
        return 200, {**tokens, "token_type": "Bearer", "expires_in": self.lifetime_s}


@contextmanager
def oidc_provider() -> Iterator[OidcProvider]:
    """Yield a provider that answers until the end."""
    found: list[OidcProvider] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            self._answer({name: values[0] for name, values in parse_qs(body).items()})

        def _answer(self, form: dict[str, str]) -> None:
            found[0].requests.append(self.path)
            status, body = found[0].answer(self.path, form)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        log_message: Callable[..., None] = lambda *_: None

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.append(OidcProvider(f"http://127.0.0.1:{server.server_port}"))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield found[0]
        finally:
            server.shutdown()
            thread.join()
