"""A diagnosed window replayed in the simulator: as it was, and without each suspect.

It runs in a process of its own beside this command, since the services do not contain the simulator and a
control plane that leads must not compute for seconds.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.json_format import MessageToJson

from fairway.v1 import controlplane_pb2 as cp

MAX_REPLAYED: Final = 2  # causes
TIMEOUT_S: Final = 120.0
AS_IT_WAS: Final = "as it was"
LEAST_EFFECT: Final = 0.9  # the quantile without a cause is below this ratio of that with it
# The kinds in WITHOUT of simulator/lab/window.py, which this command does not import.
REPLAYED: Final = frozenset({
    "arrivals_grew", "noisy_neighbour", "prompts_grew", "outputs_grew", "cache_hits_fell", "slow_worker",
    "slow_version", "version_load",
})  # fmt: skip
# What the simulator reads. The moments of a large fleet alone would exceed its bound for a file.
_READ: Final = FieldMask(paths=(
    "model", "metric", "quantile", "window", "baseline", "step_prices", "window_samples.requests",
    "baseline_samples.requests",
))  # fmt: skip


def replay(found: cp.DiagnoseLatencyResponse) -> None:
    """Replay the window of an answer with its samples, and add to each cause what came of it.

    Where nothing was replayed the evidence has the reason, and the score of what might have been is lower.
    """
    tested = [cause for cause in found.causes[:MAX_REPLAYED] if cause.kind in REPLAYED]
    for cause in found.causes:
        if cause.kind not in REPLAYED:
            cause.evidence.append("not replayed: the simulator has no such part")
    if not tested:
        return
    problem, quantiles = _quantiles(found, tested)
    if problem:
        for cause in tested:
            cause.score *= 0.9
            cause.evidence.append(f"not replayed: {problem}")
        return
    with_s = quantiles[AS_IT_WAS]
    for cause in tested:
        without_s = quantiles[_name(cause)]
        cause.replayed_s, cause.replayed_without_s = with_s, without_s
        text = f"replayed in the simulator: {with_s * 1e3:.3g} ms with it, {without_s * 1e3:.3g} ms without"
        if without_s > LEAST_EFFECT * with_s:
            cause.score *= 0.5
            text += ": the replay does not need it"
        cause.evidence.append(text)
    found.causes.sort(key=lambda cause: -cause.score)


def _name(cause: cp.DiagnosedCause) -> str:
    return f"without {cause.kind} {cause.subject}"


def _quantiles(
    found: cp.DiagnoseLatencyResponse, causes: Sequence[cp.DiagnosedCause]
) -> tuple[str, dict[str, float]]:
    """Return why nothing was replayed, or the quantile of each run."""
    if importlib.util.find_spec("simulator") is None:
        return "the simulator is not installed beside this command", {}
    answer = cp.DiagnoseLatencyResponse(causes=causes)
    _READ.MergeMessage(found, answer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "window.json"
        text = MessageToJson(answer, preserving_proto_field_name=True, indent=None)
        path.write_text(text, encoding="utf-8")
        child = [sys.executable, "-P", "-m", "simulator", "window", str(path)]
        try:
            ran = subprocess.run(child, capture_output=True, encoding="utf-8", timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"the simulation took more than {TIMEOUT_S:g} s", {}
    try:
        quantiles = json.loads(ran.stdout) if not ran.returncode else {}
    except ValueError:
        quantiles = {}
    names = {AS_IT_WAS, *map(_name, causes)}
    if not names <= quantiles.keys() or not quantiles[AS_IT_WAS]:
        return f"the simulation failed: {ran.stderr.strip()[-200:] or 'nothing finished'}", {}
    return "", quantiles
