"""The worker's whole token path over a socket and a real engine process with the null executor."""

from __future__ import annotations

from services.core.generation import FinishReason, NotAdmittedReason


async def test_thirty_two_sequences_stream_to_their_ends(start_worker, new_sink, until):
    worker = await start_worker()
    sinks = [new_sink() for _ in range(32)]
    for index, sink in enumerate(sinks):
        worker.client.start(worker.spec(max_tokens=10 + index, seed=index), sink)
    for index, sink in enumerate(sinks):
        await sink.wait()
        assert sink.end is not None, sink.lost or sink.refusal
        assert sink.end.reason is FinishReason.LENGTH
        assert len(sink.ids) == sink.end.output_tokens == 10 + index
        assert sink.text
    table = worker.host.table(sinks and worker.agent.status().versions[0].record.version_digest)
    assert (table.reserved, len(table)) == (0, 0)
    worker.agent.check_integrity()
    await until(lambda: table.stats.kv_blocks_used == 0)
