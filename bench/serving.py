"""One load through a gateway's HTTP API, by our own driver or a public load generator.

``--concurrency`` streams of completions in a closed loop, each with a random prompt of ``--prompt-tokens``
and exactly ``--output-tokens``, against ``--url`` or an installation that is started for it with the bundled
model on ``--device``. aiperf and guidellm each run in an environment of their own, which ``make
bench-engine-peers ARGS="aiperf guidellm"`` installs; exit status 3 where the one that is named is absent.

The last line is ``RESULT {json}``, the same figures by every driver: time to first token, time between tokens
(of a request: from its first token to its last, over their number less one), output tokens per second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from bench.admissions.metering import installation
from bench.engines.peers.catalog import is_installed
from bench.overhead import quantile
from bench.results import print_result
from bench.stack import CHECKPOINT
from bench.store.running import NOT_HERE
from bench.vllm.served import Server
from bench.vllm.streams import Asked, stream

Figures = dict[str, float]
LIMIT_S: Final = 1800.0


@dataclass(frozen=True, slots=True)
class Load:
    """Where requests go, and what they are."""

    url: str
    api_key: str
    model: str
    tokenizer: Path
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    requests: int


def own(load: Load, _: Path, scratch: Path, seed: int) -> Figures:
    """Return the figures by our own driver, in this process."""
    address = urlsplit(load.url)
    headers = f"Authorization: Bearer {load.api_key}\r\n"
    server = Server(address.port or 80, load.model, headers, address.hostname or "127.0.0.1")
    return asyncio.run(_closed_loop(load, server, seed))


async def _closed_loop(load: Load, server: Server, seed: int) -> Figures:
    rng = Random(seed)
    vocabulary = Tokenizer.from_file(str(load.tokenizer / "tokenizer.json")).get_vocab_size()
    ids = range(vocabulary // 4, vocabulary)  # the first are special ones and single characters
    prompts = iter([rng.choices(ids, k=load.prompt_tokens) for _ in range(load.requests)])
    streams = []

    async def client() -> None:
        for prompt in prompts:
            streams.append(await stream(server, Asked(prompt, load.output_tokens)))

    began_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load.concurrency)))
    took_s = time.perf_counter() - began_s
    ttft_ms = [1e3 * each.ttft_s for each in streams]
    gaps = max(1, load.output_tokens - 1)
    itl_ms = [1e3 * (each.took_s - each.ttft_s) / gaps for each in streams]
    return {
        "ttft_p50_ms": quantile(ttft_ms, 0.5),
        "ttft_p95_ms": quantile(ttft_ms, 0.95),
        "itl_p50_ms": quantile(itl_ms, 0.5),
        "itl_p95_ms": quantile(itl_ms, 0.95),
        "output_tokens_per_s": load.requests * load.output_tokens / took_s,
    }


def aiperf(load: Load, environment: Path, scratch: Path, seed: int) -> Figures:
    """Return the figures that aiperf exports."""
    folder = scratch / "aiperf"
    _tool(
        [
            str(environment / "bin" / "aiperf"), "profile", "--model", load.model, "--url", load.url,
            "--endpoint-type", "completions", "--streaming", "--api-key", load.api_key,
            "--tokenizer", str(load.tokenizer.resolve()), "--request-count", str(load.requests),
            "--concurrency", str(load.concurrency), "--random-seed", str(seed), "--ui-type", "none",
            "--output-artifact-dir", str(folder), "--no-gpu-telemetry", "--no-server-metrics",
            "--workers-max", "1", "--record-processor-service-count", "1",
            "--prompt-input-tokens-mean", str(load.prompt_tokens),
            "--prompt-output-tokens-mean", str(load.output_tokens), "--extra-inputs", "ignore_eos:true",
        ]
    )  # fmt: skip
    (export,) = folder.rglob("profile_export_aiperf.json")
    return aiperf_figures(json.loads(export.read_text()), load.requests)


def aiperf_figures(export: Mapping[str, Any], requests: int) -> Figures:
    """Return the figures of an export of aiperf 0.13. Raises SystemExit unless all requests succeeded."""
    failed = (export.get("error_request_count") or {}).get("avg") or 0
    done = (export.get("request_count") or {}).get("avg") or 0
    if failed or done != requests:
        raise SystemExit(f"aiperf: {done:g} of {requests} requests succeeded, {failed:g} failed")
    ttft, itl = export["time_to_first_token"], export["inter_token_latency"]
    return {
        "ttft_p50_ms": ttft["p50"],
        "ttft_p95_ms": ttft["p95"],
        "itl_p50_ms": itl["p50"],
        "itl_p95_ms": itl["p95"],
        "output_tokens_per_s": export["output_token_throughput"]["avg"],
    }


def guidellm(load: Load, environment: Path, scratch: Path, seed: int) -> Figures:
    """Return the figures that guidellm reports."""
    report = scratch / "guidellm.json"
    backend = {
        "kind": "openai_http",
        "target": load.url,
        "model": load.model,
        "api_key": load.api_key,
        "request_format": "/v1/completions",
        "stream": True,
    }
    data = f"kind=synthetic_text,prompt_tokens={load.prompt_tokens},output_tokens={load.output_tokens}"
    _tool(
        [
            str(environment / "bin" / "guidellm"), "run", "--disable-console",
            "--backend", json.dumps(backend),
            "--profile", f"kind=concurrent,streams={load.concurrency}",
            "--constraint", f"kind=max_requests,count={load.requests}",
            "--tokenizer", f"kind=huggingface_auto,model={load.tokenizer.resolve()}",
            "--data", data, "--seed", f"kind=static,value={seed}", "--output", f"kind=json,path={report}",
        ]
    )  # fmt: skip
    return guidellm_figures(json.loads(report.read_text()), load.requests)


def guidellm_figures(report: Mapping[str, Any], requests: int) -> Figures:
    """Return the figures of a report of guidellm 0.8. Raises SystemExit unless all requests succeeded."""
    (found,) = report["benchmarks"]
    metrics = found["metrics"]
    totals = metrics["request_totals"]
    if totals["errored"] or totals["successful"] != requests:
        raise SystemExit(f"guidellm: {totals['successful']} of {requests} requests succeeded: {totals}")
    names = ("time_to_first_token_ms", "inter_token_latency_ms")
    ttft, itl = (metrics[name]["successful"]["percentiles"] for name in names)
    return {
        "ttft_p50_ms": ttft["p50"],
        "ttft_p95_ms": ttft["p95"],
        "itl_p50_ms": itl["p50"],
        "itl_p95_ms": itl["p95"],
        "output_tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
    }


def _tool(command: list[str]) -> None:
    """The tool ended well. Raises SystemExit with the end of what it wrote."""
    # Offline, a tokenizer's folder is taken for a name in the hub's cache.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    if done.returncode:
        ends = f"{done.stdout[-600:]} {done.stderr[-900:]}"
        raise SystemExit(f"{Path(command[0]).name} ended with {done.returncode}: {ends}")


DRIVERS: Final[Mapping[str, Callable[[Load, Path, Path, int], Figures]]] = {
    "own": own,
    "aiperf": aiperf,
    "guidellm": guidellm,
}


@contextlib.contextmanager
def served(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield URL, key and model of the gateway that is named, or of an installation that is started."""
    if options.url:
        yield options.url, os.environ.get("FAIRWAY_API_KEY", ""), options.model
        return
    os.environ["FAIRWAY_DEVICE"] = options.device
    with installation(folder / "state") as found:
        yield found.target.base_url, found.target.api_key, found.target.model


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--driver", choices=list(DRIVERS), default="own")
    parser.add_argument("--peers", type=Path, default=Path(".fairway", "bench", "peers"))
    parser.add_argument("--url", default="", help="a running gateway, with its key in FAIRWAY_API_KEY")
    parser.add_argument("--model", default="tiny")
    parser.add_argument(
        "--tokenizer", type=Path, default=CHECKPOINT, help="folder with the model's tokenizer"
    )
    parser.add_argument("--device", default="cpu")
    for name, usual in (("concurrency", 8), ("prompt-tokens", 64), ("output-tokens", 32), ("requests", 64)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.driver != "own" and not is_installed(options.peers, options.driver):
        command = f'make bench-engine-peers ARGS="{options.driver}"'
        print(f"SKIPPED {options.driver}: it is not installed in {options.peers}; `{command}` installs it")
        return NOT_HERE
    rounds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="fairway-bench-") as name, served(options, Path(name)) as at:
        shape = (options.concurrency, options.prompt_tokens, options.output_tokens, options.requests)
        load = Load(*at, options.tokenizer, *shape)
        driver, environment = DRIVERS[options.driver], options.peers / options.driver
        for number in range(options.rounds + 1):
            scratch = Path(name, f"round-{number}")
            scratch.mkdir()
            found = driver(load, environment, scratch, number + 1)
            if number:  # the first round warms up
                shown = {key: round(value, 2) for key, value in found.items()}
                print(f"round {number} of {options.rounds}: {shown}", flush=True)
                for key, value in found.items():
                    rounds.setdefault(key, []).append(value)
    print_result(rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
