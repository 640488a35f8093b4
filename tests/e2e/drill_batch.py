"""`make drill-batch`: a batch on three gateways and two workers, with kills of every role. Exits 0 if each
line has exactly one result and interactive requests are as fast as without the batch.

One interactive client per gateway streams all the time. The first part is without the batch, the second
with it, both without kills: ``interactive_ttft_ratio`` is the 95th percentile of the second over that of the
first. Then the clients stop, and a random process of a random role is killed every few seconds until the
batch ends.

``missing``: lines in neither file; ``doubled``: results beyond the first of a line. The last line is
``RESULT {json}``.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from bench.overhead import quantile
from tests.support.command_line import CommandLine
from tests.support.stack import Stack, processes

LINES: Final = 10_000
OUTPUT_TOKENS: Final = 8
PART_S: Final = 60.0
WARM_S: Final = 10.0
KILL_EVERY_S: Final = 8.0
ENDS_WITHIN_S: Final = 3000.0
MAX_RATIO: Final = 1.1
THINK_S: Final = 0.3
# What the command line of each role's processes contains.
ROLES: Final = {
    "gateway": "services gateway",
    "worker": "services worker",
    "engine": "services.worker.engine.process",
    "scheduler": "services scheduler",
    "controlplane": "services controlplane",
    "registry": "services registry",
}
SETTINGS: Final = {
    "FAIRWAY_ENGINE_THREADS": "1",
    "FAIRWAY_KV_MEMORY_BYTES": str(64 * 1024**2),
    "FAIRWAY_SHEDDING": "false",
}


@dataclass
class Interactive:
    """A client of one gateway: a short stream, a pause, and again."""

    url: str
    key: str
    model: str
    rng: random.Random
    ttft_s: list[tuple[float, float]] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            began_s = time.monotonic()
            try:
                self.ttft_s.append((began_s, self._first_token_s(began_s)))
            except urllib.error.HTTPError as error:
                with error:
                    self.failures[f"{error.code} {error.read(200)!r}"] += 1
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.failures[repr(error)] += 1
            stop.wait(self.rng.uniform(0.5, 1.5) * THINK_S)

    def _first_token_s(self, began_s: float) -> float:
        body = {
            "model": self.model,
            "prompt": f"Question {self.rng.random()}:",
            "max_tokens": 4,
            "stream": True,
            "priority": "interactive",
            "ignore_eos": True,
        }
        first_s = 0.0
        with urllib.request.urlopen(
            request_of(self.url + "/v1/completions", self.key, body), timeout=30
        ) as answer:
            for line in answer:
                if line.startswith(b"data: {") and not first_s:
                    first_s = time.monotonic() - began_s
        if not first_s:
            raise ValueError("a stream without a token")
        return first_s


def request_of(url: str, key: str, body: Any = None) -> urllib.request.Request:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"authorization": f"Bearer {key}"})
    if body is not None:
        request.add_header("content-type", "application/json")
    return request


class Api:
    """Calls of the Batches API, at whichever gateway answers."""

    def __init__(self, urls: Sequence[str], key: str) -> None:
        self._urls = urls
        self._key = key

    def call(self, path: str, body: Any = None, *, form: bytes = b"") -> bytes:
        for attempt in range(120):
            url = self._urls[attempt % len(self._urls)]
            request = request_of(url + path, self._key, body)
            if form:
                request.data = form
                request.add_header("content-type", "multipart/form-data; boundary=drill")
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return bytes(answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    if error.code < 500:
                        raise
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.5)
        raise AssertionError(f"no gateway answers {path}")

    def upload(self, data: bytes) -> str:
        form = (
            b'--drill\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            b'--drill\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
        )
        stored = json.loads(self.call("/v1/files", form=form + data + b"\r\n--drill--\r\n"))
        return str(stored["id"])


def lines_of(count: int, model: str) -> bytes:
    lines = (
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": model,
                "prompt": f"Line {number} of the batch.",
                # One in a hundred is invalid, and belongs to the error file.
                "max_tokens": OUTPUT_TOKENS if number % 100 else -1,
                "ignore_eos": True,
            },
        }
        for number in range(count)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def gateway_urls(stack: Stack) -> list[str]:
    return sorted(
        f"http://{process.environ()['FAIRWAY_HTTP_LISTEN']}"
        for process in processes(stack.state)
        if ROLES["gateway"] in " ".join(process.info["cmdline"])
    )


def interactive_key(stack: Stack) -> str:
    """Return a key of a tenant whose requests may be interactive."""
    cli = CommandLine(stack.state)
    cli("tenants", "create", "chat", "--max-priority", "interactive")
    return cli("keys", "create", "chat-key", "--tenant", "chat").out.strip()


def kill_one(stack: Stack, rng: random.Random, kills: Counter[str]) -> None:
    """Kill a process of a random role, of those that were killed least often."""
    least = min(kills[role] for role in ROLES)
    role = rng.choice(sorted(role for role in ROLES if kills[role] == least))
    running = [one for one in processes(stack.state) if ROLES[role] in " ".join(one.info["cmdline"])]
    kills[role] += 1
    if running:
        with suppress(psutil.Error):
            rng.choice(running).send_signal(signal.SIGKILL)


def until_ended(
    api: Api, batch_id: str, stack: Stack, rng: random.Random, kills: Counter[str]
) -> dict[str, Any]:
    """Return the batch at its end, with kills until then."""
    due_s = time.monotonic()
    deadline_s = due_s + ENDS_WITHIN_S
    while time.monotonic() < deadline_s:
        batch: dict[str, Any] = json.loads(api.call(f"/v1/batches/{batch_id}"))
        if batch["status"] not in ("validating", "in_progress"):
            return batch
        if time.monotonic() >= due_s:
            kill_one(stack, rng, kills)
            due_s = time.monotonic() + rng.uniform(0.5, 1.5) * KILL_EVERY_S
            print(f"  {batch['request_counts']}, killed {dict(kills)}", flush=True)
        time.sleep(1.0)
    raise AssertionError(f"the batch did not end within {ENDS_WITHIN_S:g} s")


def results_of(api: Api, batch: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """Return how often each line is in the output, and in the error file."""
    found = []
    for name in ("output_file_id", "error_file_id"):
        data = api.call(f"/v1/files/{batch[name]}/content") if batch[name] else b""
        found.append(Counter(json.loads(line)["custom_id"] for line in data.splitlines()))
    return found[0], found[1]


def p95(clients: Sequence[Interactive], since_s: float, until_s: float) -> float:
    found = [ttft_s for one in clients for began_s, ttft_s in one.ttft_s if since_s <= began_s < until_s]
    return quantile(found, 0.95)


def drill(stack: Stack, options: argparse.Namespace) -> dict[str, Any]:
    rng, kills = random.Random(options.seed), Counter[str]()
    urls = gateway_urls(stack)
    key = interactive_key(stack)
    clients = [Interactive(url, key, stack.model, random.Random(number)) for number, url in enumerate(urls)]
    stop = threading.Event()
    threads = [threading.Thread(target=client.run, args=(stop,)) for client in clients]
    api = Api(urls, stack.api_key)
    for thread in threads:
        thread.start()
    try:
        time.sleep(WARM_S)
        alone_s = time.monotonic()
        time.sleep(options.part_s)
        body = {
            "input_file_id": api.upload(lines_of(options.lines, stack.model)),
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        until_s = time.monotonic()
        batch = json.loads(api.call("/v1/batches", body))
        time.sleep(WARM_S / 2)
        beside_s = time.monotonic()
        time.sleep(options.part_s)
        counts = json.loads(api.call(f"/v1/batches/{batch['id']}"))["request_counts"]
        kills_s = time.monotonic()
        ttft = p95(clients, alone_s, until_s), p95(clients, beside_s, kills_s)
        failed = sum((client.failures for client in clients), Counter[str]())
        print(
            f"interactive TTFT p95 {ttft[0] * 1e3:.1f} ms alone, {ttft[1] * 1e3:.1f} ms beside the batch, "
            f"failed: {dict(failed)}; lines then {counts}",
            flush=True,
        )
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    batch = until_ended(api, batch["id"], stack, rng, kills)
    output, errors = results_of(api, batch)
    every = output + errors
    print(f"{batch['status']}: {batch['request_counts']}, killed {dict(kills)}", flush=True)
    assert batch["request_counts"]["total"] == options.lines
    assert errors.keys() == {f"line-{number}" for number in range(0, options.lines, 100)}
    return {
        "lines": options.lines,
        "missing": sum(f"line-{number}" not in every for number in range(options.lines)),
        "doubled": sum(count - 1 for count in every.values()),
        "interactive_ttft_ratio": round(ttft[1] / ttft[0], 2),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="drill-batch", description=__doc__)
    parser.add_argument("--lines", type=int, default=LINES)
    parser.add_argument("--part-s", type=float, default=PART_S, help="seconds of each of the first two parts")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="fairway-batch-") as folder,
        Stack.started(
            Path(folder) / "state",
            workers=2,
            replicas=2,
            gateways=3,
            settings=SETTINGS,
            options=("--schedulers", "2", "--controlplanes", "2"),
        ) as stack,
    ):
        result = drill(stack, options)
    print("RESULT", json.dumps(result))
    ok = not result["missing"] and not result["doubled"] and result["interactive_ttft_ratio"] <= MAX_RATIO
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
