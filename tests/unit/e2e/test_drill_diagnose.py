"""The drill of diagnosis: its windows are well-formed, and it fails by its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.controlplane.diagnosis.policy.suspects import CauseKind
from tests.e2e.drill_diagnose import AIMS, CAUSES, HABITS, Case, Window, failures_of, read_cases, result_of

PLANTED = Case("planted", "ttft", (), kind="slow_worker", subjects=("worker-1",))
QUIET = Case("quiet", "ttft", ())


def window(case: Case, *causes: tuple[str, str], moved: float = 2.0) -> Window:
    answer = {"causes": [{"kind": kind, "subject": subject} for kind, subject in causes]}
    return Window(case, 0.0, 30.0, {"p95_s": 1.0}, {"p95_s": moved}, answer)


def test_the_file_has_twelve_causes_and_twelve_quiet_windows() -> None:
    cases = read_cases(CAUSES)
    causes = [case for case in cases if case.kind]
    assert len(causes) >= 12
    assert len(cases) - len(causes) >= 12
    assert {case.kind for case in causes} <= set(CauseKind)
    assert len({case.name for case in cases}) == len(cases)
    tenants = {one["tenant"] for case in cases for one in case.plant if one["action"] == "habits"}
    assert tenants <= HABITS.keys()


def test_an_unknown_action_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "causes.toml"
    file.write_text('quiet = []\n[[cause]]\nname = "x"\nmetric = "ttft"\nplant = [{ action = "pray" }]\n')
    with pytest.raises(ValueError, match="x: there is no action pray"):
        read_cases(file)


def test_causes_are_counted_by_their_place_and_quiet_windows_by_any() -> None:
    wrong, right = ("slow_worker", "worker-2"), ("slow_worker", "worker-1")
    windows = [
        window(PLANTED, right),
        window(PLANTED, wrong, ("prompts_grew", "ann"), right),
        window(PLANTED, wrong, wrong, wrong, right),
        window(PLANTED),
        window(QUIET, wrong, moved=1.0),
        window(QUIET, moved=1.0),
    ]
    assert result_of(windows, 0.005) == {
        "named_first": 0.25,
        "named_in_three": 0.5,
        "false_accusations": 1,
        "recorder_overhead": 0.005,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [("named_first", 0.89), ("named_in_three", 0.99), ("false_accusations", 1), ("recorder_overhead", 0.011)],
)
def test_each_figure_has_its_bound(name: str, value: float) -> None:
    assert failures_of([], AIMS) == []
    (failure,) = failures_of([], {**AIMS, name: value})
    assert failure.startswith(name)
    (failure,) = failures_of([], {**AIMS, name: None})
    assert failure.startswith(name)


def test_a_cause_that_moved_nothing_is_no_cause() -> None:
    (failure,) = failures_of([window(PLANTED, moved=1.4), window(QUIET, moved=1.0)], AIMS)
    assert "nothing was planted" in failure
