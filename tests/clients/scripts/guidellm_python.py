"""The features of guidellm: tiny benchmarks of its request types, and what its reports count."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import TARGET, Features, Wrong, check

FEATURES = Features()
REQUESTS = 4
RUN_S = 100


def benchmark(kind: str, *, model: str = TARGET.model, extras: str = "", stream: bool = True) -> Any:
    """Run a benchmark and return its metrics. Raises Wrong where a request failed or none was measured."""
    report = Path(TARGET.scratch, f"{kind.strip('/').replace('/', '-')}.json")
    backend = {
        "kind": "openai_http",
        "target": TARGET.url,
        "model": model,
        "api_key": TARGET.key,
        "request_format": kind,
        "stream": stream,
    }
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console",
        "--backend", json.dumps(backend),
        "--profile", "kind=concurrent,streams=2",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={TARGET.checkpoint}",
        "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    if done.returncode or not report.exists():
        raise Wrong(f"exit code {done.returncode}: {done.stdout[-400:]} {done.stderr[-900:]}")
    (found,) = json.loads(report.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    check(totals["successful"] == REQUESTS and not totals["errored"], totals)
    return found["metrics"]


@FEATURES.shows("bench_chat")
def bench_chat() -> None:
    benchmark("/v1/chat/completions")


@FEATURES.shows("bench_completion")
def bench_completion() -> None:
    benchmark("/v1/completions")


@FEATURES.shows("responses_stream")
def responses_stream() -> None:
    benchmark("/v1/responses")


FEATURES.run()
