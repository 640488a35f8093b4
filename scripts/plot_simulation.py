"""Plots a simulation's report, or panels that a benchmark wrote.

    python scripts/plot_simulation.py report/report.json report.png

Needs matplotlib, which Fairway does not install: `python -m pip install matplotlib` in any environment. The
ending of the second file selects the format. Exit code 2 for wrong input, with the reason.

Input: the report.json of `fairway simulate --out`, or {"panels": [...]}. A panel is an object with title, x
and y (labels), lines (name to [[x, y], ...]; y null for a gap) or bars (name to value), and optionally log_x,
log_y, most_y (upper end of the axis) and spans ([[name, from, to], ...], shaded).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

Panel = dict[str, Any]
EXIT_USAGE: Final = 2
MOST_LINES: Final = 10
TIME: Final = "seconds"


def panels_of(report: dict[str, Any]) -> list[Panel]:
    """Return the panels of a report. Raises KeyError for another document."""
    if "panels" in report:
        return list(report["panels"])
    series = report["series"]
    spans = [[mark["name"], mark["from_s"], mark["to_s"]] for mark in report["header"]["marks"]]
    arrivals = {"arrivals": series["arrivals_per_s"], "ended without a token": series["refusals_per_s"]}
    pressure = {"pressure": series["pressure"], "KV reserved, all workers": series["kv_ratio"]}
    busy = dict(list(series["busy"].items())[:MOST_LINES])
    shares = {worker["name"]: worker["share_ratio"] for worker in report["workers"]}
    over_time = [
        ("Arrivals and refusals", "per second", arrivals),
        ("Requests that wait for a place", "requests", {"waiting": series["waiting"]}),
        ("Output tokens per second", "tokens/s", {"tokens": series["tokens_per_s"]}),
        ("Pressure and KV", "0 to 1", pressure),
        ("Service per tenant, cumulative", "weighted tokens", series["service"]),
        (f"Utilisation of up to {MOST_LINES} workers", "share of time", busy),
    ]
    return [
        {
            "title": "Time to first token, cumulative",
            "x": TIME,
            "y": "share of requests",
            "log_x": True,
            "most_y": 1.0,
            "lines": series["ttft_cdf"],
        },
        *(
            {"title": title, "x": TIME, "y": y, "lines": lines, "spans": spans}
            for title, y, lines in over_time
        ),
        {"title": "Share of computed tokens per worker", "x": "", "y": "share of tokens", "bars": shares},
    ]


def draw(panels: Sequence[Panel], title: str, target: Path) -> None:
    """Write the panels as one picture. Raises ImportError without matplotlib, ValueError for the format."""
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(7.0 * columns, 3.4 * rows), layout="constrained")
    figure.suptitle(title)
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        axes.set(title=panel["title"], xlabel=panel["x"], ylabel=panel["y"])
        for name, points in panel.get("lines", {}).items():
            xs, ys = [at for at, _ in points], [float("nan") if y is None else y for _, y in points]
            axes.plot(xs, ys, label=name, linewidth=1.2)
        if "bars" in panel:
            axes.bar(list(panel["bars"]), list(panel["bars"].values()))
            axes.tick_params(axis="x", labelrotation=90, labelsize="small")
        for name, from_x, to_x in panel.get("spans", ()):
            axes.axvspan(from_x, to_x, alpha=0.15, color="grey", label=name)
        if panel.get("log_x"):
            axes.set_xscale("log")
        if panel.get("log_y"):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0.0, top=panel.get("most_y"))
        if len(panel.get("lines", {})) > 1 or panel.get("spans"):
            axes.legend(fontsize="small")
    figure.savefig(target)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print("usage: python scripts/plot_simulation.py REPORT.json PICTURE.png|svg|pdf", file=sys.stderr)
        return EXIT_USAGE
    source, target = Path(arguments[0]), Path(arguments[1])
    try:
        report = json.loads(source.read_text(encoding="utf-8"))
        panels = panels_of(report)
        draw(panels, report.get("header", {}).get("scenario", source.stem), target)
    except ImportError:
        print("error: plots need matplotlib; next: python -m pip install matplotlib", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename or target}: {error.strerror}", file=sys.stderr)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__} {error}"
        print(
            f"error: {source} is no report of a simulation, or {target} no picture: {reason}", file=sys.stderr
        )
    else:
        return 0
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
