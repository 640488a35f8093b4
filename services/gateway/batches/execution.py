"""One batch on its owner, from validation to its end.

Every line runs under an idempotency key of its own, so that a line which a former owner started is joined or
replayed, and charged once. Results become parts of the output and error files, which the record names: parts
first, then one compare-and-swap of files and progress together. Results that wait long for an earlier line
are stored separately. A gateway that takes over continues at the record's next line, and runs no line whose
result is stored.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

import structlog

from fairway.task_group import TaskGroup
from services.core.backoff import Backoff
from services.core.batches import (
    MAX_LINES,
    BatchProblem,
    BatchRecord,
    BatchStatus,
    FilePart,
    FilePurpose,
    StoredFile,
    size_of,
)
from services.core.errors import (
    FairwayError,
    IntegrityError,
    InternalError,
    NotFound,
    StoreUnavailable,
    Unauthenticated,
    first_failure,
)
from services.core.generation import Principal
from services.core.records import KeyRole, Meta, Tenant
from services.gateway.batches.lines import (
    EarlyEnd,
    InputCheck,
    InputLine,
    LineAnswer,
    LineResult,
    LineSplitter,
    LineTooLong,
    OpenFile,
    ResultWindow,
    TooManyLines,
    advanced,
    early_bytes,
    early_results,
    output_line,
    parse_line,
)
from services.gateway.batches.ports import BatchPorts
from services.gateway.batches.store import OwnedBatch
from services.gateway.policy.batch_turns import BatchPace, BatchProgress, is_temporary

log = structlog.get_logger()
T = TypeVar("T")
# Most bytes of lines that are read ahead, and of results that wait for an earlier one.
AHEAD_BYTES: Final = 32 * 1024**2
_RETRY: Final = Backoff(0.2, 30.0)
_STORE_RETRY_S: Final = 0.5
_LOOK_S: Final = 0.5
# Input bytes that are split at once.
_PIECE_BYTES: Final = 64 * 1024
_NOBODY: Final = Meta("nobody")


class BatchExecution:
    """Runs a batch that this gateway owns. Cancelling ``run`` leaves it to the next owner."""

    def __init__(self, held: OwnedBatch, ports: BatchPorts, share: Callable[[], int]) -> None:
        """``share``: how many lines of one batch this gateway runs at once."""
        record = held.record
        self._held = held
        self._ports = ports
        self._share = share
        self._principal = Principal(record.key_id, KeyRole.TENANT, record.tenant)
        self._pace = BatchPace()
        self._progress = BatchProgress()
        self._window = ResultWindow(record.next_line)
        self._files = {
            failed: OpenFile(parts, part_bytes=ports.part_bytes)
            for failed, parts in ((False, record.output), (True, record.errors))
        }
        self._stop: EarlyEnd | None = None
        self._last = record.lines  # lines that get a result
        self._waiting = self._running = self._held_bytes = 0
        self._scopes: dict[int, asyncio.Timeout] = {}
        self._moved = asyncio.Event()

    @property
    def is_stalled(self) -> bool:
        """Whether its lines are only refused."""
        return self._progress.is_stalled(self._ports.clock.monotonic_s())

    async def run(self) -> BatchRecord:
        """Return the batch at its end. Raises OwnershipLost."""
        if self._held.record.status is BatchStatus.VALIDATING:
            await self._validate()
        record = self._held.record
        if not record.status.is_over:
            if record.run_unix_s and await self._open_files():
                await self._execute()
            if not self._held.record.status.is_over:
                await self._finish(self._held.record)
        return self._held.record

    async def _validate(self) -> None:
        record = self._held.record
        check = InputCheck(record.endpoint)
        try:
            async with aclosing(self._lines(0)) as lines:
                async for portion in lines:
                    await asyncio.to_thread(_check_all, check, portion)
                    self._stop = self._early_end()
                    if check.is_full or self._stop is not None:
                        break
            check.finish()
        except TooManyLines as error:
            check.report("too_many_lines", f"the input has more than {MAX_LINES} lines", error.number)
        except LineTooLong as error:
            most = self._ports.max_line_bytes
            check.report("line_too_long", f"the line has more than {most} bytes", error.number)
        except (NotFound, IntegrityError) as error:
            self._stop = self._early_end()
            check.report("input_unreadable", error.message)
        if self._stop is not None:
            return
        now_s = self._ports.clock.unix_s()
        if check.problems:
            record = replace(
                record, status=BatchStatus.FAILED, problems=tuple(check.problems), end_unix_s=now_s
            )
        else:
            models = Counter[str]()
            for name, count in check.models.items():
                models[self._ports.deployment_of(name)] += count
            record = replace(
                record,
                status=BatchStatus.IN_PROGRESS,
                lines=check.lines,
                models=dict(models),
                run_unix_s=now_s,
            )
        await self._advance(record)
        self._last = check.lines

    async def _open_files(self) -> bool:
        """Return whether the files that an earlier owner began can be continued."""
        try:
            for failed, file in self._files.items():
                if (part := file.tail_part) is not None:
                    file.tail = await self._part(self._file_id(failed), len(file.parts) - 1, part)
            await self._restore_early(self._held.record)
        except (NotFound, IntegrityError) as error:
            log.error("batch.output_lost", batch_id=self._held.record.batch_id, error=error.message)
            self._stop = EarlyEnd(BatchStatus.FAILED, "output_unreadable", "the results cannot be read")
            return False
        return True

    async def _restore_early(self, record: BatchRecord) -> None:
        """Hold the results that an earlier owner stored separately. Raises NotFound, IntegrityError."""
        parts = enumerate(record.early)
        data = b"".join([await self._part(record.batch_id, index, part) for index, part in parts])
        if data:
            self._held_bytes += self._window.restore(await asyncio.to_thread(early_results, data))

    async def _execute(self) -> None:
        """Return once every line has its result in the files. Raises OwnershipLost."""
        try:
            async with TaskGroup() as group:
                looking = group.create_task(self._look_for_end())
                writing = group.create_task(self._write_results())
                await self._start_lines(group)
                await writing
                looking.cancel()
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None

    async def _start_lines(self, group: TaskGroup) -> None:
        index = self._held.record.next_line
        try:
            async with aclosing(self._lines(self._held.record.next_offset)) as portions:
                async for portion in portions:
                    for line in portion:
                        if not self._window.has(index):
                            await self._until(partial(self._may_read, index))
                            self._waiting += 1
                            self._held_bytes += len(line.data)
                            group.create_task(self._run_line(index, line))
                        index += 1
        except (NotFound, IntegrityError, LineTooLong, TooManyLines) as error:
            log.warning("batch.input_lost", batch_id=self._held.record.batch_id, error=str(error))
            if self._stop is None:
                message = "the input cannot be read any more"
                self._stop = EarlyEnd(BatchStatus.FAILED, "input_unreadable", message)
        self._last = index
        self._notify()

    def _may_read(self, index: int) -> bool:
        """Whether the next line is read: a few wait for their turn."""
        if not self._waiting and index == self._window.first:
            return True
        return (
            self._waiting < max(2, self._room())
            and index - self._window.first < self._ports.ahead_lines
            and self._held_bytes < AHEAD_BYTES
        )

    async def _run_line(self, index: int, line: InputLine) -> None:
        """Give the line its result."""
        found = parse_line(line.data)
        outcome = await self._outcome(index, bytes(found.body))
        record = self._held.record
        name = f"batch_req_{record.batch_id.removeprefix('batch_')}_{index}"
        data = output_line(name, found.custom_id, outcome)
        failed = isinstance(outcome, EarlyEnd) or outcome.failed
        self._held_bytes += len(data) - len(line.data)
        work = 0.0 if isinstance(outcome, EarlyEnd) else outcome.work
        result = LineResult(line.end, data, failed, work)
        self._window.add(index, result, self._ports.clock.monotonic_s())
        self._progress.result()
        self._notify()

    async def _outcome(self, index: int, body: bytes) -> LineAnswer | EarlyEnd:
        """Return the answer of a line, tried until it has one or the batch ends."""
        failures = crashes = 0
        key = f"{self._held.record.batch_id}/{index}"
        try:
            while True:
                await self._until(lambda: self._stop is not None or self._running < self._room())
                if self._stop is not None:
                    return self._stop
                try:
                    return await self._called(index, body, key)
                except TimeoutError:
                    assert self._stop is not None, "only the end of the batch ends a call"
                except FairwayError as error:
                    if not is_temporary(error, crashes):
                        return self._ports.calls.refusal(error)
                    crashes += isinstance(error, InternalError)
                    failures += 1
                    self._ports.count("retried")
                    now_s = self._ports.clock.monotonic_s()
                    self._pace.refused(now_s)
                    self._progress.refused(now_s)
                    await self._pause(
                        max(error.retry_after_s or 0.0, _RETRY.wait_s(failures, self._ports.rng))
                    )
        finally:
            self._waiting -= 1

    async def _called(self, index: int, body: bytes, key: str) -> LineAnswer:
        """Run a line. Raises TimeoutError when the batch ends meanwhile."""
        ports = self._ports
        self._running += 1
        try:
            async with asyncio.timeout(None) as scope:
                self._scopes[index] = scope
                await self._own_turn()
                answer = await ports.calls.run(self._principal, self._held.record.endpoint, body, key)
                self._pace.answered(answer.waited_s, ports.clock.monotonic_s())
                return answer
        finally:
            self._running -= 1
            self._scopes.pop(index, None)
            self._notify()

    async def _own_turn(self) -> None:
        """Return when the tenant's rate and the gateway's other requests leave room for a line."""
        clock, tenant = self._ports.clock, self._tenant_record()
        wait_s = self._pace.wait_s(clock.monotonic_s(), tenant)
        self._pace.started(clock.monotonic_s(), tenant)
        if wait_s > 0.0:
            await clock.sleep(wait_s)

    async def _pause(self, wait_s: float) -> None:
        """Return after a time, or when the batch ends. Meanwhile other lines are read and run."""
        until_s = self._ports.clock.monotonic_s() + min(wait_s, _RETRY.max_s)
        self._waiting -= 1
        self._notify()
        try:
            while self._stop is None and (left_s := until_s - self._ports.clock.monotonic_s()) > 0:
                await self._ports.clock.sleep(min(left_s, _LOOK_S))
        finally:
            self._waiting += 1

    def _room(self) -> int:
        return self._pace.room(self._share(), self._tenant_record())

    def _tenant_record(self) -> Tenant:
        """Return the tenant; without a valid key the batch ends."""
        try:
            return self._ports.tenant_of(self._principal)
        except Unauthenticated as error:
            self._end(EarlyEnd(BatchStatus.FAILED, "invalid_api_key", error.message))
            return Tenant(_NOBODY)

    async def _look_for_end(self) -> None:
        """End the batch when it was cancelled, expired, or its files are full."""
        while True:
            if (why := self._early_end()) is not None:
                self._end(why)
            await self._ports.clock.sleep(_LOOK_S)

    def _early_end(self) -> EarlyEnd | None:
        record, now_s = self._held.record, self._ports.clock.unix_s()
        if record.status.is_over:
            return None
        if self._ports.status_of(record) is BatchStatus.CANCELLING:
            return EarlyEnd(BatchStatus.CANCELLED, "batch_cancelled", "the batch was cancelled")
        if now_s >= record.expire_unix_s:
            text = "the completion window expired before this request was executed"
            return EarlyEnd(BatchStatus.EXPIRED, "batch_expired", text)
        if any(file.is_full for file in self._files.values()):
            text = "the batch's results are larger than a file may be"
            return EarlyEnd(BatchStatus.FAILED, "output_too_large", text)
        if size_of((*record.output, *record.errors)) > self._ports.room_bytes(self._tenant):
            text = "the tenant's files have no room for more results"
            return EarlyEnd(BatchStatus.FAILED, "output_too_large", text)
        return None

    def _end(self, why: EarlyEnd) -> None:
        """Start no more lines; those that run have a time to end."""
        if self._stop is not None:
            return
        self._stop = why
        log.info("batch.stopped", batch_id=self._held.record.batch_id, code=why.code)
        deadline_s = asyncio.get_running_loop().time() + self._ports.times.grace_s
        for scope in self._scopes.values():
            scope.reschedule(deadline_s)
        self._notify()

    async def _write_results(self) -> None:
        """Commit results as they come; return when the last line has its own."""
        clock, times, window = self._ports.clock, self._ports.times, self._window
        while self._held.record.next_line < self._last:
            await self._until(lambda: window.ready or window.first >= self._last or window.has_unstored)
            if window.first >= self._last and not window.ready:
                return
            await clock.sleep(times.commit_s)
            while window.ready:
                await self._commit(window.take(self._ports.part_bytes))
            if window.has_unstored and window.waits_s(clock.monotonic_s()) >= times.early_s:
                await self._store_early()

    async def _commit(self, taken: list[LineResult]) -> None:
        """Write the results' parts, then the record that names them."""
        replaced: list[str] = []
        files = dict(self._files)
        for failed, file in self._files.items():
            data = b"".join(result.data for result in taken if result.failed is failed)
            if data:
                files[failed] = await self._appended(failed, file, data)
                if file.tail_part is not None:
                    replaced.append(file.tail_part.digest)
        record = advanced(self._held.record, taken, files[False].parts, files[True].parts)
        if not self._window.has_stored:
            replaced += [part.digest for part in record.early]
            record = replace(record, early=())
        # The last results and the end are one write: another owner could not find out why lines ended early.
        await (self._finish(record) if record.next_line >= self._last else self._advance(record))
        self._files = files
        self._held_bytes -= sum(len(result.data) for result in taken)
        for result in taken:
            self._ports.count("failed" if result.failed else "completed")
        self._notify()
        await self._discard(replaced)

    async def _store_early(self) -> None:
        """Store all results that wait for earlier ones, in place of those stored so before.

        The records of their keys do not last as long as a line may be tried.
        """
        results, before = self._window.held(), self._held.record.early
        contents = await asyncio.to_thread(_cut, results, self._ports.part_bytes)
        parts = await self._stored(self._held.record.batch_id, (), contents)
        await self._advance(replace(self._held.record, early=parts))
        self._window.stored(results)
        await self._discard([part.digest for part in before])

    async def _discard(self, digests: list[str]) -> None:
        """Delete parts that the record named before."""
        try:
            await self._ports.parts.discard(digests)
        except StoreUnavailable as error:  # the sweep deletes them
            log.info("batch.parts_left", error=error.message)

    async def _appended(self, failed: bool, file: OpenFile, data: bytes) -> OpenFile:
        kept, contents = file.plan(data)
        return file.after(await self._stored(self._file_id(failed), kept, contents), contents[-1])

    async def _stored(
        self, file_id: str, kept: tuple[FilePart, ...], contents: list[bytes]
    ) -> tuple[FilePart, ...]:
        """Return the parts of a file once those behind ``kept`` are stored."""
        put, parts = self._ports.parts.put, list(kept)
        for content in contents:
            call = partial(put, self._tenant, file_id, len(parts), content)
            parts.append(FilePart(await self._retried(call), len(content)))
        return tuple(parts)

    async def _finish(self, record: BatchRecord) -> None:
        """Write the end of the batch and its files together."""
        now_s, stop, problems = self._ports.clock.unix_s(), self._stop, record.problems
        status = BatchStatus.COMPLETED if stop is None else stop.status
        if stop is not None and stop.status is BatchStatus.FAILED:
            problems = (BatchProblem(stop.code, stop.message),)
        if record.status is BatchStatus.CANCELLING:
            status = BatchStatus.CANCELLED
        files = [
            StoredFile(
                self._file_id(failed),
                record.tenant,
                f"{record.batch_id}_{'error' if failed else 'output'}.jsonl",
                FilePurpose.BATCH_OUTPUT,
                now_s,
                now_s + self._ports.retention_s(record.tenant),
                parts,
            )
            for failed, parts in ((False, record.output), (True, record.errors))
            if parts
        ]
        ended = replace(record, status=status, problems=problems, end_unix_s=now_s, early=())
        await self._advance(ended, files)
        log.info("batch.ended", batch_id=record.batch_id, status=status, failed=record.failed)

    async def _advance(self, record: BatchRecord, files: list[StoredFile] | None = None) -> None:
        store, held = self._ports.store, self._held
        self._held = await self._retried(lambda: store.advance(held, record, files or ()))

    async def _retried(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result once the store answers. The owner's lease bounds how long that is waited for."""
        while True:
            try:
                return await call()
            except StoreUnavailable as error:
                log.warning("batch.store_lost", batch_id=self._held.record.batch_id, error=error.message)
                await self._ports.clock.sleep(_STORE_RETRY_S)

    async def _lines(self, offset: int) -> AsyncGenerator[list[InputLine], None]:
        """Yield the input's lines from an offset on, those of a piece at once. Raises NotFound,
        IntegrityError, LineTooLong, TooManyLines."""
        record, ports = self._held.record, self._ports
        found = await self._retried(lambda: ports.store.file(record.tenant, record.input_file_id))
        splitter = LineSplitter(ports.max_line_bytes, offset)
        start = 0
        for index, part in enumerate(found.record.parts):
            begin, start = start, start + part.size_bytes
            if start <= offset:
                continue
            data = await self._part(record.input_file_id, index, part)
            for at in range(max(0, offset - begin), len(data), _PIECE_BYTES):
                yield await asyncio.to_thread(_fed, splitter, data[at : at + _PIECE_BYTES])
        yield list(splitter.finish())

    async def _part(self, file_id: str, index: int, part: FilePart) -> bytes:
        get = self._ports.parts.get
        return await self._retried(lambda: get(self._tenant, file_id, index, part.digest))

    @property
    def _tenant(self) -> str:
        return self._held.record.tenant

    def _file_id(self, failed: bool) -> str:
        record = self._held.record
        return record.error_file_id if failed else record.output_file_id

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._moved.wait()

    def _notify(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


def _fed(splitter: LineSplitter, piece: bytes) -> list[InputLine]:
    return list(splitter.feed(piece))


def _cut(results: dict[int, LineResult], part_bytes: int) -> list[bytes]:
    """Return the contents of the parts of results that are stored separately."""
    _, contents = OpenFile(part_bytes=part_bytes).plan(early_bytes(results))
    return contents


def _check_all(check: InputCheck, lines: list[InputLine]) -> None:
    for line in lines:
        check.add(line)
