"""asyncio.TaskGroup whose failures are freed at once.

And with a fix for Python before 3.11.4: the parent's timeouts work after a task failed.
"""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType
from typing import Final

# Older versions: a timeout treats any pending cancel request of its task as external and ends the task.
_TIMEOUTS_COUNT_ALL: Final = sys.version_info < (3, 11, 4)


class TaskGroup(asyncio.TaskGroup):
    """Revokes the cancel request that wakes its parent when a task fails while the parent waits.

    What it raises leaves no cycle. asyncio's own frame refers to the error, whose traceback refers to the
    frame, so that all that a request held would stay until the garbage collector runs, which stops the loop.
    """

    _parent_cancel_requested: bool
    _parent_task: asyncio.Task[object]

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        before = self._parent_cancel_requested
        try:
            await super().__aexit__(kind, error, traceback)
        except BaseException as raised:
            if raised.__traceback__ is not None and raised.__traceback__.tb_next is not None:
                raised.__traceback__.tb_next.tb_frame.clear()
            raise
        finally:
            del error, traceback
            if _TIMEOUTS_COUNT_ALL and self._parent_cancel_requested and not before:
                self._parent_task.uncancel()
            del self._parent_task  # it may end with this error
