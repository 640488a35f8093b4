"""Templates and the text of values in them. Every value is escaped: no template marks any text as safe."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fairway import timelines

FOLDER: Final = Path(__file__).parent
_SPANS: Final = (("d", 86_400), ("h", 3600), ("m", 60))
_SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_COUNTS: Final = ((1e9, "G"), (1e6, "M"), (1e4, "k"))
STAGES: Final = tuple(name.replace(" ", "_") for name in timelines.STAGES)  # fields of StageClock


def span(value: float | Duration) -> str:
    """Return a time as `340 µs`, `12 ms`, `3.4 s`, `5m 10s` or `2d 3h`."""
    seconds = value.seconds + value.nanos / 1e9 if isinstance(value, Duration) else float(value)
    if seconds < 0:
        return f"-{span(-seconds)}"
    if seconds < 60:
        if seconds >= 10:
            return f"{seconds:.0f} s"
        if seconds >= 1:
            return f"{seconds:.1f} s"
        return f"{seconds * 1e3:.0f} ms" if seconds >= 1e-3 or not seconds else f"{seconds * 1e6:.0f} µs"
    left = round(seconds)
    shown: list[str] = []
    for unit, size_s in (*_SPANS, ("s", 1)):
        if left >= size_s or shown:
            shown.append(f"{left // size_s}{unit}")
            left %= size_s
    return " ".join(part for part in shown[:2] if not part.startswith("0"))


def size(count: float) -> str:
    """Return bytes in the largest binary unit that leaves at least one."""
    for unit in _SIZES:
        if count < 1024 or unit == _SIZES[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def number(value: float) -> str:
    """Return a count with thin spaces, from ten thousand on in thousands, millions or billions."""
    for least, unit in _COUNTS:
        if abs(value) >= least:
            return f"{value / (least if unit != 'k' else 1e3):.3g} {unit}"
    return f"{value:,.0f}".replace(",", "\u2009") if value == int(value) else f"{value:.3g}"


def percent(ratio: float) -> str:
    shown = ratio * 100
    return f"{shown:.0f} %" if abs(shown) >= 10 or not shown else f"{shown:.2g} %"


def money(micros: int) -> str:
    amount = micros / 1e6
    return f"{amount:,.2f}" if not amount or abs(amount) >= 0.01 else f"{amount:.6f}"


def digest(text: str) -> str:
    return text.removeprefix("sha256:")[:12]


def moment(value: Timestamp | float) -> str:
    """Return a time in UTC, in the form of the attribute `datetime`."""
    seconds = value if isinstance(value, float) else value.seconds + value.nanos / 1e9
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def named(message: Any, field: str) -> str:
    """Return the value of an enum's field as people read it: `rolling back`; empty for none."""
    kind = message.DESCRIPTOR.fields_by_name[field].enum_type
    value = kind.values_by_number.get(getattr(message, field))
    if value is None:
        return str(getattr(message, field))  # This server is older than the one that wrote the value.
    prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.name).upper() + "_"
    text = value.name.removeprefix(prefix).lower().replace("_", " ")
    return "" if text == "unspecified" else text


def stages(stages_us: Any) -> list[tuple[str, float]]:
    """Return the stages of a finished request with their seconds."""
    return [(name, us / 1e6) for name, us in zip(STAGES, stages_us, strict=False)]


class View:
    """Renders the templates of this package."""

    def __init__(self, unix_s: Callable[[], float]) -> None:
        self._unix_s = unix_s
        self._environment = Environment(
            loader=FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        filters = (span, size, number, percent, money, digest, moment, named, stages)
        self._environment.filters.update({each.__name__: each for each in filters})
        self._environment.filters["ago"] = self._ago
        self._environment.globals["stages"] = STAGES
        self._environment.globals["p"] = self._environment.get_template("parts.html").module

    def page(self, template: str, context: Mapping[str, Any]) -> str:
        return self._environment.get_template(template).render(context)

    def part(self, template: str, context: Mapping[str, Any]) -> str:
        """Return the block ``live`` of a page alone: what an open page replaces."""
        found = self._environment.get_template(template)
        return "".join(found.blocks["live"](found.new_context(dict(context))))

    def _ago(self, value: Timestamp | float) -> str:
        seconds = value if isinstance(value, float) else value.seconds + value.nanos / 1e9
        passed_s = round(self._unix_s() - seconds)
        return span(passed_s) if passed_s > 0 else "0 s"
