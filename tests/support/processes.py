"""Runs the tests in several processes: ``-n``, as in pytest-xdist, but the tests are imported once.

The main process collects, then forks. Each process takes the next group of tests until none is left, and
sends its reports to the main process, which shows them.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import pickle
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import connection
from types import SimpleNamespace
from typing import Any, Final, NoReturn, cast

import pytest

HELP: Final = "number of processes; auto: one for each core. 0 and 1: the tests run in the main process"
NUMBER_BYTES: Final = 2
PATIENCE_S: Final = 60.0  # what the teardown of a session may take once no more tests are to run


def add_option(parser: pytest.Parser) -> None:
    """Add ``-n``. The usual way leaves lower case to pytest, which has no such option."""
    group = parser.getgroup("processes", "tests in several processes")
    group._addoption("-n", dest="processes", metavar="NUMBER", type=_count_of, default=0, help=HELP)


def configure(config: pytest.Config, group_of: Callable[[str], str]) -> None:
    """Let several processes run the tests, if so many are asked for; a debugger needs the main one."""
    if config.option.processes > 1 and not config.option.usepdb and not config.option.collectonly:
        config.pluginmanager.register(Processes(config, config.option.processes, group_of))


def _count_of(text: str) -> int:
    return len(os.sched_getaffinity(0)) if text == "auto" else int(text)


class Groups:
    """The groups of tests, in order: each is taken once, by the first process that asks."""

    def __init__(self, items: Sequence[pytest.Item], group_of: Callable[[str], str]) -> None:
        self._groups = [
            list(group) for _, group in itertools.groupby(items, lambda item: group_of(item.nodeid))
        ]
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)  # 65,536 bytes fit: an error, and no hang, where they do not
        os.write(writer, b"".join(number.to_bytes(NUMBER_BYTES) for number in range(len(self._groups))))
        os.close(writer)
        self._stopped = mmap.mmap(-1, 1)  # shared with the forked processes

    def __len__(self) -> int:
        return len(self._groups)

    def take(self) -> list[pytest.Item]:
        """Return the next group, or nothing when none is left or the run was stopped."""
        number = b"" if self.stopped else os.read(self._reader, NUMBER_BYTES)
        return self._groups[int.from_bytes(number)] if number else []

    @property
    def stopped(self) -> bool:
        return bool(self._stopped[0])

    def stop(self) -> None:
        """Let every process end after its current test."""
        self._stopped[0] = 1


class _OtherGroup:
    """The next test of a group's last one: it shares the session's fixtures, and no module's or package's."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session

    def listchain(self) -> list[pytest.Session]:
        return [self._session]


class _Sender:
    """In a forked process: sends what the hooks are called with to the main process."""

    def __init__(self, config: pytest.Config, link: connection.Connection) -> None:
        self._config = config
        self._link = link

    def send(self, name: str, **values: object) -> None:
        self._link.send((name, values))

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.send("start", nodeid=nodeid, location=location)

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.send("finish", nodeid=nodeid, location=location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self.send("report", data=hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        kept = warnings.WarningMessage(
            Warning(str(warning_message.message)),
            warning_message.category,
            warning_message.filename,
            warning_message.lineno,
        )
        self.send("warning", data=pickle.dumps(kept.__dict__), when=when, nodeid=nodeid, location=location)


class _Process:
    """A forked process, as the main one sees it."""

    def __init__(self, name: str, pid: int, link: connection.Connection) -> None:
        self.name = name
        self.pid = pid
        self.link = link
        self.current: tuple[str, Any] | None = None  # the test that runs
        self.left = False  # it sent its last message
        # What pytest's reports show of it.
        self.node = SimpleNamespace(gateway=SimpleNamespace(id=name), _workerinfocache=f"[{name}]")

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Processes:
    """A plugin of the main process."""

    def __init__(self, config: pytest.Config, count: int, group_of: Callable[[str], str]) -> None:
        self._config = config
        self._count = count
        self._group_of = group_of
        self._reported: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:
            return None  # some were not collected: pytest's own loop ends the run
        assert threading.active_count() == 1, "a thread that was started at import is in no forked process"
        groups = Groups(session.items, self._group_of)
        if (reporter := self._config.pluginmanager.getplugin("terminalreporter")) is not None:
            reporter.showfspath = False
        self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        processes = [self._fork(number, session, groups) for number in range(min(self._count, len(groups)))]
        try:
            self._follow(processes, session, groups)
        except KeyboardInterrupt:  # of the main process alone, when it was not typed
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGINT)
            raise
        finally:
            groups.stop()
            self._end(processes)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        for item in session.items:
            if item.nodeid not in self._reported:
                self._fail(item.nodeid, item.location, "it never ran: the process of its group ended")
        return True

    def _fork(self, number: int, session: pytest.Session, groups: Groups) -> _Process:
        ours, theirs = connection.Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            ours.close()
            run(number, session, groups, theirs)
        theirs.close()
        return _Process(f"gw{number}", pid, ours)

    def _follow(self, processes: Sequence[_Process], session: pytest.Session, groups: Groups) -> None:
        """Pass on what the processes report until all have ended."""
        links = {process.link: process for process in processes}
        while links:
            for ready in connection.wait(list(links)):
                process = links[cast(connection.Connection, ready)]
                try:
                    name, values = process.link.recv()
                except (EOFError, ConnectionResetError):
                    del links[process.link]
                    self._ended(process)
                    continue
                self._pass_on(process, name, values)
            if session.shouldfail or session.shouldstop:
                groups.stop()

    def _pass_on(self, process: _Process, name: str, values: dict[str, Any]) -> None:
        hook = self._config.hook
        if name == "start":
            process.current = (values["nodeid"], values["location"])
            hook.pytest_runtest_logstart(**values)
        elif name == "finish":
            process.current = None
            self._reported.add(values["nodeid"])
            hook.pytest_runtest_logfinish(**values)
        elif name == "report":
            report = hook.pytest_report_from_serializable(config=self._config, data=values["data"])
            report.node = process.node
            hook.pytest_runtest_logreport(report=report)
        elif name == "warning":
            message = SimpleNamespace(**pickle.loads(values.pop("data")))
            hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **values})
        elif name == "left":
            process.left = True
            if values["error"]:
                self._fail(f"the end of {process.name}", ("", None, process.name), values["error"])

    def _ended(self, process: _Process) -> None:
        if not process.left:
            nodeid, location = process.current or (process.name, ("", None, process.name))
            self._reported.add(nodeid)
            self._fail(nodeid, location, f"the process {process.name} ended with it")

    def _fail(self, nodeid: str, location: Any, why: str) -> None:
        report = pytest.TestReport(nodeid, location, {}, "failed", why, "call")
        self._config.hook.pytest_runtest_logreport(report=report)

    def _end(self, processes: Sequence[_Process]) -> None:
        for process in processes:
            with contextlib.suppress(EOFError, OSError):
                while not process.link.closed and process.link.poll(PATIENCE_S):
                    process.link.recv()
            process.link.close()
            process.wait()


def run(number: int, session: pytest.Session, groups: Groups, link: connection.Connection) -> NoReturn:
    """Run groups of tests in this process, which was forked for it, until none is left."""
    config, status, error = session.config, 1, ""
    sender = _Sender(config, link)
    try:
        _become_worker(config, f"gw{number}")
        config.pluginmanager.register(sender)
        while group := groups.take():
            for item, following in itertools.pairwise([*group, _OtherGroup(session)]):
                config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if groups.stopped:
                    break
        status = 0
    except BaseException as raised:
        error = repr(raised)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is open is closed
    try:
        config.hook.pytest_sessionfinish(session=session, exitstatus=status)
        config._ensure_unconfigure()
    except BaseException as raised:
        error = error or repr(raised)
    with contextlib.suppress(OSError):
        sender.send("left", error=error)
        link.close()
    os._exit(status)


def _become_worker(config: pytest.Config, name: str) -> None:
    """Take what belongs to one process: folder of temporary files, captured output, no terminal, no cache."""
    config.workerinput = {"workerid": name}  # type: ignore[attr-defined]  # as in pytest-xdist
    config.option.maxfail = 0  # the main process counts failures, and stops the others
    random.seed()
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / name
    factory._basetemp.mkdir(mode=0o700)
    manager = config.pluginmanager
    manager.unregister(name="terminalreporter")
    if (capture := manager.getplugin("capturemanager")) is not None:
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
