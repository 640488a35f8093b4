"""How many descriptors this process may have open: connections, files and pipes together."""

from __future__ import annotations

import resource
from typing import Final

# Where the hard limit is "unlimited", some systems refuse such a soft limit.
_MOST: Final = 1_048_576


def raise_descriptor_limit() -> None:
    """Make the soft limit as high as the hard one allows. A system that refuses leaves it as it is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError):
            return


def descriptor_limit() -> int:
    """Return the soft limit, bounded where it is not."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else min(soft, _MOST)
