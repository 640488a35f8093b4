"""Write docs/errors.md from the error tree, its statuses and the table of faults."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from services.core import errors
from services.core.faults import ERRORS, FINISHED, Fault
from services.gateway.faces.openai.errors import HttpProblem
from services.rpc.status import grpc_code, http_status

PAGE: Final = Path(__file__).parents[1] / "docs" / "errors.md"
_TITLES: Final = {
    Fault.OURS: "The platform's: they count against availability",
    Fault.CLIENT: "The client's, its tenant's limits included",
    Fault.NONE: "Nobody's",
}
_HEAD: Final = """\
# Errors

<!-- Made by `make error-page` from services/core/faults.py. Do not edit. -->

Every error has a `reason`: in ErrorInfo over gRPC, in lower case as `code` over HTTP (some have the name
that OpenAI's clients read). The reason also says whose fault it is. That is the label `fault` of
`fairway_gateway_requests_total`, which [the alerts](../deploy/prometheus/fairway.yml) and
[the dashboards](../deploy/grafana) are made with: the error ratio is what was `ours`, by what finished or was
`ours`. Where a retry helps, the error has the time to wait (RetryInfo, `retry-after`).
"""


def kinds(base: type[errors.FairwayError] = errors.FairwayError) -> list[type[errors.FairwayError]]:
    """Return every error class of the tree below ``base`` that has been imported."""
    return [found for child in base.__subclasses__() for found in (child, *kinds(child))]


def page() -> str:
    """Return the text of the page. Raises KeyError for a reason of the table that no error has."""
    by_reason = {kind.reason: kind for kind in kinds()}
    parts = [_HEAD]
    for fault, title in _TITLES.items():
        parts.append(f"\n## {title}\n\n| reason | gRPC | HTTP | what to do |\n| --- | --- | --- | --- |\n")
        for reason, (whose, advice) in ERRORS.items():
            if whose is fault and reason != FINISHED:
                kind = by_reason[reason]
                if kind is HttpProblem:
                    grpc, http = "", "400 to 503"
                else:
                    grpc, http = grpc_code(kind("")).name, str(http_status(kind("")))
                parts.append(f"| {reason} | {grpc} | {http} | {advice} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
