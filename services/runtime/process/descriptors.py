"""The limit of file descriptors of this process: connections, files and pipes together."""

from __future__ import annotations

import resource
from typing import Final

# Where the hard limit is "unlimited", some systems reject a higher soft limit.
_MOST: Final = 1_048_576


def raise_descriptor_limit() -> None:
    """Raise the soft limit to the hard limit. If the system rejects it, the limit stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError):
            return


def descriptor_limit() -> int:
    """Return the soft limit; a fixed bound if it is unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else min(soft, _MOST)
