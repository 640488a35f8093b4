"""What a client receives for a bug."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from services.core.errors import FairwayError, InternalError

log = structlog.get_logger()


def failure_of(
    error: BaseException, new_incident: Callable[[], str], event: str, **context: str
) -> FairwayError:
    """Return the client's error: the error itself, or for a bug as ``incident_of``."""
    if isinstance(error, FairwayError) and not isinstance(error, InternalError):
        return error
    return incident_of(error, new_incident, event, **context)


def incident_of(
    error: BaseException, new_incident: Callable[[], str], event: str, **context: str
) -> InternalError:
    """Return the client's error for a bug: an incident id that is in the log, without the bug's text.

    ``event`` and ``context`` are what the log records it under.
    """
    incident = new_incident()
    log.error(event, incident=incident, exc_info=error, **context)
    return InternalError("internal error; quote the incident id to the operator", incident=incident)
