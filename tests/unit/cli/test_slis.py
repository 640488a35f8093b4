"""Service level indicators in a table of 80 columns, and in a wide one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fairway.cli.commands.reliability import SLIS
from fairway.cli.terminal.table import table_of, visible
from fairway.v1 import common_pb2
from fairway.v1 import controlplane_pb2 as cp

FOUND = cp.SliSummary(
    model="chat",
    version_digest="sha256:" + "a" * 64,
    tenant="acme",
    priority=common_pb2.PRIORITY_INTERACTIVE,
    zone="eu-1a",
    requests=12345,
    errors=12,
    started=12300,
    broken=3,
    poisoned=1,
    output_tokens=1234567,
    device_s=8123.4,
    ttft_p50_s=0.0987,
    ttft_p95_s=0.4567,
    ttft_p99_s=12.345,
    itl_p50_s=0.0212,
    itl_p95_s=0.0345,
)
REFUSED = cp.SliSummary(
    model="chat", tenant="acme", priority=common_pb2.PRIORITY_STANDARD, requests=2, errors=2
)


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (
            80,
            [
                "MODEL  VERSION       CLASS        ZONE   REQUESTS  ERRORS  TTFT MS 50/95/99",
                "chat   aaaaaaaaaaaa  interactive  eu-1a  12345     12      98.7/457/12345",
                "chat   -             standard     -      2         2       -",
            ],
        ),
        (
            140,
            [
                "MODEL  VERSION       TENANT  CLASS        ZONE   REQUESTS  ERRORS  BROKEN   POISONED"
                "  TTFT MS 50/95/99  ITL MS 50/95  OUTPUT   DEVICE S",
                "chat   aaaaaaaaaaaa  acme    interactive  eu-1a  12345     12      3/12300  1       "
                "  98.7/457/12345    21.2/34.5     1234567  8123.4",
                "chat   -             acme    standard     -      2         2       0/0      0       "
                "  -                 -             0        0.0",
            ],
        ),
    ],
)
def test_the_table_fits(width: int, lines: list[str]) -> None:
    file = io.StringIO()
    columns = visible(SLIS.columns, wide=False)
    Console(file=file, width=width).print(table_of(columns, [FOUND, REFUSED], width=width))
    assert [line.rstrip() for line in file.getvalue().splitlines()] == lines
