"""``python -m tests.support.rediagnose FILE...``: files of `fairway diagnose --samples`, diagnosed again."""

from __future__ import annotations

import sys
from pathlib import Path

from google.protobuf.json_format import Parse

from fairway.v1 import controlplane_pb2 as cp
from services.controlplane.diagnosis.listing import evidence_of
from services.controlplane.diagnosis.policy.diagnose import Diagnosis, diagnose
from services.controlplane.diagnosis.policy.samples import Metric
from services.controlplane.diagnosis.store import found_of


def rediagnosed(path: Path, *, model: str = "") -> Diagnosis:
    """Return the diagnosis of the samples in a file."""
    answer = Parse(path.read_text(), cp.DiagnoseLatencyResponse(), ignore_unknown_fields=True)
    sides = evidence_of(found_of(answer.baseline_samples), found_of(answer.window_samples))
    metric, name = Metric(answer.metric), model or answer.model
    return diagnose(*sides, model=name, metric=metric, level=answer.quantile)


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
