"""A report as one HTML file that needs nothing else: no script, no font, no request to any host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from simulator.lab.report.page_style import STYLE
from simulator.lab.report.report import Point, Report, Row
from simulator.lab.report.scale import Axis, number
from simulator.lab.report.svg import Line, Span, bar_plot, line_plot
from simulator.lab.report.table import seconds

TIME = Axis("seconds", least=0.0)


def page(report: Report) -> str:
    """Return the page. Same report, same text."""
    header = report.header
    title = f"{header.scenario} on {header.workers} workers"
    body = "".join((*_head(report), *_tiles(report), *_plots(report), *_tables(report)))
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"/><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"/><style>{STYLE}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def _head(report: Report) -> Iterator[str]:
    header = report.header
    yield f"<h1>{escape(header.scenario)}</h1><p>{escape(header.summary)}</p>"
    facts = (
        f"{header.workers} workers ({header.preset})",
        f"seed {header.seed}",
        f"{header.duration_s:g} s of load",
        f"good: first token within {seconds(report.slo.ttft_s)}, then {seconds(report.slo.tpot_s)} a token",
        *(f"{mark.name}: {mark.from_s:g} to {mark.to_s:g} s" for mark in header.marks),
        *header.notes,
    )
    yield f'<p class="facts">{" · ".join(escape(fact) for fact in facts)}</p>'
    if report.violations:
        items = "".join(f"<li>{escape(violation)}</li>" for violation in report.violations)
        yield f'<section class="bad"><h2>Violated invariants</h2><ul>{items}</ul></section>'


def _tiles(report: Report) -> Iterator[str]:
    total, fair = report.total, report.fairness
    refused = sum(count for reason, count in total.ended_by.items() if reason != "finished")
    tiles = (
        ("requests", number(total.sent), f"{number(refused)} not finished"),
        ("goodput", f"{total.good_per_s:.2f}/s", f"{_percent(total.good, total.sent)} of all"),
        (
            "TTFT",
            seconds(total.ttft_s.p50),
            f"p95 {seconds(total.ttft_s.p95)}, p99 {seconds(total.ttft_s.p99)}",
        ),
        ("ITL", seconds(total.itl_s.p50), f"p95 {seconds(total.itl_s.p95)}, p99 {seconds(total.itl_s.p99)}"),
        ("cache", f"{report.cache_hit_ratio:.0%}", "of prompt tokens"),
        ("busy", f"{report.busy_ratio:.0%}", "of the workers' time"),
        ("Jain index", "-" if fair.jain_mean is None else f"{fair.jain_mean:.3f}", f"{fair.windows} windows"),
    )
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(more)}</dd></div>"
        for name, value, more in tiles
    )
    yield f'<dl class="tiles">{cells}</dl>'


def _plots(report: Report) -> Iterator[str]:
    series = report.series
    spans = [Span(mark.name, mark.from_s, mark.to_s) for mark in report.header.marks]
    least_s = min((at for points in series.ttft_cdf.values() for at, _ in points if at > 0), default=0.001)
    lines = _lines(series.ttft_cdf)
    share = Axis("share of requests", least=0.0, most=1.0)
    plot = line_plot(lines, Axis("seconds", log=True, least=least_s), share, label="Time to first token")
    yield '<div class="plots">'
    yield _figure("Time to first token, cumulative", plot, lines)
    lines = _lines({"arrivals": series.arrivals_per_s, "ended without a token": series.refusals_per_s})
    plot = line_plot(lines, TIME, Axis("per second", least=0.0), label="Arrivals", spans=spans)
    yield _figure("Arrivals and refusals", plot, lines)
    plot = line_plot(
        _lines({"waiting": series.waiting}), TIME, Axis("requests", least=0.0), label="Queue", spans=spans
    )
    yield _figure("Requests that wait for a place", plot)
    plot = line_plot(
        _lines({"tokens": series.tokens_per_s}),
        TIME,
        Axis("tokens/s", least=0.0),
        label="Tokens",
        spans=spans,
    )
    yield _figure("Output tokens per second", plot)
    pressure = Axis("0 to 1", least=0.0, most=1.0)
    lines = _lines({"pressure": series.pressure, "KV reserved, all workers": series.kv_ratio})
    plot = line_plot(lines, TIME, pressure, label="Pressure", spans=spans)
    yield _figure("Pressure and KV", plot, lines)
    lines = _lines(series.service, first_colour=1)
    plot = line_plot(lines, TIME, Axis("weighted tokens", least=0.0), label="Service", spans=spans)
    yield _figure("Service per tenant, cumulative", plot, lines)
    busy = Axis("share of time", least=0.0, most=1.0)
    lines = _lines(dict(list(series.busy.items())[:10]))
    plot = line_plot(lines, TIME, busy, label="Utilisation over time", spans=spans)
    yield _figure("Utilisation over time" + (" (first ten)" if len(series.busy) > 10 else ""), plot, lines)
    mean = 1 / len(report.workers) if report.workers else None
    bars = [(worker.name, worker.share_ratio) for worker in report.workers]
    plot = bar_plot(bars, Axis("share of tokens", least=0.0), label="Share of tokens", mark=mean)
    yield _figure("Share of computed tokens per worker (dashed: equal shares)", plot)
    yield "</div>"


def _lines(series: dict[str, list[Point]], *, first_colour: int = 0) -> list[Line]:
    """A tenant has one colour in all plots: "all" comes first where it stands, and has the first."""
    return [Line(name, points, colour) for colour, (name, points) in enumerate(series.items(), first_colour)]


def _figure(title: str, plot: str, lines: Sequence[Line] = ()) -> str:
    names = "".join(f'<li class="c{line.colour % 10}">{escape(line.name)}</li>' for line in lines)
    legend = f"<ul>{names}</ul>" if len(lines) > 1 else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{plot}{legend}</figure>"


def _tables(report: Report) -> Iterator[str]:
    head = (
        "tenant", "class", "sent", "finished", "good", "good/s", "TTFT p50", "p95", "p99", "ITL p50", "p95",
        "TPOT p50", "p95", "queue p50", "p95", "prompt tokens", "cached", "output tokens", "resumed",
    )  # fmt: skip
    rows = [_cells(row) for row in (report.total, *report.rows)]
    yield f"<h2>Per tenant and class</h2>{_table(head, rows, left=2)}"
    reasons = [(reason, f"{count:,}") for reason, count in report.total.ended_by.items()]
    ended = _table(("outcome", "requests"), reasons)
    yield f'<div class="side"><div><h2>How requests ended</h2>{ended}</div>'
    fair = report.fairness
    rows = [
        ("Jain index, mean", "-" if fair.jain_mean is None else f"{fair.jain_mean:.4f}"),
        ("Jain index, least", "-" if fair.jain_least is None else f"{fair.jain_least:.4f}"),
        ("windows compared", f"{fair.windows}"),
        ("largest service difference", f"{fair.difference_tokens:,.0f}"),
        ("between", " and ".join(fair.pair) if fair.pair else "-"),
        ("bound", "-" if report.fairness_bound_tokens is None else f"{report.fairness_bound_tokens:,.0f}"),
        *((name, "-" if value is None else f"{value:.4g}") for name, value in report.figures.items()),
    ]
    yield f"<div><h2>Fairness and more</h2>{_table(('figure', 'value'), rows)}</div>"
    workers = [(each.name, f"{each.busy_ratio:.1%}", f"{each.share_ratio:.2%}") for each in report.workers]
    yield f"<div><h2>Workers</h2>{_table(('worker', 'busy', 'share of tokens'), workers[:64])}</div></div>"
    yield (
        f'<p class="facts">Quantiles are within {report.error_ratio:.0%} of a measured value. Digest of this '
        f"report: {report.digest[:16]}; of the run's events: {escape(report.trace_digest[:16]) or '-'}</p>"
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.tenant, row.priority,
        f"{row.sent:,}", f"{row.finished:,}", f"{row.good:,}", f"{row.good_per_s:.2f}",
        seconds(row.ttft_s.p50), seconds(row.ttft_s.p95), seconds(row.ttft_s.p99),
        seconds(row.itl_s.p50), seconds(row.itl_s.p95), seconds(row.tpot_s.p50), seconds(row.tpot_s.p95),
        seconds(row.queue_s.p50), seconds(row.queue_s.p95), f"{row.prompt_tokens:,}",
        _percent(row.cached_tokens, row.prompt_tokens), f"{row.output_tokens:,}", f"{row.resumes:,}",
    )  # fmt: skip


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    titles = "".join(_cell(title, at < left, "th") for at, title in enumerate(head))
    lines = "".join(
        f"<tr>{''.join(_cell(cell, at < left) for at, cell in enumerate(row))}</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>'


def _cell(text: str, named: bool, kind: str = "td") -> str:
    opening = f'<{kind} class="name">' if named else f"<{kind}>"
    return f"{opening}{escape(text)}</{kind}>"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"
