"""What a fleet writes into Prometheus: series of each process, samples per second, bytes per sample.

``make bench-series`` starts an installation with the bundled model, sends it requests, and reads what its
processes export, twice. That is expanded to the tenants and models of a fleet: a series with a tenant exists
for each pair of tenant and model, one with a model for each model. A real Prometheus (Debian's package) then
scrapes as many simulated workers as ``--workers``; a series changes at a scrape if it changed between the
two real ones. The size of the block that Prometheus writes is divided by its samples and series, and
multiplied by the size of the fleet. That product is an extrapolation; queries and the write-ahead log are not
in it.

The last line is ``RESULT {json}``; SKIPPED, with status 3, without a Prometheus.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from bench.admissions.metering import installation
from bench.results import print_result
from bench.stack import free_port
from bench.store.running import NOT_HERE

SCRAPE_S: Final = 15.0
BLOCK_S: Final = 7200.0  # a block of Prometheus, whose index is written once
CLASSES: Final = ("interactive", "standard", "batch")
FLEET: Final = {"worker": 1000, "gateway": 20, "scheduler": 3, "controlplane": 3, "registry": 2}
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class ExportedSeries:
    """One series, and whether it changed between two scrapes under load."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float
    changes: bool

    @property
    def head(self) -> str:
        return self.name + "{" + ",".join(f'{name}="{value}"' for name, value in self.labels) + "}"


def parse(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the values of an exposition by name and labels."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            head, _, value = line.rpartition(" ")
            name, _, labels = head.partition("{")
            found[name, tuple(_LABEL.findall(labels))] = float(value)
    return found


def expand(before: str, after: str, names: Mapping[str, Sequence[str]]) -> list[ExportedSeries]:
    """Return the series of a process with other tenants, models and classes: ``names`` by label."""
    first, found = parse(before), dict[str, ExportedSeries]()
    for (name, labels), value in parse(after).items():
        changes = first.get((name, labels)) != value
        taken = [label for label, _ in labels if label in names]
        for values in itertools.product(*(names[label] for label in taken)):
            drawn = dict(zip(taken, values, strict=True))
            one = ExportedSeries(
                name, tuple((key, drawn.get(key, old)) for key, old in labels), value, changes
            )
            if one.head not in found or changes:
                found[one.head] = one
    return list(found.values())


class SimulatedWorkers:
    """Serves the same series for many workers, each with values of its own that move at each scrape."""

    def __init__(self, series: Sequence[ExportedSeries], count: int) -> None:
        self._heads = [one.head for one in series]
        self._moving = [(at, one.value.is_integer()) for at, one in enumerate(series) if one.changes]
        self._values = [[one.value for one in series] for _ in range(count)]
        self._rng = random.Random(1)

    def page(self, worker: int) -> bytes:
        """Return the worker's exposition after a step: counts grow by whole numbers, times by others."""
        values, rng = self._values[worker], self._rng
        for at, is_whole in self._moving:
            values[at] += rng.randrange(8) if is_whole else rng.random() * max(abs(values[at]) / 100, 1e-3)
        return "".join(
            f"{head} {value!r}\n" for head, value in zip(self._heads, values, strict=True)
        ).encode()


def real_pages(folder: Path) -> dict[str, tuple[str, str]]:
    """Return two expositions of each role of an installation under load."""
    state = folder / "state"
    with installation(state):
        endpoints = json.loads((state / "endpoints.json").read_text())
        _load(endpoints, 40)
        before = _pages(endpoints)
        _load(endpoints, 40)
        time.sleep(1.0)
        after = _pages(endpoints)
    return {role: (before[role], after[role]) for role in before}


def _pages(endpoints: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for process, address in endpoints["metrics"].items():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            found[process.partition("-")[0]] = answer.read().decode()
    return found


def _load(endpoints: Mapping[str, Any], requests: int) -> None:
    def ask(number: int) -> None:
        content = f"{number}: a story " * (1 + number % 9)
        message = {"role": "user", "content": content}
        body = {"model": endpoints["model"], "messages": [message], "max_tokens": 4 + number % 30}
        headers = {"authorization": f"Bearer {endpoints['api_key']}", "content-type": "application/json"}
        data = json.dumps(body).encode()
        request = urllib.request.Request(endpoints["http"] + "/v1/chat/completions", data, headers)
        urllib.request.urlopen(request, timeout=120).close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(requests)))


def ingest(
    workers: SimulatedWorkers, count: int, *, each_s: float, seconds: float, folder: Path
) -> dict[str, float]:
    """Let a Prometheus scrape simulated workers; return what it holds and the sizes of its block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = workers.page(int(self.path.rpartition("/")[2]))
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the scrape has timed out, and is missing
                self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    targets = [
        {
            "targets": [f"127.0.0.1:{server.server_port}"],
            "labels": {"instance": f"worker-{number}", "__metrics_path__": f"/{number}"},
        }
        for number in range(count)
    ]
    config = {
        "global": {"scrape_interval": f"{each_s:g}s", "scrape_timeout": f"{each_s:g}s"},
        "scrape_configs": [{"job_name": "worker", "static_configs": targets}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    url = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
               f"--web.listen-address={url}", "--web.enable-admin-api", "--log.level=error"]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        time.sleep(seconds)
        snapshot = urllib.request.Request(f"http://{url}/api/v1/admin/tsdb/snapshot", method="POST")
        with urllib.request.urlopen(snapshot, timeout=300) as answer:
            name = json.load(answer)["data"]["name"]
        return _block(folder / "data" / "snapshots" / name)
    finally:
        process.terminate()
        process.wait(60)
        server.shutdown()


def _block(snapshot: Path) -> dict[str, float]:
    """Return the samples, series and bytes of the blocks of a snapshot."""
    found = {"samples": 0.0, "series": 0.0, "chunk_bytes": 0.0, "index_bytes": 0.0}
    for meta in snapshot.glob("*/meta.json"):
        stats = json.loads(meta.read_text())["stats"]
        found["samples"] += stats["numSamples"]
        found["series"] = max(found["series"], stats["numSeries"])
        found["chunk_bytes"] += sum(one.stat().st_size for one in (meta.parent / "chunks").iterdir())
        found["index_bytes"] += (meta.parent / "index").stat().st_size
    return found


def fleet_of(
    pages: Mapping[str, tuple[str, str]], options: argparse.Namespace
) -> dict[str, list[ExportedSeries]]:
    """Return the series of one process of each role in the fleet."""
    tenants, models = _names("tenant", options.tenants), _names("model", options.models)
    on_worker = models[: options.models_of_worker]
    return {
        role: expand(
            *page,
            {
                # Of a tenant's models a gateway counts those that it uses.
                "tenant": tenants,
                "model": on_worker if role == "worker" else models,
                "class": CLASSES,
                "priority": CLASSES,
            },
        )
        for role, page in pages.items()
    }


def _names(stem: str, count: int) -> list[str]:
    return [f"{stem}-{number}" for number in range(count)]


def run(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, float]]:
    """Yield what is measured, and what follows for the fleet."""
    series = fleet_of(real_pages(folder), options)
    for role, found in series.items():
        yield f"{role}_series", len(found)
    worker = series["worker"]
    yield "worker_changing_ratio", sum(one.changes for one in worker) / len(worker)
    stored = ingest(
        SimulatedWorkers(worker, options.workers),
        options.workers,
        each_s=options.each_s,
        seconds=options.seconds,
        folder=folder,
    )
    yield "ingested_samples", stored["samples"]
    yield "chunk_bytes_per_sample", stored["chunk_bytes"] / stored["samples"]
    yield "index_bytes_per_series", stored["index_bytes"] / stored["series"]
    whole = sum(count * len(series.get(role, ())) for role, count in FLEET.items())
    yield "fleet_series", whole
    yield "fleet_samples_per_s", whole / SCRAPE_S
    per_sample = stored["chunk_bytes"] / stored["samples"]
    per_sample += stored["index_bytes"] / stored["series"] * SCRAPE_S / BLOCK_S
    yield "bytes_per_sample", per_sample
    yield "fleet_gb_per_day", whole / SCRAPE_S * 86_400 * per_sample / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=200, help="simulated workers that are scraped")
    parser.add_argument("--each-s", type=float, default=5.0, help="seconds between two scrapes of one")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long they are scraped")
    parser.add_argument("--tenants", type=int, default=100, help="tenants of the fleet")
    parser.add_argument("--models", type=int, default=10, help="models of the fleet")
    parser.add_argument("--models-of-worker", type=int, default=2, help="models on one worker")
    options = parser.parse_args()
    if shutil.which("prometheus") is None:
        print("SKIPPED: no prometheus on the PATH; Debian's package has it")
        return NOT_HERE
    with tempfile.TemporaryDirectory(prefix="fairway-series-") as folder:
        found = dict(run(options, Path(folder)))
    for name, value in found.items():
        print(f"{name:28s} {value:16.3f}")
    print_result(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
