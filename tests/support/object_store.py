"""A server of the S3 protocol, in a process and an environment of its own; `make s3-env` installs it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
from obstore.store import S3Store

from fairway.cli import embedded
from services.adapters.blobs.s3 import open_bucket
from services.runtime.clock import SystemClock
from services.runtime.config import load
from tests.support import local_servers
from tests.tidy.sources import ROOT

PYTHON: Final = ROOT / ".venv-s3" / "bin" / "python"
BUCKET: Final = "models"
# Its threads check ``If-None-Match`` and store in two steps; S3 does both at once.
_SERVER: Final = """
import sys, threading
from moto.s3.responses import S3Response
from moto.server import main
put, lock = S3Response.put_object, threading.Lock()
def put_at_once(self):
    with lock:
        return put(self)
S3Response.put_object = put_at_once
main(sys.argv[1:])
"""


class ObjectStore:
    """It can be killed, frozen and thawed; what it holds is gone with it."""

    def __init__(self, folder: Path) -> None:
        self.port = 0
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.credentials = folder / "credentials"
        self.credentials.write_text(
            "[default]\naws_access_key_id = test-key\naws_secret_access_key = test-secret\n"
        )

    def start(self) -> None:
        """Return once it serves, with one bucket."""
        if not PYTHON.exists():
            pytest.skip("no S3 server is installed: make s3-env")
        self.port = local_servers.free_port()
        command = [str(PYTHON), "-c", _SERVER, "-H", embedded.LOOPBACK, "-p", str(self.port)]
        with (self._folder / "s3.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=local_servers.die_with_parent,
            )
        deadline_s = time.monotonic() + 60
        while not self._make_bucket():
            assert time.monotonic() < deadline_s, "the S3 server does not start"
            assert self._process.poll() is None, (self._folder / "s3.log").read_text()[-2000:]
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    @property
    def endpoint(self) -> str:
        return f"http://{embedded.LOOPBACK}:{self.port}"

    def settings(self, *, prefix: str = "", name: str = BUCKET, endpoint: str = "") -> dict[str, str]:
        """Return the environment variables of a registry that stores its blobs here."""
        return {
            "FAIRWAY_BLOB_STORE": f"s3://{name}/{prefix}",
            "FAIRWAY_S3_ENDPOINT": endpoint or self.endpoint,
            "FAIRWAY_S3_CREDENTIALS_FILE": str(self.credentials),
        }

    def bucket(self, *, prefix: str = "", name: str = BUCKET, endpoint: str = "") -> S3Store:
        """Return a bucket as a registry opens it."""
        settings = load(self.settings(prefix=prefix, name=name, endpoint=endpoint))
        return open_bucket(settings, SystemClock())

    @asynccontextmanager
    async def refusing(self) -> AsyncIterator[str]:
        """Yield the address of a store that answers every request with 403."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if "content-length:" in head:
                await reader.readexactly(int(head.partition("content-length:")[2].split()[0]))
            writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, embedded.LOOPBACK, 0)
        try:
            host, port = server.sockets[0].getsockname()[:2]
            yield f"{host}:{port}"
        finally:
            server.close()

    def _make_bucket(self) -> bool:
        request = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False
