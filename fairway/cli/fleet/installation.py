"""One run of an installation, in the supervisor: from its checks and ports to the end of the last process."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from fairway.cli.errors import CliError, ExitCode
from fairway.cli.fleet.bootstrap import Bootstrap
from fairway.cli.fleet.control import serve_changes
from fairway.cli.fleet.fetching import with_model
from fairway.cli.fleet.nodes import LocalNodes
from fairway.cli.fleet.options import EVERY_ADDRESS, UpOptions
from fairway.cli.fleet.ports import choose_ports, load_ports, save_ports, try_bind
from fairway.cli.fleet.progress import SharedProgress, StartProgress
from fairway.cli.fleet.record import FleetRecord, lock_installation, sweep, wait_for_end
from fairway.cli.fleet.roles import (
    CLIENT_VARIABLES,
    PREFERRED_PORTS,
    Addresses,
    check_settings,
    port_names,
    role_of,
    role_specs,
    store_specs,
    write_certificates,
)
from fairway.cli.fleet.supervisor import ProcessSupervisor
from fairway.cli.state import PRIVATE_UMASK, Endpoints, StateDir, ensure_secrets, read_secret, write_private

MIN_FREE_BYTES: Final = 1024**3
_RENEW_S: Final = 3600.0  # interval of looking for certificates that are due
FETCHED_BYTES: Final = 2 * 1024**3  # the converted model, as it is imported, stored and cached by a worker
OnReady = Callable[[Endpoints], None]


class AlreadyRunning(CliError):
    """Another supervisor has the installation's lock. ``endpoints`` is None while that one is starting."""

    def __init__(self, state: StateDir, endpoints: Endpoints | None) -> None:
        super().__init__(
            "ALREADY_STARTING",
            f"another `fairway up` is starting or stopping the installation in {state.root}",
            next_step="wait for it, or end it with `fairway down`",
        )
        self.endpoints = endpoints


def run_installation(
    options: UpOptions, progress: StartProgress, on_ready: OnReady, *, own_log: Path | None = None
) -> None:
    """Start everything, call ``on_ready``, and keep it running until SIGINT or SIGTERM.

    ``own_log`` is this process's log file, if any: it is bounded like the others. Raises CliError when it
    cannot start, AlreadyRunning when it runs; no process is left then.
    """
    state = StateDir.at(Path(options.state_dir))
    check_start(options)
    os.umask(PRIVATE_UMASK)  # child processes inherit it
    state.create()
    with state.writing():
        lock = lock_installation(state.lock)
    if lock is None:
        raise AlreadyRunning(state, running_endpoints(state))
    with lock:
        leftovers = FleetRecord.load(state.fleet)
        if leftovers is not None and (names := sweep(leftovers, patience_s=10.0)):
            progress.event("leftovers", "stopped", f"of an earlier run: {', '.join(names)}")
        ports = choose_ports(
            port_names(options),
            fixed={
                name: port
                for name, port in (("gateway_http", options.http_port), ("gateway_grpc", options.grpc_port))
                if port
            },
            remembered=load_ports(state.ports),
            preferred=PREFERRED_PORTS,
            hosts=Addresses.for_options(options, {}).listen_hosts,
        )
        with state.writing():
            state.endpoints.unlink(missing_ok=True)
            ensure_secrets(state)
            save_ports(state.ports, ports)
        shared = SharedProgress([progress])
        supervisor = ProcessSupervisor(shared, state.fleet, own_log=own_log)
        environ = {**dict(options.environment), **os.environ}
        asyncio.run(_Installation(options, state, ports, environ, supervisor, shared, options).run(on_ready))


def _flag(name: str) -> str:
    return "--set" if name == "settings" else "--" + name.replace("_", "-")


def _option_text(name: str, options: UpOptions) -> str:
    """Return the value of the named option as text."""
    if name == "workers" and options.most_ordered:
        return f"{options.workers}:{options.most_workers}"
    value = not options.deploy if name == "no_model" else getattr(options, name)
    if isinstance(value, tuple):
        value = " ".join(f"{role}:{variable}={text}" for role, variable, text in value)
    return str(value) if value != "" else "not given"


def running_endpoints(state: StateDir) -> Endpoints | None:
    """Return the endpoints of the installation if it runs and is ready, else None."""
    record = FleetRecord.load(state.fleet)
    if record is None or record.phase != "ready" or not record.supervisor.alive:
        return None
    return Endpoints.load(state.endpoints)


def remembered_variables(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the settings of the roles in an environment."""
    return tuple(
        (name, value)
        for name, value in sorted(environ.items())
        if name.startswith("FAIRWAY_") and name not in CLIENT_VARIABLES
    )


def remembered_options(state: StateDir) -> UpOptions | None:
    """Return the options of the running installation or of the last one that was ready; None without any."""
    try:
        return UpOptions.from_json(state.options.read_text("utf-8"))
    except (OSError, ValueError, TypeError, KeyError):
        return None  # another Fairway version wrote it


def continued(before: UpOptions, requested: UpOptions, given: Collection[str]) -> UpOptions:
    """Return the options ``before``, with the ``given`` ones of the command line over them.

    Settings are joined by process and variable; those of processes that are no more are left out.
    """
    changes = {name: getattr(requested, name) for name in given if name != "no_model"}
    if {"model", "model_dir"} & set(given):
        changes |= {"model": requested.model, "model_dir": requested.model_dir}
    if {"no_model", "model", "model_dir"} & set(given):
        changes["deploy"] = requested.deploy
    if "workers" in given:
        changes["most_workers"] = requested.most_workers
    found = replace(before, state_dir=requested.state_dir, **changes)
    if "replicas" not in given:
        found = replace(found, replicas=min(before.replicas, found.workers))
    names = Addresses.for_options(found, {}).role_names
    targets = {*names, *map(role_of, names)}
    kept = {one[:2]: one for one in before.settings if one[0] in targets}
    settings = {**kept, **{one[:2]: one for one in requested.settings}}
    return replace(found, settings=tuple(settings.values()))


def differing_options(requested: UpOptions, given: Collection[str], state: StateDir) -> list[str]:
    """Return the names of the ``given`` options with which the running installation was not started."""
    running = _running_options(requested, state)
    return [name for name in sorted(given) if _option_text(name, running) != _option_text(name, requested)]


def is_resize(requested: UpOptions, state: StateDir) -> bool:
    """Return whether a change of --workers is one of their number: none are ordered, before and after."""
    running = _running_options(requested, state)
    return not requested.most_ordered and not running.most_ordered


def _running_options(requested: UpOptions, state: StateDir) -> UpOptions:
    ports = load_ports(state.ports)
    return replace(
        remembered_options(state) or requested,
        http_port=ports.get("gateway_http", 0) if requested.http_port else 0,
        grpc_port=ports.get("gateway_grpc", 0) if requested.grpc_port else 0,
    )


def runs_otherwise(requested: UpOptions, differing: Collection[str], state: StateDir) -> CliError:
    running = _running_options(requested, state)
    texts = (
        f"{_flag(name)} is {_option_text(name, running)}, not {_option_text(name, requested)}"
        for name in differing
    )
    return CliError(
        "RUNS_OTHERWISE",
        f"Fairway runs in {state.root} with other options: {'; '.join(texts)}",
        next_step="`fairway down`, then the same command; replicas and model of what is deployed change with "
        "`fairway deployments update`",
        exit_code=ExitCode.REFUSED,
    )


@dataclass(slots=True)
class _Installation:
    """The running processes of a state folder."""

    options: UpOptions
    state: StateDir
    ports: dict[str, int]
    environ: Mapping[str, str]
    supervisor: ProcessSupervisor
    progress: SharedProgress
    served: UpOptions  # options with the model that is really served
    api_key: str = ""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, on_ready: OnReady) -> None:
        """Start, call ``on_ready``, and serve until SIGINT or SIGTERM; a second one ends without a drain."""
        stop, kill_now = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (kill_now if stop.is_set() else stop).set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        starting = asyncio.create_task(self._start())
        stopped = asyncio.create_task(stop.wait())
        tasks: list[asyncio.Task[object]] = [starting, stopped]
        try:
            await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                raise CliError(
                    "INTERRUPTED",
                    "the start was interrupted; everything that it started is stopped",
                    exit_code=ExitCode.INTERRUPTED,
                )
            starting.result()
            endpoints = self._saved()
            tasks.append(
                asyncio.create_task(serve_changes(self.state.control, self.progress, self._set_workers))
            )
            tasks.append(asyncio.create_task(self._renew_certificates()))
            if most := self.options.most_ordered:
                path = self.state.data("ordered-workers.json")
                nodes = LocalNodes(path, most, self._set_ordered, self.progress)
                tasks.append(asyncio.create_task(nodes.run(self.state.nodes)))
            self.supervisor.mark_ready()
            on_ready(endpoints)
            await stopped
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.state.endpoints.unlink(missing_ok=True)
            await self.supervisor.stop(now=kill_now)
            self.state.remove_temporary()

    async def _start(self) -> None:
        state, addresses = self.state, Addresses.for_options(self.options, self.ports)
        fetching = asyncio.create_task(with_model(self.options, state, self.progress))
        try:
            with state.writing():
                await asyncio.to_thread(write_certificates, state, addresses)
                await self.supervisor.start(store_specs(state, self.environ))
                specs = role_specs(state, addresses, self.environ, self.options.settings)
                await self.supervisor.start(specs)
            self.served = await fetching
        finally:
            fetching.cancel()
        self.api_key = await Bootstrap(self.served, state, addresses, self.progress).run()

    async def _renew_certificates(self) -> None:
        """Renew what is due, until cancelled. A failure is reported and tried again."""
        while True:
            await asyncio.sleep(_RENEW_S)
            addresses = Addresses.for_options(self.options, self.ports)
            try:
                await asyncio.to_thread(write_certificates, self.state, addresses)
            except (OSError, CliError) as exc:
                self.progress.event("certificates", "failed", f"they cannot be renewed: {exc}")

    async def _set_workers(self, count: int) -> Endpoints:
        """Start workers, or stop the last ones, which are drained. Raises CliError; nothing changes then."""
        async with self.changing:
            leaving = Addresses.for_options(self.options, self.ports).worker_names[count:]
            wanted = replace(
                self.options,
                workers=count,
                replicas=min(self.options.replicas, count),
                settings=tuple(one for one in self.options.settings if one[0] not in leaving),
            )
            return await self._change(wanted)

    async def _set_ordered(self, names: Sequence[str]) -> None:
        """Start and stop ordered workers until these run. Raises CliError."""
        async with self.changing:
            await self._change(replace(self.options, ordered=tuple(names)))

    async def _change(self, wanted: UpOptions) -> Endpoints:
        before = Addresses.for_options(self.options, self.ports)
        names = [name for name in port_names(wanted) if name not in port_names(self.options)]
        ports = choose_ports(names, fixed={}, remembered=load_ports(self.state.ports), preferred={})
        after = Addresses.for_options(wanted, {**self.ports, **ports})
        with self.state.writing():
            await asyncio.to_thread(write_certificates, self.state, after)
            specs = role_specs(self.state, after, self.environ, wanted.settings)
            joining = [spec for spec in specs if spec.name not in before.role_names]
            await self.supervisor.add(joining, after=before.worker_names[-1])
            await self.supervisor.remove([name for name in before.role_names if name not in after.role_names])
        self.options, self.ports = wanted, dict(after.ports)
        return self._saved()

    def _saved(self) -> Endpoints:
        """Write the endpoints, and the options for the next start; return the endpoints."""
        options = replace(self.options, environment=remembered_variables(self.environ))
        endpoints = self._endpoints()
        with self.state.writing():
            save_ports(self.state.ports, self.ports)
            write_private(self.state.options, options.to_json() + "\n")
            endpoints.save(self.state.endpoints)
        return endpoints

    def _endpoints(self) -> Endpoints:
        addresses = Addresses.for_options(self.options, self.ports)
        return Endpoints(
            http=addresses.http_url("gateway"),
            grpc=addresses.of("gateway_grpc"),
            api_key=self.api_key,
            admin_key=read_secret(self.state, "admin_key"),
            model=self.served.model_name if self.served.deploy else "",
            registry=addresses.of("registry"),
            controlplane=addresses.of("controlplane"),
            scheduler=addresses.of("scheduler"),
            workers=tuple(addresses.of(name) for name in addresses.worker_names),
            gateways=tuple(addresses.grpc_of(name) for name in addresses.gateway_names),
            gateways_http=tuple(addresses.http_url(name) for name in addresses.gateway_names),
            schedulers=tuple(addresses.of(name) for name in addresses.scheduler_names),
            controlplanes=tuple(addresses.of(name) for name in addresses.controlplane_names),
            tls_dir=str(addresses.certs or ""),
            console=f"http://{addresses.of('controlplane_console')}",
            metrics={name: addresses.of(f"{name}_metrics") for name in addresses.role_names},
            supervisor_pid=os.getpid(),
            pids=self.supervisor.pids,
        )


def stop_installation(state: StateDir, progress: StartProgress, *, patience_s: float) -> bool:
    """Stop the installation's supervisor and its remaining processes. Return False when nothing ran."""
    record = FleetRecord.load(state.fleet)
    if record is None:
        return False
    found = record.supervisor.alive
    if found:
        progress.event("supervisor", "stopping", f"process {record.supervisor.pid}; drains, then ends")
        record.supervisor.signal(signal.SIGTERM)
        if not wait_for_end([record.supervisor], timeout_s=patience_s):
            progress.event("supervisor", "failed", f"did not end within {patience_s:g} s; killed")
            record.supervisor.signal(signal.SIGKILL)
            wait_for_end([record.supervisor], timeout_s=5.0)
    latest = FleetRecord.load(state.fleet) or record
    swept = sweep(latest, patience_s=10.0)
    if swept:
        progress.event("leftovers", "stopped", ", ".join(swept))
    state.fleet.unlink(missing_ok=True)
    state.endpoints.unlink(missing_ok=True)
    state.remove_temporary()
    return found or bool(swept)


def check_disk(folder: Path, *, needed: int = MIN_FREE_BYTES) -> None:
    """Raise CliError when less than ``needed`` bytes are free at ``folder``, which may not exist yet."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise CliError(
            "NO_DISK_SPACE",
            f"{free / 1024**2:.0f} MiB are free at {existing}; {needed / 1024**2:.0f} MiB are needed",
            next_step="free some space, or choose another place with --state-dir",
        )


def check_model(options: UpOptions) -> None:
    """Raise CliError when the model folder to deploy is not a checkpoint."""
    folder = options.model_folder
    if not options.deploy or (folder / "config.json").is_file():
        return
    raise CliError(
        "MODEL_MISSING",
        f"{folder} contains no model: there is no config.json",
        next_step="name a checkpoint folder with --model-dir, or start without one with --no-model",
        exit_code=ExitCode.USAGE if options.model_dir else ExitCode.FAILED,
    )


def check_host(host: str) -> None:
    """Raise CliError when this machine cannot listen on ``host``."""
    holder = try_bind(0, host)
    if holder is None:
        raise CliError(
            "NO_SUCH_ADDRESS",
            f"{host!r} is no IPv4 address or name of this machine",
            next_step=f"`ip -4 -brief address` lists its addresses; {EVERY_ADDRESS} is all of them",
            exit_code=ExitCode.USAGE,
        )
    holder.close()


def check_start(options: UpOptions) -> None:
    """Raise CliError with the first reason that prevents the start."""
    check_disk(Path(options.state_dir), needed=MIN_FREE_BYTES + (FETCHED_BYTES if options.is_fetched else 0))
    check_host(options.host)
    check_model(options)
    check_settings(options)
    if options.replicas > options.workers:
        raise CliError(
            "TOO_MANY_REPLICAS",
            f"{options.replicas} replicas need as many workers; there are {options.workers}",
            next_step=f"add --workers {options.replicas}",
            exit_code=ExitCode.USAGE,
        )
