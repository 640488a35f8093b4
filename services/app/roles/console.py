"""The console of a control plane: its HTTP server, and the socket by which it calls the API as people do."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from secrets import token_urlsafe
from typing import Final

from console.app import ConsoleParts, build_app
from console.calls import GrpcApi
from console.provider import BACK_PATH, WebProvider
from services.adapters.oidc import read_provider
from services.app.environment import Environment
from services.core.errors import NoWorkerAvailable
from services.core.records import GATEWAYS, Gateway
from services.gateway.faces.openai.server import HttpServer
from services.rpc.channel import RoleChannel, RoleChannels, open_channel
from services.rpc.server import RpcServer, RpcService
from services.runtime.certificates import renewed_context
from services.runtime.config import ConfigError
from services.runtime.fleet_state.informer import Informer
from services.runtime.identity import KeyDirectory

_MAX_BODY_BYTES: Final = 512 * 1024
_MAX_CONNECTIONS: Final = 512
_STOP_S: Final = 1.0


class ConsoleServer:
    """Serves between ``start`` and ``stop``."""

    def __init__(
        self, environment: Environment, services: Sequence[RpcService], identity: KeyDirectory, listen: str
    ) -> None:
        """Raises ConfigError for an address without a certificate, or with a provider and no fixed port."""
        self._folder = Path(tempfile.mkdtemp(prefix="fairway-console-"))  # mode 0700
        environment.closing.callback(shutil.rmtree, self._folder, ignore_errors=True)
        socket = self._folder / "api"
        self._own: RpcServer = environment.own_server(*services, socket=socket, identity=identity)
        self._channel = open_channel(f"unix:{socket}")
        self._gateways = _Gateways(environment)
        certificates = environment.client_tls(listen)
        scheme = "http" if certificates is None else "https"
        url = environment.settings.console_url or f"{scheme}://{listen}"
        parts = ConsoleParts(
            GrpcApi(self._channel, self._gateways),
            environment.clock,
            token_urlsafe,
            url,
            _provider(environment, url),
        )
        host, _, port = listen.rpartition(":")
        self._http = HttpServer(
            build_app(parts),
            host,
            int(port),
            max_body_bytes=_MAX_BODY_BYTES,
            max_connections=_MAX_CONNECTIONS,
            context=None
            if certificates is None
            else renewed_context(certificates, server=True, verify_peer=False),
        )

    async def start(self) -> None:
        """Return once pages are served. Raises FailedPrecondition when the address is unavailable."""
        await self._own.start()
        await self._http.start()

    async def stop(self, grace_s: float) -> None:
        await self._http.stop(min(grace_s, _STOP_S))
        await self._gateways.close()
        await self._channel.close()
        await self._own.stop(_STOP_S)


class _Gateways:
    """Returns a channel to a live gateway for each generation of the playground."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._view: Informer[Gateway] = environment.informer(GATEWAYS, Gateway)
        self._channels = RoleChannels(environment.client_tls)

    def __call__(self) -> RoleChannel:
        """Return a channel that this object closes. Raises NoWorkerAvailable without a live gateway."""
        live = sorted(held.record.address for held in self._view.view.values())
        if not live:
            raise NoWorkerAvailable("no gateway is registered: start one", retry_after_s=1.0)
        return self._channels(live[self._environment.rng.randrange(len(live))], "gateway")

    async def close(self) -> None:
        await self._channels.close()


def _provider(environment: Environment, url: str) -> WebProvider | None:
    file = environment.settings.oidc_file
    found = None if file is None else read_provider(file)
    if found is None or not found.console_client_id:
        return None
    if url.endswith(":0"):
        raise ConfigError("console_client_id of FAIRWAY_OIDC_FILE needs FAIRWAY_CONSOLE_URL or a fixed port")
    back, clock = url + BACK_PATH, environment.clock
    return WebProvider(found.issuer, found.console_client_id, found.console_scope, back, token_urlsafe, clock)
