"""A report as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from simulator.lab.report.report import LabReport, Row
from simulator.lab.report.seconds import Second

MAX_ROWS: Final = 24
HEAD: Final = (
    "tenant", "class", "sent", "done", "good", "good/s",
    "TTFT p50", "p95", "p99", "ITL p50", "p95", "TPOT p50", "queue p95", "cached",
)  # fmt: skip


def text(report: LabReport) -> str:
    """Return the whole report, without its series."""
    header = report.header
    lines = [
        f"{header.scenario}: {header.summary}",
        f"{header.workers} workers ({header.preset}), seed {header.seed}, {header.duration_s:g} s of load, "
        f"{report.simulated_s:.1f} s simulated",
        f"good: first token within {seconds(report.slo.ttft_s)}, then {seconds(report.slo.tpot_s)} a token; "
        f"quantiles are within {report.error_ratio:.0%} of a measured value",
        *header.notes,
        "",
        *aligned([HEAD, *(_cells(row) for row in (report.total, *report.rows[:MAX_ROWS]))]),
    ]
    if len(report.rows) > MAX_ROWS:
        lines.append(f"... and {len(report.rows) - MAX_ROWS} more in report.json")
    if report.seconds:
        lines += [
            "",
            *aligned([_second_head(report.seconds[0]), *map(_second_cells, report.seconds)], left=0),
        ]
    return "\n".join([*lines, "", *_facts(report)]) + "\n"


def aligned(rows: Sequence[Sequence[str]], *, left: int = 2) -> Iterator[str]:
    """Yield the rows with columns of equal width; the first ``left`` are flush left, the others right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def seconds(value: float | None) -> str:
    """Return a time for reading: milliseconds below one second; a dash for None."""
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 0.9995 else f"{value:.2f} s"


def _cells(row: Row) -> tuple[str, ...]:
    cached = row.cached_tokens / row.prompt_tokens if row.prompt_tokens else 0.0
    return (
        row.tenant, row.priority, str(row.sent), str(row.finished), str(row.good), f"{row.good_per_s:.2f}",
        seconds(row.ttft_s.p50), seconds(row.ttft_s.p95), seconds(row.ttft_s.p99),
        seconds(row.itl_s.p50), seconds(row.itl_s.p95), seconds(row.tpot_s.p50), seconds(row.queue_s.p95),
        f"{cached:.0%}",
    )  # fmt: skip


def _second_head(row: Second) -> tuple[str, ...]:
    names = (f"{one.priority} {what}" for one in row.classes for what in ("sent", "failed", "TTFT p95"))
    return ("second", "ready", "wanted", *names)


def _second_cells(row: Second) -> tuple[str, ...]:
    cells = ((str(one.sent), str(one.failed), seconds(one.ttft_p95_s)) for one in row.classes)
    return (f"{row.at_s:+d}", str(row.ready), str(row.wanted), *(cell for found in cells for cell in found))


def _facts(report: LabReport) -> Iterator[str]:
    ended_by = [f"{reason} {count}" for reason, count in report.total.ended_by.items()]
    yield f"ended by: {', '.join(ended_by) or '-'}"
    fair = report.fairness
    if fair.jain_mean is None or fair.jain_least is None:
        yield "fairness: no two tenants of a class waited at the same time for long enough to compare"
    else:
        least = f"least {fair.jain_least:.3f}, {fair.windows} windows"
        yield f"fairness: Jain index {fair.jain_mean:.3f} ({least})"
    if fair.pair is not None:
        bound = report.fairness_bound_tokens
        said = f", bound {bound:,.0f}" if bound is not None else ""
        between = " and ".join(fair.pair)
        yield f"largest service difference: {fair.difference_tokens:,.0f} weighted tokens ({between}){said}"
    yield f"cache: {report.cache_hit_ratio:.1%} of prompt tokens"
    if report.workers:
        busy = [worker.busy_ratio for worker in report.workers]
        shares = [worker.share_ratio for worker in report.workers]
        yield f"workers: busy {report.busy_ratio:.0%} on average ({min(busy):.0%} to {max(busy):.0%})"
        yield f"share of tokens per worker: {min(shares):.1%} to {max(shares):.1%}"
    for name, value in report.figures.items():
        yield f"{name}: {'-' if value is None else f'{value:.4g}'}"
    for mark in report.header.marks:
        yield f"{mark.from_s:g} to {mark.to_s:g} s: {mark.name}"
    for violation in report.violations:
        yield f"VIOLATION {violation}"
