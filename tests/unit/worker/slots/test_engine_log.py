"""What an engine writes to stderr: its own events apart from what a library or a crash wrote."""

from __future__ import annotations

import os

from structlog.testing import capture_logs

from services.worker.slots.log_pipe import LogPipe


async def test_error_output_is_found_among_the_events_of_sequences() -> None:
    pipe = await LogPipe.open()
    with pipe.write_end() as descriptor:
        for line in (
            '{"request_id": "r1", "event": "sequence.taken", "level": "info"}',
            "Fatal Python error: Segmentation fault",
            '{"not": "one of ours"}',
            '{"request_id": "r2", "event": "sequence.taken", "level": "info"}',
        ):
            os.write(descriptor, line.encode() + b"\n")
    with capture_logs() as logs:
        await pipe.copy(7)
    pipe.close()
    assert [each["line"] for each in logs if each["event"] == "engine.stderr_written"] == [
        "Fatal Python error: Segmentation fault",
        '{"not": "one of ours"}',
    ]
    assert sum(each["event"] == "engine.logged" for each in logs) == 2
