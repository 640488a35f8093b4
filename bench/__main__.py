"""``python -m bench``, which `fairway bench` calls: run suites, keep, compare and plot their records."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.store.comparing import METHOD, Comparison, compare, latest_pair
from bench.store.plot import picture
from bench.store.records import BenchRecord, BenchStore, StoreError
from bench.store.running import NOT_HERE, ROOT, SuiteSkipped, run_variant
from bench.store.statistics import change_points
from bench.store.suites import SHIPPED, suite_named, suites_of

COMMITTED: Final = ROOT / "bench" / "records"
USAGE: Final = 2


def main(arguments: Sequence[str]) -> int:
    """Run a command and return its exit status; an error is on stderr, with what to do next."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:split])
    try:
        if options.command == "run":
            return run(options, arguments[split + 1 :])
        store = BenchStore(options.store)
        for problem in store.problems:
            print(f"skipped: {problem}", file=sys.stderr)
        commands = {"list": list_records, "compare": compare_records, "plot": plot}
        return commands[options.command](store, options)
    except StoreError as error:
        print(f"error: {error}" + (f"; {error.next_step}" if error.next_step else ""), file=sys.stderr)
        return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    each = commands.add_parser("run", help="run a suite; arguments after -- go to its command")
    each.add_argument("suite")
    each.add_argument("--record", type=Path, help="folder of the store; without it nothing is kept")
    each.add_argument("--starts", type=int, help="starts of the command for one record")
    each.add_argument("--suites", type=Path, default=SHIPPED, help="file of suites")
    each.add_argument("--set", action="append", default=[], help="NAME=VALUE,VALUE: values of a parameter")
    each.add_argument("--beside", type=Path, help="another source tree, whose starts alternate with ours")
    each.add_argument("--state", help="what else the machine does, such as shared")
    for name, text in (
        ("list", "list the records"),
        ("compare", "compare two records"),
        ("plot", "draw a series and its changes"),
    ):
        each = commands.add_parser(name, help=text)
        each.add_argument("--store", type=Path, default=COMMITTED, help="folder of the store")
        each.add_argument("--output", "-o", choices=("table", "json"), default="table")
        if name == "list":
            each.add_argument("suite", nargs="?", default="")
        if name == "compare":
            each.add_argument("records", nargs="+", help="two ids, or one suite: its two newest records")
        if name == "plot":
            each.add_argument("suite")
            each.add_argument("figure", nargs="?", default="", help="default: each figure")
            each.add_argument("--out", type=Path, help="folder for pictures; without it none is drawn")
    return parser


def run(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Run every variant of a suite and keep a record of each."""
    suite = suite_named(options.suite, options.suites)
    starts = suite.starts if options.starts is None else options.starts
    if starts < 1:
        raise StoreError(f"{starts} starts", "give 1 or more")
    store = BenchStore(options.record) if options.record else None
    beside: Path | None = options.beside.resolve() if options.beside else None
    if beside is not None and not (beside / "bench").is_dir():
        raise StoreError(f"{beside} is no source tree of Fairway", "name a checkout")
    if beside == ROOT:
        raise StoreError(f"{beside} is the tree that runs", "name another checkout")
    pairs = [text.partition("=") for text in options.set]
    variants = suite.variants({name: values.split(",") for name, _, values in pairs}, given)
    measured = missed = 0
    # It is read once: before the second variant it would be the load of the first.
    load = os.getloadavg()[0]
    for arguments in variants:
        try:
            for record in run_variant(
                options.suite,
                suite,
                arguments,
                starts=starts,
                beside=beside,
                state=options.state,
                load=load,
            ):
                measured += 1
                missed += bool(record.note)
                if store is not None:
                    print(f"recorded {record.id} in {store.append(record)}", file=sys.stderr)
        except SuiteSkipped as error:
            print(f"SKIPPED {options.suite}: {error}", file=sys.stderr)
    return 1 if missed else (0 if measured else NOT_HERE)


def list_records(store: BenchStore, options: argparse.Namespace) -> int:
    found = [record for record in store.records if options.suite in ("", record.suite)]
    if options.output == "json":
        print(json.dumps({"records": [_row(record) for record in found]}))
        return 0
    if not found:
        whose = f" of {options.suite}" if options.suite else ""
        print(f"There are no records{whose} in {store.folder}.")
        print(
            f"`fairway bench run SUITE --record {store.folder}` makes one; suites: {', '.join(suites_of())}."
        )
        return 0
    columns = ("ID", "BEGAN", "COMMIT", "DEVICE", "STARTS", "VALUES", "PARAMETERS")
    rows = [[str(_row(record)[column.lower()]) for column in columns] for record in found]
    print(_table([list(columns), *rows]))
    return 0


def _row(record: BenchRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "suite": record.suite,
        "began": record.began.isoformat(timespec="minutes"),
        "commit": record.versions.get("fairway", "unknown"),
        "device": record.device,
        "starts": len(record.runs),
        "values": max((len(values) for run in record.runs for values in run.values()), default=0),
        "parameters": " ".join(f"--{name} {value}".strip() for name, value in record.parameters.items()),
        "figures": {name: record.figure(name) for name in record.names},
        "load_before": record.load_before,
    }


def compare_records(store: BenchStore, options: argparse.Namespace) -> int:
    if len(options.records) > 2:
        raise StoreError(f"{len(options.records)} records", "name two, or one suite")
    if len(options.records) == 1:
        found = compare(*latest_pair(store, options.records[0]))
    else:
        found = compare(store.named(options.records[0]), store.named(options.records[1]))
    print(json.dumps(found.document(), allow_nan=False) if options.output == "json" else _comparison(found))
    return 0


def _comparison(found: Comparison) -> str:
    """Return the table of a comparison, its method and its warnings."""
    rows = [["FIGURE", "A", "B", "CHANGE", "INTERVAL", "VERDICT"]]
    for each in found.figures:
        change, interval = "", ""
        if each.change is not None and each.low is not None and each.high is not None:
            if each.a:
                change, low, high = (
                    f"{100 * value / abs(each.a):+.1f}" for value in (each.change, each.low, each.high)
                )
                change, interval = f"{change} %", f"[{low}, {high}] %"
            else:
                change, interval = f"{each.change:+.3g}", f"[{each.low:+.3g}, {each.high:+.3g}]"
        verdict = f"{each.verdict} ({each.values} {each.of})"
        rows.append([each.name, f"{each.a:.5g}", f"{each.b:.5g}", change, interval, verdict])
    sides = [
        f"{side}  {record.id}  commit {record.versions.get('fairway', 'unknown')}"
        for side, record in (("A", found.a), ("B", found.b))
    ]
    differ = found.document()["versions"].items()
    versions = [f"{name}: {ours} and {theirs}" for name, (ours, theirs) in differ if name != "fairway"]
    method = f"method: {METHOD}, values {'in pairs of starts' if found.paired else 'not paired'}"
    return "\n".join(
        [*sides, *versions, "", _table(rows), "", method, *(f"warning: {each}" for each in found.warnings)]
    )


def plot(store: BenchStore, options: argparse.Namespace) -> int:
    """Print where each series changes, and draw it. The suite's newest record gives the conditions."""
    recorded = [record for record in store.records if record.suite == options.suite and record.runs]
    if not recorded:
        raise StoreError(
            f"{store.folder} has no record of {options.suite!r} with raw values",
            f"`fairway bench run {options.suite} --record {store.folder}` makes one",
        )
    newest = recorded[-1]
    measured = sorted({name for run in newest.runs for name in run})
    if options.figure and options.figure not in measured:
        raise StoreError(f"{newest.id} has no figure {options.figure!r}", f"use one of {', '.join(measured)}")
    documents = []
    for figure in [options.figure] if options.figure else measured:
        series = store.series(options.suite, figure, newest)
        changes = change_points([record.figure(figure) or 0.0 for record in series])
        document: dict[str, Any] = {
            "figure": figure,
            "records": [record.id for record in series],
            "values": [record.figure(figure) for record in series],
            "changes": [series[index].id for index in changes],
        }
        if options.out is not None:
            try:
                options.out.mkdir(parents=True, exist_ok=True)
                path = options.out / f"{options.suite}-{figure}.svg"
                path.write_text(picture(figure, series, changes), "utf-8")
            except OSError as error:
                raise StoreError(
                    f"{options.out}: {error.strerror}", "name a folder that can be written"
                ) from error
            document["picture"] = str(path)
        documents.append(document)
    if options.output == "json":
        print(json.dumps({"suite": options.suite, "series": documents}))
        return 0
    for each in documents:
        where = ", ".join(each["changes"]) or "none"
        print(
            f"{each['figure']}: {len(each['records'])} records, changes at: {where}"
            + f"; {each['picture']}" * ("picture" in each)
        )
    return 0


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
