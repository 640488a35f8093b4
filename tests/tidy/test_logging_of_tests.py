"""Tests log as the roles do."""

from __future__ import annotations

import json
import sys

import pytest
import structlog

from services.runtime.telemetry import logging


def test_a_logger_of_a_test_renders_as_one_of_a_role(capsys: pytest.CaptureFixture[str]) -> None:
    here = structlog.get_config()
    logging.configure()
    production = structlog.get_config()
    structlog.configure(**here)
    assert [type(each) for each in here["processors"]] == [type(each) for each in production["processors"]]
    assert here["wrapper_class"] is production["wrapper_class"]

    canary = "a prompt"
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(sys.stderr))
    try:
        try:
            raise ValueError("planted")
        except ValueError:
            structlog.get_logger().exception("thing.crashed")
        structlog.get_logger().debug("thing.seen")
    finally:
        structlog.configure(**here)
    (line,) = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    assert (event["event"], event["level"]) == ("thing.crashed", "error")
    assert event["exception"][0]["exc_value"] == "planted"
    assert canary not in line
    assert "locals" not in line
