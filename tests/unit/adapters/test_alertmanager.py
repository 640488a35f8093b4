"""What the client of an Alertmanager sends, and how it names what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from services.adapters.alertmanager import Alertmanager
from services.core.errors import Unavailable
from services.runtime.config import ConfigError, load
from tests.support.local_servers import free_port

ALERTS = [{"labels": {"alertname": "A"}, "annotations": {}}]


@pytest.fixture
def server() -> Iterator[tuple[str, list[tuple[str, Any]], list[int]]]:
    """Return its URL, the calls that it received, and a list whose last entry it answers."""
    calls: list[tuple[str, Any]] = []
    status = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            calls.append((f"{self.path} {self.headers['content-type']}", body))
            self.send_response(status[-1])
            self.end_headers()
            self.wfile.write(b"" if status[-1] == 200 else b'"bad label"')

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}", calls, status
        found.shutdown()
        thread.join()


async def test_it_sends_to_the_second_version_of_the_api(
    server: tuple[str, list[tuple[str, Any]], list[int]],
) -> None:
    url, calls, status = server
    await Alertmanager(url + "/prefix/").post(ALERTS)
    assert calls == [("/prefix/api/v2/alerts application/json", ALERTS)]
    status.append(400)
    with pytest.raises(Unavailable, match=f"{url}/api/v2/alerts: it answers 400: .bad label"):
        await Alertmanager(url).post(ALERTS)


async def test_one_that_is_away_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable, match=url):
        await Alertmanager(url).post(ALERTS)


@pytest.mark.parametrize("url", ["http://alerts.example:9093", "ftp://a", "https://user:pw@a", "alerts:9093"])
def test_a_setting_that_sends_in_clear_text_or_nowhere_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match="FAIRWAY_ALERTMANAGERS"):
        load({"FAIRWAY_ALERTMANAGERS": f"https://good,{url}"})
    assert load({"FAIRWAY_ALERTMANAGERS": "https://a,http://127.0.0.1:9093"}).alertmanagers == (
        "https://a",
        "http://127.0.0.1:9093",
    )
