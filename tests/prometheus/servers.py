"""A real Prometheus, a real Alertmanager, and a receiver of its notifications."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.support.local_servers import die_with_parent, free_port

PROMETHEUS = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
ALERTMANAGER = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
MISSING = [
    name
    for name, found in (("prometheus", PROMETHEUS), ("promtool", PROMTOOL), ("alertmanager", ALERTMANAGER))
    if found is None
]
ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "fairway.yml"


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def until(holds: Callable[[], Any], what: str, timeout_s: float = 240.0) -> Any:
    """Return what ``holds`` returns once it is true. Raises AssertionError."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError):
            if found := holds():
                return found
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.3)


@contextlib.contextmanager
def running(command: Sequence[str], url: str, log: Path) -> Iterator[str]:
    """Run a server until the end; yields its URL once it is ready."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, preexec_fn=die_with_parent)
    try:

        def ready() -> bool:
            assert process.poll() is None, log.read_text()
            with urllib.request.urlopen(url + "/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)

        until(ready, f"{command[0]} is ready")
        yield url
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def prometheus(
    folder: Path, jobs: Mapping[str, Mapping[str, str]], *, each_s: float = 2.0, alertmanager: str = ""
) -> Iterator[str]:
    """Run a Prometheus with the rules of this tree; ``jobs`` have addresses by instance."""
    assert PROMETHEUS is not None
    config: dict[str, Any] = {
        "global": {"scrape_interval": f"{each_s:g}s", "evaluation_interval": f"{each_s:g}s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": job,
                "static_configs": [
                    {"targets": [address], "labels": {"instance": name}}
                    for name, address in instances.items()
                ],
            }
            for job, instances in jobs.items()
        ],
    }
    if alertmanager:
        targets = [{"targets": [urllib.parse.urlsplit(alertmanager).netloc]}]
        config["alerting"] = {"alertmanagers": [{"api_version": "v2", "static_configs": targets}]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        PROMETHEUS,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--web.enable-admin-api",
    ]
    with running(command, f"http://{address}", folder / "prometheus.log") as url:
        yield url


def query(url: str, expression: str) -> dict[frozenset[tuple[str, str]], float]:
    """Return the samples of an expression now, by their labels without the name."""
    answer = get(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
    return {
        frozenset((name, value) for name, value in one["metric"].items() if name != "__name__"): float(
            one["value"][1]
        )
        for one in answer["data"]["result"]
    }


@dataclass
class Receiver:
    """Keeps what an Alertmanager notifies."""

    port: int = 0
    notified: list[dict[str, Any]] = field(default_factory=list)

    @contextlib.contextmanager
    def open(self) -> Iterator[Receiver]:
        notified = self.notified

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                notified.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        with HTTPServer(("127.0.0.1", 0), Handler) as server:
            self.port = server.server_port
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()

    def alerts(self, name: str, status: str) -> list[dict[str, Any]]:
        """Return the alerts of that name in all notifications."""
        found = [one for each in list(self.notified) for one in each["alerts"]]
        return [one for one in found if one["labels"]["alertname"] == name and one["status"] == status]


@contextlib.contextmanager
def alertmanager(folder: Path, receiver: Receiver) -> Iterator[str]:
    """Run an Alertmanager that notifies the receiver within a second."""
    assert ALERTMANAGER is not None
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "route": {
            "receiver": "test",
            "group_by": ["..."],
            "group_wait": "0s",
            "group_interval": "1s",
            "repeat_interval": "1h",
        },
        "receivers": [{"name": "test", "webhook_configs": [{"url": f"http://127.0.0.1:{receiver.port}/"}]}],
    }
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        ALERTMANAGER,
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
    ]
    with running(command, f"http://{address}", folder / "alertmanager.log") as url:
        yield url
