"""LiteLLM's proxy as a peer: its own environment, one process, its limits and budgets on one Redis.

Without a database its virtual keys come from a custom authentication, which returns the key's limits and its
budget; the counters of these are in Redis, as with a database.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.admissions.http_load import HttpTarget
from bench.engines.peers.catalog import is_installed, python_of
from bench.stack import free_port

_READY_S: Final = 120.0
_KEY: Final = "sk-bench"
_AUTH: Final = """
from litellm.proxy._types import UserAPIKeyAuth


async def check(request, api_key):
    if api_key != "{key}":
        raise Exception("unknown key")
    return UserAPIKeyAuth(
        api_key=api_key, user_id="user", team_id="team", rpm_limit=10_000_000, tpm_limit=2_000_000_000,
        max_parallel_requests=4096, max_budget=1e9, spend=0.0,
    )
"""
_CONFIG: Final = """
model_list:
  - model_name: bench
    litellm_params:
      {{model: openai/bench, api_base: "http://127.0.0.1:{backend}/v1", api_key: none,
       input_cost_per_token: 0.000001, output_cost_per_token: 0.000002}}
litellm_settings:
  cache: true
  cache_params: {{type: redis, host: 127.0.0.1, port: {redis}, supported_call_types: []}}
general_settings:
  master_key: sk-master-0123456789-0123456789-abcdef
  custom_auth: bench_auth.check
router_settings: {{redis_host: 127.0.0.1, redis_port: {redis}}}
"""


@contextlib.contextmanager
def litellm_proxy(peers: Path, folder: Path, *, backend: int, redis: int) -> Iterator[HttpTarget]:
    """Yield the running proxy. Raises SystemExit when it is not installed or does not start."""
    if not is_installed(peers, "litellm"):
        raise SystemExit("LiteLLM is not installed: make bench-engine-peers ARGS=litellm")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench_auth.py").write_text(_AUTH.format(key=_KEY))
    (folder / "config.yaml").write_text(_CONFIG.format(backend=backend, redis=redis))
    port, environment = (
        free_port(),
        {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"},
    )
    command = [
        str(python_of(peers, "litellm").with_name("litellm")), "--config", "config.yaml",
        "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        _wait_ready(process, f"http://127.0.0.1:{port}/health/liveliness", folder / "log")
        yield HttpTarget("litellm", f"http://127.0.0.1:{port}", _KEY, "bench", (process.pid,))
    finally:
        process.terminate()
        process.wait(30)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + _READY_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.5)
    raise SystemExit(f"LiteLLM's proxy did not start: {log.read_text()[-2000:]}")
