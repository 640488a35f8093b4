"""The judgement of `make security`, and that its table has every input at every face that has its fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.security.drills.target import Gateway, Target
from tests.security.table.cells import Answer, Cell, Outcome, Tally, of_grpc, of_http, problem
from tests.security.table.faces import generation_cells, proto_of
from tests.security.table.inputs import INPUTS

AT = "127.0.0.1:1"
TARGET = Target(Path("state"), "m", "admin", [Gateway("gateway", AT, AT)], {}, {}, {"drills": "key"})


async def never() -> Answer:
    raise AssertionError("it is not sent")


REFUSED = Cell("group", "input", "face", never)
HARMLESS = Cell("group", "input", "face", never, served=True)


@pytest.mark.parametrize(
    "answer", [of_http(400, "no", 0.1), of_http(0, "", 0.1), of_grpc("NOT_FOUND", "", 0)]
)
def test_a_refusal_is_expected_of_every_cell(answer: Answer) -> None:
    assert problem(REFUSED, answer) == problem(HARMLESS, answer) == ""


@pytest.mark.parametrize("answer", [of_http(200, "{}", 0.1), of_grpc("OK", "", 0.1)])
def test_what_must_be_refused_is_not_served(answer: Answer) -> None:
    assert "it was served" in problem(REFUSED, answer)
    assert problem(HARMLESS, answer) == ""


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (of_http(500, "internal", 0.1), "the server failed: 500"),
        (of_http(503, "away", 0.1), "the server failed: 503"),
        (of_grpc("INTERNAL", "bug", 0.1), "the server failed: INTERNAL"),
        (of_grpc("UNKNOWN", "bug", 0.1), "the server failed: UNKNOWN"),
        (of_grpc("UNAVAILABLE", "Socket closed", 0.1), "the server failed: UNAVAILABLE"),
        (of_http(400, "Traceback (most recent call last)", 0.1), "the refusal has 'Traceback'"),
        (of_http(400, "cannot read /tmp/model", 0.1), "the refusal has '/tmp/'"),
        (of_http(400, "<Parser object at 0x7f0000001>", 0.1), "the refusal has 'object at 0x'"),
        (of_http(400, "late", 20.0), "it took 20.0 s"),
    ],
)
def test_failures_leaks_and_late_answers_are_found(answer: Answer, found: str) -> None:
    assert found in problem(HARMLESS, answer)


def test_a_run_without_cells_or_with_a_crash_does_not_pass() -> None:
    tally = Tally()
    assert not tally.passed
    assert tally.add(REFUSED, of_http(400, "no", 0.1)) == ""
    assert tally.passed
    tally.crashes.append("after input: worker-0")
    assert not tally.passed
    assert tally.result == 'RESULT {"cells": 1, "unexpected": 0, "crashes": 1}'


def test_every_input_has_faces_of_http_and_grpc_where_they_have_its_fields() -> None:
    cells = generation_cells(TARGET, INPUTS)
    faces = {each.name: {cell.face for cell in cells if cell.input == each.name} for each in INPUTS}
    assert [name for name, found in faces.items() if not found] == []
    assert faces["presence_penalty out of range"] == {
        "chat", "chat stream", "completions", "batch", "socket", "Complete", "Generate", "Session",
    }  # fmt: skip
    assert {"responses", "messages", "Complete"} <= faces["model: lua"]
    assert len(cells) >= 150


def test_a_message_that_cannot_have_a_value_is_no_cell() -> None:
    assert proto_of("m", {"n": 2**40}) is None
    assert proto_of("m", {"cache_salt": "x"}) is None
    generation = proto_of("m", {"n": 10**9, "guided_json": {"type": "object"}})
    assert generation is not None
    assert (generation.choices, generation.sampling.constraint.json_schema) == (10**9, '{"type": "object"}')
    assert Outcome.FAILED not in (of_grpc("UNIMPLEMENTED", "", 0).outcome, of_http(501, "", 0).outcome)
