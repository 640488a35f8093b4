"""A store keeps what was measured, reports what it cannot read, and never compares unequal conditions."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.store.comparing import compare, latest_pair
from bench.store.machine import fingerprint, versions
from bench.store.page import TEMPLATE
from bench.store.plot import picture
from bench.store.records import (
    MAX_RECORD_BYTES,
    BenchMachine,
    BenchRecord,
    BenchStore,
    StoreError,
    differences,
)
from bench.store.suites import BenchSuite, parameters_of, suite_named, suites_of

BEGAN = datetime(2026, 12, 1, tzinfo=UTC)
MACHINE = BenchMachine(cpu="A", cores=2, memory_gib=8.0, os="Debian", python="CPython 3.11.7")
SERIES = [10.0, 10.5, 9.5, 10.2, 9.8, 10.1]


def record(number: int = 0, values: list[float] | None = None, **fields: Any) -> BenchRecord:
    """Return a record of one figure, a start per value."""
    began = BEGAN + timedelta(days=number)
    given: dict[str, Any] = {
        "schema": 1,
        "id": f"overhead-{number}",
        "suite": "overhead",
        "command": "python -m bench.overhead",
        "began": began,
        "ended": began,
        "machine": MACHINE,
        "versions": {"fairway": f"{number:012x}"},
        "better": {"rate": "higher"},
        "runs": [{"rate": [value]} for value in values or SERIES],
    }
    return BenchRecord(**given | fields)


def test_records_are_read_back_as_they_were_appended(tmp_path: Path) -> None:
    store = BenchStore(tmp_path / "new" / "store")
    for number in range(3):
        store.append(record(number, parameters={"workers": "16"}, load_before=0.5, session="s"))
    store.append(record(7, suite="idle", id="idle-7"))
    read = BenchStore(tmp_path / "new" / "store")
    assert read.problems == []
    assert read.records == store.records
    assert sorted(path.name for path in read.folder.iterdir()) == ["idle.jsonl", "overhead.jsonl"]


def test_a_record_cut_by_a_crash_is_reported_and_costs_no_other(tmp_path: Path) -> None:
    store = BenchStore(tmp_path)
    path = store.append(record(0))
    store.append(record(1))
    content = path.read_bytes()
    path.write_bytes(content[:-40])
    cut = BenchStore(tmp_path)
    assert [each.id for each in cut.records] == ["overhead-0"]
    assert len(cut.problems) == 1
    assert cut.problems[0].startswith("overhead.jsonl, line 2: it is cut after")
    cut.append(record(2))
    after = BenchStore(tmp_path)
    assert [each.id for each in after.records] == ["overhead-0", "overhead-2"]
    assert len(after.problems) == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"schema": 2, "id": "later-1", "curve": []}', "its schema is 2, this version reads 1"),
        (msgspec.json.encode(record(5)).replace(b'"suite"', b'"sweet"'), "unknown field `sweet`"),
        (msgspec.json.encode(record(5, suite="../a")), "matching regex"),
        (msgspec.json.encode(record(5)).replace(b'"rate":[10.0]', b'"rate":["fast"]'), "Expected `float`"),
        (msgspec.json.encode(record(5)).replace(b"10.0", b"NaN"), "malformed"),
        (msgspec.json.encode(record(5)).replace(b"rate", b"../rate"), "matching regex"),
        (msgspec.json.encode(record(5, runs=[])), "neither runs nor figures"),
        (msgspec.json.encode(record(5, ended=BEGAN)), "it ended before it began"),
        (msgspec.json.encode(record(0)), "a second record with id overhead-0"),
        (b'{"note": "' + b"x" * MAX_RECORD_BYTES + b'"}', "bytes, more than"),
        (b"\xff\xfe{}", "malformed"),
    ],
)
def test_a_line_that_is_no_record_is_named_and_skipped(tmp_path: Path, line: bytes, problem: str) -> None:
    path = BenchStore(tmp_path).append(record(0))
    with path.open("ab") as file:
        file.write(line + b"\n" + msgspec.json.encode(record(9)) + b"\n")
    store = BenchStore(tmp_path)
    assert [each.id for each in store.records] == ["overhead-0", "overhead-9"]
    assert len(store.problems) == 1
    assert problem in store.problems[0]


def test_a_record_that_no_reader_takes_is_not_appended(tmp_path: Path) -> None:
    store = BenchStore(tmp_path)
    with pytest.raises(StoreError, match="neither runs nor figures"):
        store.append(record(runs=[]))
    with pytest.raises(StoreError, match="more than"):
        store.append(record(runs=[{f"figure-{n}": [1.5] * 4000 for n in range(20)}]))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="is no folder"):
        BenchStore(tmp_path / "file")
    with pytest.raises(StoreError, match="Not a directory"):
        BenchStore(tmp_path / "file" / "below").append(record())


OTHER = [
    ({"machine": msgspec.structs.replace(MACHINE, cpu="B")}, "machine.cpu"),
    ({"machine": msgspec.structs.replace(MACHINE, memory_limit_gib=4.0)}, "machine.memory_limit_gib"),
    ({"machine": msgspec.structs.replace(MACHINE, python="CPython 3.12.1")}, "machine.python"),
    ({"machine": msgspec.structs.replace(MACHINE, state="shared")}, "machine.state"),
    ({"device": "cuda: H200, 580"}, "device"),
    ({"parameters": {"workers": "16"}}, "parameters.workers"),
    ({"suite": "idle"}, "suite"),
    ({"command": "python -m bench.overhead compare"}, "command"),
]


@pytest.mark.parametrize(("fields", "name"), OTHER)
def test_unequal_conditions_are_refused_by_name(fields: dict[str, Any], name: str) -> None:
    a, b = record(0), record(1, **fields)
    assert list(differences(a, b)) == [name]
    with pytest.raises(StoreError, match=name):
        compare(a, b)


def test_a_field_that_is_unknown_equals_nothing() -> None:
    unknown = msgspec.structs.replace(MACHINE, os=None)
    assert list(differences(record(0, machine=unknown), record(1, machine=unknown))) == ["machine.os"]
    assert list(differences(record(0, device="cuda"), record(1, device="cuda"))) == ["device"]
    gpu = "cuda: H200, 580"
    assert differences(record(0, device=gpu), record(1, device=gpu)) == {}


def test_a_series_has_the_records_that_may_be_compared(tmp_path: Path) -> None:
    unknown = msgspec.structs.replace(MACHINE, cpu=None)
    store = BenchStore(tmp_path)
    for number, machine in enumerate((unknown, MACHINE, unknown, MACHINE)):
        store.append(record(number, machine=machine))
    found = [[each.id for each in store.series("overhead", "rate", like)] for like in store.records[2:]]
    assert found == [["overhead-2"], ["overhead-1", "overhead-3"]]


def test_committed_records_of_one_command_are_comparable() -> None:
    store = BenchStore(TEMPLATE.parent)
    a, b = store.named("serving-20261130T220957"), store.named("serving-20261130T221101")
    assert differences(a, b) == {}


def test_a_published_figure_without_samples_takes_no_part() -> None:
    old = record(0, runs=[], figures={"rate": 9.0})
    assert old.figure("rate") == 9.0
    with pytest.raises(StoreError, match="no raw samples"):
        compare(old, record(1))


@pytest.mark.parametrize(
    ("factor", "better", "verdict"),
    [
        (1.3, "higher", "better"),
        (0.7, "higher", "worse"),
        (1.3, "lower", "worse"),
        (1.3, None, "changed"),
        (1.0, "higher", "no difference"),
    ],
)
def test_verdicts(factor: float, better: str | None, verdict: str) -> None:
    directions = {"better": {"rate": better} if better else {}}
    b = record(1, [value * factor for value in SERIES], **directions)
    (found,) = compare(record(0), b).figures
    assert found.verdict == verdict
    assert (found.values, found.of) == (6, "starts")
    assert found.low is not None
    assert found.low <= found.change <= found.high  # type: ignore[operator]


def test_few_values_get_no_verdict_and_rounds_of_one_start_a_warning() -> None:
    few = compare(record(0, SERIES[:3]), record(1, [1.0, 1.0, 1.0]))
    assert [(each.verdict, each.change) for each in few.figures] == [("too few values", None)]
    rounds = compare(record(0, runs=[{"rate": SERIES}]), record(1, runs=[{"rate": SERIES}]))
    assert rounds.figures[0].of == "rounds"
    assert any("rounds of one start" in each for each in rounds.warnings)


def test_an_unbounded_interval_is_json() -> None:
    few = [1.0, 1.0, 1.0, 1.0, 2.0]
    document = compare(record(0, few), record(1, [2.0, 2.0, 2.0, 2.0, 2.0])).document()
    (found,) = json.loads(json.dumps(document, allow_nan=False))["figures"]
    assert None in (found["low"], found["high"])


def test_starts_of_one_session_are_compared_in_pairs() -> None:
    """What both sides share, such as a machine that slows down, is in neither side's favour."""
    slowing = [10.0 / (1 + n) for n in range(8)]
    pairs: dict[str, Any] = {"session": "overhead-1-ab"}
    a, b = record(0, slowing, **pairs), record(1, [value * 1.1 for value in slowing], **pairs)
    found = compare(a, b)
    assert found.paired
    assert found.figures[0].verdict == "better"
    apart = compare(record(0, slowing), record(1, [value * 1.1 for value in slowing]))
    assert apart.figures[0].verdict == "no difference"


def test_a_busy_machine_and_changed_files_are_named() -> None:
    found = compare(record(0, load_before=3.0), record(1, versions={"fairway": "abc+changes"}))
    assert [each.split(": ")[1] for each in found.warnings] == [
        "the machine was busy",
        "its files differed from its commit",
    ]


def test_the_newest_pair_has_equal_conditions(tmp_path: Path) -> None:
    store = BenchStore(tmp_path)
    others: tuple[dict[str, Any], ...] = ({}, {"device": "cuda"}, {})
    for number, fields in enumerate(others):
        store.append(record(number, **fields))
    assert [each.id for each in latest_pair(store, "overhead")] == ["overhead-0", "overhead-2"]
    store.append(record(3, parameters={"x": "1"}))
    with pytest.raises(StoreError, match="no two records"):
        latest_pair(store, "overhead")


def test_a_record_is_named_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    store = BenchStore(tmp_path)
    for number in (1, 10, 2):
        store.append(record(number))
    assert store.named("overhead-2").id == "overhead-2"
    assert store.named("overhead-1").id == "overhead-1"  # an id itself, though it begins another
    with pytest.raises(StoreError, match="3 records begin with 'over'"):
        store.named("over")
    with pytest.raises(StoreError, match="no record begins with 'idle'"):
        store.named("idle")


def test_a_picture_has_each_value_and_change_and_no_markup_of_names() -> None:
    figure = 'rate"<script>'
    runs = [[{figure: [n + 1.0, n + 2.0]}] for n in range(4)]
    records = [record(n, runs=run, versions={"fairway": "<b>"}) for n, run in enumerate(runs)]
    drawn = picture(figure, records, [2])
    assert drawn.count("<circle") == 4
    assert drawn.count('class="change"') == 1
    assert "<script>" not in drawn
    assert "<b>" not in drawn


def test_the_fingerprint_reads_limits_and_governor(tmp_path: Path) -> None:
    texts = {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU\n",
        "proc/meminfo": "MemTotal:        8123456 kB\n",
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
        "sys/fs/cgroup/a/b/memory.max": "2147483648\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
        "etc/os-release": 'NAME=x\nPRETTY_NAME="An OS 1"\n',
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = fingerprint("shared", root=tmp_path)
    assert (found.cpu, found.memory_gib, found.governor, found.state) == (
        "Some CPU",
        7.5,
        "performance",
        "shared",
    )
    assert (found.cpu_limit, found.memory_limit_gib) == (1.5, 2.0)
    assert found.os is not None
    assert found.os.startswith("An OS 1, kernel ")


def test_a_processor_without_a_name_is_known_by_its_codes(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    path = tmp_path / "proc/cpuinfo"
    path.write_text("processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n")
    assert fingerprint(root=tmp_path).cpu == "implementer 0x41, part 0xd0c"
    path.write_text("processor\t: 0\n")
    assert fingerprint(root=tmp_path).cpu is None


def test_an_old_cgroup_without_limits_has_none(tmp_path: Path) -> None:
    for name, text in (
        ("cpu/cpu.cfs_quota_us", "-1"),
        ("memory/memory.limit_in_bytes", "9223372036854771712"),
    ):
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    found = fingerprint(root=tmp_path)
    assert (found.cpu_limit, found.memory_limit_gib, found.governor, found.memory_gib) == (
        None,
        None,
        None,
        None,
    )


def test_this_machine_is_equal_to_itself() -> None:
    assert fingerprint() == fingerprint()
    found = versions(Path(__file__).parents[3])
    assert {"fairway", "numpy", "grpcio"} <= found.keys()
    assert versions(Path("/"))["fairway"] == "unknown"


def test_variants_are_the_combinations_and_a_given_value_replaces_them() -> None:
    suite = BenchSuite(module="m", parameters={"batch_size": [1, 8], "fast": [True, False]}, lower=["*_ms"])
    assert suite.variants({}) == [
        ["--batch-size", "1", "--fast"],
        ["--batch-size", "1"],
        ["--batch-size", "8", "--fast"],
        ["--batch-size", "8"],
    ]
    assert suite.variants({"batch_size": ["2"], "fast": ["x"]}, ["--more"]) == [
        ["--batch-size", "2", "--fast", "x", "--more"]
    ]
    assert suite.better(["a_ms", "rate"]) == {"a_ms": "lower"}
    with pytest.raises(StoreError, match="more than 100 variants"):
        msgspec.structs.replace(suite, parameters={"n": list(range(101))}).variants({})


def test_parameters_are_those_of_the_command_line() -> None:
    given = ["one", "--workers", "16", "256", "--only=redis", "--quick"]
    assert parameters_of(given) == {"arguments": "one", "workers": "16 256", "only": "redis", "quick": ""}


def test_a_bad_file_of_suites_is_named(tmp_path: Path) -> None:
    path = tmp_path / "suites.toml"
    for text, problem in (
        ("[a]\nmodule = 'm'\nfaster = []", "unknown field `faster`"),
        ("[a]\nmodule = 'rm -rf'", "matching regex"),
        ("['a b']\nmodule = 'm'", "matching regex"),
        ("[a", "Expected"),
    ):
        path.write_text(text)
        with pytest.raises(StoreError, match=problem):
            suites_of(path)
    with pytest.raises(StoreError, match="there is no suite 'nothing'"):
        suite_named("nothing")


def test_each_target_of_the_makefile_has_its_suite() -> None:
    text = (Path(__file__).parents[3] / "Makefile").read_text()
    named = {line.split()[1] for line in text.splitlines() if line.startswith("\t$(BENCH) ")}
    assert len(named) > 15
    assert named <= suites_of().keys()
