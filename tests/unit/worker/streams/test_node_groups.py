"""A worker admits one group at a time: no batch has members of two."""

from __future__ import annotations

from dataclasses import replace

from services.core.generation import NotAdmittedReason
from tests.unit.worker.bench import DIGEST, Bench
from tests.unit.worker.reader import Reader
from tests.unit.worker.streams.test_sequences import A


def test_a_worker_refuses_sequences_of_another_group(bench: Bench) -> None:
    reader = Reader(bench)
    bench.host.assign_group("dedicated/acme")
    reader.stream.start(1, bench.spec())
    reader.stream.start(2, replace(bench.spec(tenant="acme"), node_group="partitioned/acme"))
    reader.stream.start(3, replace(bench.spec(tenant="acme"), node_group="dedicated/acme"))
    reader.read()
    assert reader.refused == {
        1: NotAdmittedReason.OTHER_NODE_GROUP,
        2: NotAdmittedReason.OTHER_NODE_GROUP,
    }
    assert bench.host.running == 1


def test_a_change_of_the_group_waits_for_what_runs_and_admits_nobody_meanwhile(bench: Bench) -> None:
    reader = Reader(bench)
    reader.stream.start(1, bench.spec(max_tokens=1))
    bench.host.assign_group("dedicated/acme")
    assert bench.host.node_group == "", "the shared sequence still runs"
    assert not bench.host.takes(DIGEST)
    reader.stream.start(2, bench.spec())
    reader.stream.start(3, replace(bench.spec(tenant="acme"), node_group="dedicated/acme"))
    reader.read()
    assert set(reader.refused) == {2, 3}
    bench.stepped({1: A}, finished={1: "length"})
    bench.host.assign_group("dedicated/acme")
    assert bench.host.node_group == "dedicated/acme"
    assert bench.host.takes(DIGEST)
