"""Far more streams than the KV pool holds: preempted, handed back and placed again, each one as if alone."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from tests.chaos.test_kill import stream
from tests.support.stack import Stack, at_rest

STREAMS = 12
TOKENS = 300
# 31 blocks of 96 KiB: one and a half streams. A grant reserves two, so that nearly all are let in.
SETTINGS = {
    "FAIRWAY_KV_MEMORY_BYTES": str(3 * 1024**2),
    "FAIRWAY_PREDICTED_OUTPUT_TOKENS": "8",
    "FAIRWAY_QUEUE_TTL_S": "120",
}


async def test_streams_that_are_handed_back_end_as_if_alone(tmp_path: Path, installations: None) -> None:
    rested = partial(at_rest, workers=1)
    with Stack.started(tmp_path / "state", workers=1, replicas=1, settings=SETTINGS) as tight:
        await tight.wait_workers(rested, 60)
        async with tight.inference() as stub:
            one = partial(stream, tight, stub, tokens=TOKENS, seen=lambda number: None)
            alone = [await one(number=number) for number in range(STREAMS)]
            together = await asyncio.gather(*(one(number=number) for number in range(STREAMS)))
        assert [outcome.error for outcome in together if outcome.error] == []
        assert all(outcome.finished and len(outcome.ids) == TOKENS for outcome in together)
        pairs = list(zip(alone, together, strict=True))
        same = [(before, after) for before, after in pairs if before.ids == after.ids]
        # Near ties between the first two candidates may fall differently when KV is computed again.
        assert len(same) >= STREAMS - 1
        assert all(before.text == after.text for before, after in same)
        await tight.wait_workers(rested, 10)
