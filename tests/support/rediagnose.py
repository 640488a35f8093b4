"""``python -m tests.support.rediagnose FILE...``: files of `fairway diagnose --samples`, diagnosed again."""

from __future__ import annotations

import sys
from pathlib import Path

from google.protobuf.json_format import Parse

from fairway.v1 import controlplane_pb2 as cp
from services.controlplane.diagnosis.policy.diagnose import Diagnosis, Evidence, diagnose
from services.controlplane.diagnosis.policy.samples import Metric, samples_of
from services.controlplane.diagnosis.store import found_of


def rediagnosed(path: Path, *, model: str = "") -> Diagnosis:
    """Return the diagnosis of the samples in a file."""
    answer = Parse(path.read_text(), cp.DiagnoseLatencyResponse(), ignore_unknown_fields=True)
    sides = [found_of(one) for one in (answer.baseline_samples, answer.window_samples)]
    zones = {**sides[0].zones, **sides[1].zones}
    baseline, window = (
        Evidence(one.begin_s, one.end_s, samples_of(one.requests, zones), one.moments) for one in sides
    )
    metric, name = Metric(answer.metric), model or answer.model
    return diagnose(baseline, window, model=name, metric=metric, level=answer.quantile)


def main() -> int:
    for name in sys.argv[1:]:
        found = rediagnosed(Path(name))
        causes = ", ".join(f"{one.kind}({one.subject}) {one.score:.2f}" for one in found.causes)
        print(f"{name}: {found.verdict}: {found.message} [{causes}]")
        for step in found.tree:
            print("  " * (step.depth + 1), step.text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
