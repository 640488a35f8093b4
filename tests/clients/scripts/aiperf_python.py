"""The features of aiperf: tiny benchmarks of its kinds of endpoints, and what their exports count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import TARGET, Features, Wrong, check

FEATURES = Features()
REQUESTS = 4
RUN_S = 110


def profiled(kind: str, *options: str, model: str = TARGET.model) -> Any:
    """Run a benchmark and return its export. Raises Wrong where requests failed or none were measured."""
    folder = Path(TARGET.scratch, f"{kind}-{len(options)}")
    command = [
        str(Path(sys.executable).with_name("aiperf")), "profile", "--model", model, "--url", TARGET.url,
        "--endpoint-type", kind, "--api-key", TARGET.key, "--tokenizer", TARGET.checkpoint,
        "--request-count", str(REQUESTS), "--concurrency", "2", "--ui-type", "none", "--random-seed", "1",
        "--output-artifact-dir", str(folder), "--no-gpu-telemetry", "--no-server-metrics",
        "--workers-max", "1", "--record-processor-service-count", "1", "--prompt-input-tokens-mean", "16",
        *options,
    ]  # fmt: skip
    # Offline it takes the tokenizer's folder for a name in the hub's cache.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, env=environment)
    exports = list(folder.rglob("profile_export_aiperf.json"))
    if done.returncode or not exports:
        raise Wrong(f"exit code {done.returncode}: {done.stdout[-500:]} {done.stderr[-500:]}")
    found = json.loads(exports[0].read_text())
    check(found["request_count"]["avg"] == REQUESTS, found["request_count"])
    check(not (found.get("error_request_count") or {}).get("avg"), found.get("error_summary"))
    return found


OUTPUT = ("--prompt-output-tokens-mean", "8", "--extra-inputs", "ignore_eos:true")


@FEATURES.shows("bench_chat")
def bench_chat() -> None:
    usage = ("--use-server-token-count", "--per-chunk-usage")
    found = profiled("chat", "--streaming", *usage, *OUTPUT)
    check(found["time_to_first_token"]["avg"] > 0 and found["output_sequence_length"]["avg"] > 0, found)


@FEATURES.shows("bench_completion")
def bench_completion() -> None:
    found = profiled("completions", "--streaming", *OUTPUT)
    check(found["time_to_first_token"]["avg"] > 0, found)


@FEATURES.shows("responses_stream")
def responses_stream() -> None:
    check(profiled("responses", "--streaming", *OUTPUT)["time_to_first_token"]["avg"] > 0, "no first token")


@FEATURES.shows("messages_stream")
def messages_stream() -> None:
    found = profiled("messages", "--streaming", "--prompt-output-tokens-mean", "8")
    check(found["time_to_first_token"]["avg"] > 0, found)


@FEATURES.shows("bench_embeddings")
def bench_embeddings() -> None:
    check(profiled("embeddings", model=TARGET.embedder)["request_latency"]["avg"] > 0, "no latency")


@FEATURES.shows("rerank")
def rerank() -> None:
    options = ["--rankings-passages-mean", "2", "--rankings-passages-prompt-token-mean", "4"]
    options += ["--rankings-query-prompt-token-mean", "4", "--custom-endpoint", "/v2/rerank"]
    check(profiled("cohere-rankings", *options, model=TARGET.reranker)["request_latency"]["avg"] > 0, "none")


FEATURES.run()
