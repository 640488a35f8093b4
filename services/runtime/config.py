"""Configuration of a role: environment variables with the prefix FAIRWAY_, parsed once at the start.

An unknown FAIRWAY_ variable or a bad value stops the start with a message that names it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fairway.http_json import checked_url

PREFIX = "FAIRWAY_"
MIN_SECRET_CHARS = 32
Address = Annotated[str, Field(pattern=r"^[^\s:]+:\d{1,5}$")]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^\s/,]+)$")]
# A capital, `_` or slash: never the name of a deployment.
_ALIAS: Final = re.compile(r"(?=.*[A-Z_/])[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
StoreAddress = Annotated[str, Field(pattern=r"^((https?://)?[^\s:/]+:\d{1,5}|unix:/[^\s,]+)$")]
Tls = Literal["auto", "on", "off"]
LOOPBACK: Final = ("127.", "localhost:", "[::1]")
_LEAST_RATE: Final = 1024**2  # bytes of model files per second at which a chunk of 4 MiB passes in 4 s


class ConfigError(Exception):
    """The environment is not a valid configuration. The message names the variable and the correction."""


class Settings(BaseModel):
    """All settings of all roles. Sizes in bytes, times in seconds. `make reference` prints the comments."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Addresses of the etcd members: host:port, https://host:port for TLS, or unix:/PATH.
    etcd_endpoints: tuple[StoreAddress, ...] = ("127.0.0.1:2379",)
    # URL of the quota store: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://.
    redis_url: str = "redis://127.0.0.1:6379/0"
    # What requests per minute do while Redis is away: `open` to the gateway's share, or `closed`.
    outage_requests: Literal["open", "closed"] = "open"
    # The same for requests at once.
    outage_concurrency: Literal["open", "closed"] = "open"
    # The same for tokens per minute. Budgets are always closed.
    outage_tokens: Literal["open", "closed"] = "open"
    # What requests of tenants with budgets do while the usage outbox is full: `closed` rejects them.
    outage_usage: Literal["open", "closed"] = "closed"
    # File with the password of Redis.
    redis_password_file: Path | None = None
    # Address of the gRPC server; port 0 takes a free one.
    listen: Address = "127.0.0.1:0"
    # Address at which other services reach this one; default: the listen address.
    advertise: Address | None = None
    # Address of the OpenAI HTTP API.
    http_listen: Address = "127.0.0.1:8080"
    # Address of the console, the web page of the control plane. Empty: there is none.
    console_listen: Address | None = None
    # URL at which browsers reach the console; default: that of its address.
    console_url: str = Field(default="", pattern=r"^(https?://[^\s/@]+)?$")
    # Origins of the web pages that may call the HTTP API, `*` for every one. Empty: none.
    cors_origins: tuple[Origin, ...] = ()
    # Further names of deployments, name=deployment: each has a capital, `_` or one slash, as none of them.
    model_aliases: dict[str, str] = Field(default_factory=dict, max_length=256)
    # Time after which a stream begins without output; an earlier failure is a status that clients retry.
    status_wait_s: float = Field(default=45.0, gt=0, le=3600)
    # Address of /metrics, /healthz and /readyz, which need no key.
    metrics_listen: Address = "127.0.0.1:0"
    # Folder of this role's certificate: tls.crt, tls.key, ca.crt and ca.crl. Empty: no TLS between roles.
    tls_dir: Path | None = None
    # SPIFFE Workload API that issues the certificate in place of the folder.
    spiffe_socket: str = Field(default="", pattern=r"^(unix:/\S+)?$")
    # Folder of the certificate and the authorities for etcd and Redis; default: as between roles.
    store_tls_dir: Path | None = None
    # TLS of the gateway's HTTP and gRPC, and of the console; auto: beyond the loopback address.
    client_tls: Tls = "auto"
    # TLS of the metrics, for certificates of the roles monitor and operator; auto: as client_tls.
    metrics_tls: Tls = "auto"
    # Permit plain text beyond the loopback address.
    insecure: bool = False
    # Folder for the files of this process.
    state_dir: Path = Path(".fairway/state")
    # Bytes of each disk left to stores.
    disk_reserve_bytes: int = Field(default=512 * 1024**2, ge=0)
    # etcd's --quota-backend-bytes.
    etcd_quota_bytes: int = Field(default=2 * 1024**3, ge=16 * 1024**2)
    # Secret shared by all services, 32 characters or more.
    internal_token_file: Path = Path(".fairway/secrets/internal_token")
    # Secret that signs placement tickets.
    ticket_key_file: Path = Path(".fairway/secrets/ticket_key")
    # Secrets that wrap the data keys of tenants, one per line: the first wraps, all unwrap. It is read again.
    record_keys_file: Path = Path(".fairway/secrets/record_keys")
    # Library of a PKCS#11 token whose keys wrap those of tenants, in place of the file.
    key_module: Path | None = None
    # Label of the token.
    key_token: str = Field(default="fairway", min_length=1, max_length=32)
    # Labels of its AES keys: the first wraps, all unwrap.
    key_labels: tuple[str, ...] = Field(default=("fairway",), min_length=1, max_length=16)
    # File with the token's PIN.
    key_pin_file: Path = Path(".fairway/secrets/key_pin")
    # Seconds that an unwrapped key of a tenant stays in memory.
    key_cache_s: float = Field(default=900.0, ge=1, le=86_400)
    # Keys that sign the audit log, 64 hex digits on each line: every one signs, the first is the log's own.
    audit_key_file: Path = Path(".fairway/secrets/audit_key")
    # Folder of the audit log, shared by all control planes; default: the bucket, or in the state folder.
    audit_dir: Path | None = None
    # File to which signed checkpoints of the audit log are appended, outside of its store.
    audit_checkpoint_file: Path | None = None
    # File with the first operator's key, fw_admin_ and 64 hex digits.
    admin_key_file: Path | None = None
    # File that describes an OpenID provider whose tokens are accepted beside API keys.
    oidc_file: Path | None = None
    # Address of the registry.
    registry: Address = "127.0.0.1:9091"
    # Store of chunks: `folder` (in the state folder) or s3://BUCKET/PREFIX.
    blob_store: str = Field(
        default="folder",
        pattern=r"^(folder|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._/-]{0,512})?)$",
    )
    # Downloads that read it at once; others wait in turn.
    blob_downloads: int = Field(default=64, ge=1, le=4096)
    # Folder of the usage ledger, shared by all control planes; default: the bucket, or in the state folder.
    usage_dir: Path | None = None
    # Folder of files, shared by all gateways; default: the bucket, or in the state folder.
    files_dir: Path | None = None
    # Days that they are kept.
    files_retention_days: int = Field(default=30, ge=1, le=3660)
    # Largest uploaded file.
    files_max_bytes: int = Field(default=200 * 1024**2, ge=1024, le=4 * 1024**3)
    # Most bytes of files per tenant.
    files_tenant_bytes: int = Field(default=10 * 1024**3, ge=1024)
    # Price of the class batch, over the list price.
    batch_price_ratio: float = Field(default=1.0, ge=0, le=1)
    # Lines of batches at once on a gateway; 0: none.
    batch_lines: int = Field(default=32, ge=0, le=1024)
    # The same while it serves other requests.
    batch_busy_lines: int = Field(default=1, ge=1, le=1024)
    # Days that usage records are kept.
    usage_retention_days: int = Field(default=400, ge=1, le=3660)
    # URL of the object store; empty: Amazon's for the region.
    s3_endpoint: str = Field(default="", pattern=r"^(https?://[^\s/@]+/?)?$")
    # Region of the object store.
    s3_region: str = Field(default="us-east-1", pattern=r"^[a-z0-9-]{1,64}$")
    # Put the bucket into the path; false: into the host name.
    s3_path_style: bool = True
    # AWS credentials file; default: AWS_* variables or the instance's role.
    s3_credentials_file: Path | None = None
    # PEM certificates to trust besides the system's, for an object store with an authority of its own.
    s3_ca_file: Path | None = None
    # Name of the worker, unique and stable over restarts.
    worker_id: str = Field(default="worker-0", pattern=r"^[a-z0-9]([a-z0-9.-]{0,126}[a-z0-9])?$")
    # Failure domain; replicas are spread over zones.
    zone: str = Field(default="", max_length=64)
    # Part of a device that the worker runs on, a MIG profile or a share such as 0.25; empty: whole devices.
    slice: str = Field(default="", pattern=r"^(\d{1,2}g\.\d{1,4}gb|0\.\d{1,4})?$")
    # Region of this gateway and of its stores; only it serves tenants whose residency is the region.
    region: str = Field(default="", pattern=r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$")
    # Labels key=value, matched by a deployment's selector.
    labels: dict[str, str] = Field(default_factory=dict, max_length=32)
    # Lowest level that is logged.
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    # Most log lines about single requests per second; 0: none.
    request_log_per_s: float = Field(default=200.0, ge=0, le=1_000_000)
    # Base URLs of Alertmanagers that receive the control plane's alerts; http:// is for loopback alone.
    alertmanagers: tuple[str, ...] = Field(default=(), max_length=8)
    # OTLP collector (gRPC) for traces; empty: no traces.
    otlp_endpoint: str = Field(default="", pattern=r"^(https?://)?[^\s:/]+:\d{1,5}$|^$")
    # Share of requests that is traced.
    trace_ratio: float = Field(default=0.01, ge=0, le=1)
    # Most seconds that running requests get at shutdown.
    drain_s: float = Field(default=10.0, ge=0, le=3600)
    # Seconds without renewal after which a worker or gateway counts as lost.
    lease_ttl_s: int = Field(default=5, ge=1, le=120)
    # Seconds without renewal after which a leader is replaced.
    leader_ttl_s: int = Field(default=2, ge=1, le=120)

    # Torch device of the engine, such as cpu or cuda:0.
    device: str = "cpu"
    # Devices of this kind that the node has as one group: the ranks that share a model.
    devices: int = Field(default=1, ge=1, le=64)
    # Addresses of followers, `fairway engines follow` on other nodes: as many devices on each as on this one.
    followers: tuple[Address, ...] = Field(default=(), max_length=15)
    # IPv4 address of this node for ranks on several nodes. What listens there asks for no credential.
    ranks_address: str = Field(default="127.0.0.1", pattern=r"^\d{1,3}(\.\d{1,3}){3}$")
    # Workers of one type are expected to be equally fast; default: the device's name.
    device_type: str = Field(default="", pattern=r"^([a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?)?$")
    # Price of the worker in any one currency; 0: unknown.
    cost_per_hour: float = Field(default=0.0, ge=0, le=1_000_000)
    # Dense floating-point operations per second of one device at the engines' type; 0: the published peak.
    device_peak_flops: float = Field(default=0.0, ge=0, le=1e18)
    # Memory for all engines of the worker.
    memory_bytes: int = Field(default=2 * 1024**3, ge=1024**2)
    # KV memory per engine.
    kv_memory_bytes: int = Field(default=256 * 1024**2, ge=1024**2)
    # Threads per engine; 0: half of the processors.
    engine_threads: int = Field(default=0, ge=0, le=1024)
    # Most tokens computed in one engine step.
    token_budget: int = Field(default=512, ge=16, le=65536)
    # Most sequences in one engine step.
    max_sequences: int = Field(default=64, ge=1, le=4096)
    # Target duration of a step while streams run; prefill is cut to it; 0: none.
    itl_target_s: float = Field(default=0.05, ge=0, le=60)
    # Folder of vLLM's environment; default: that of `fairway engines install vllm`.
    vllm_dir: Path | None = None
    # Type of weights and KV.
    engine_dtype: Literal["float32", "bfloat16"] = "float32"
    # Arithmetic. exact: outputs do not depend on the batch; free: faster; auto: exact on CPU, free on CUDA.
    engine_mode: Literal["auto", "exact", "free"] = "auto"
    # Operators. native: require C++; torch: no C++; auto: C++ where available.
    engine_operators: Literal["auto", "native", "torch"] = "auto"
    # Fixed window of batches of fixed-cost models, to compare with; -1: derived from what is measured.
    batch_window_s: float = Field(default=-1.0, ge=-1, le=1)
    # Reuse the KV of equal prompt prefixes.
    prefix_cache: bool = True
    # Source of proposed tokens: the prompt, or a draft model.
    speculation: Literal["off", "prompt_lookup", "draft"] = "off"
    # Most proposed tokens per sequence and step.
    max_proposals: int = Field(default=8, ge=1, le=64)
    # Step duration of the null executor, which produces tokens without a model.
    null_step_s: float = Field(default=0.0, ge=0, le=60)
    # Most bytes of model files on disk.
    model_cache_bytes: int = Field(default=20 * 1024**3, ge=1024**2)
    # Most bytes per second that a worker or follower sends of model files; at least 1 MiB; 0: no bound.
    model_upload_bytes_per_s: int = Field(default=0, ge=0)
    # The same of what it fetches in swarms.
    model_download_bytes_per_s: int = Field(default=0, ge=0)

    # Longest wait in the queue.
    queue_ttl_s: float = Field(default=30.0, gt=0, le=3600)
    # How long a replica stays after the last signal that needed it, where replicas follow the load.
    scaling_settle_s: float = Field(default=1800.0, ge=1, le=86400)
    # Program and arguments that list, order and release nodes; empty: none is ordered by one.
    node_command: str = ""
    # Longest time of one run of it.
    node_command_timeout_s: float = Field(default=30.0, gt=0, le=600)
    # Namespace of the Kubernetes workloads whose pods are ordered as nodes; empty: none.
    node_namespace: str = Field(default="", max_length=63)
    # Credentials of that cluster; default: those of the pod in which the control plane runs.
    node_kubeconfig: Path | None = None
    # Most ordered nodes at once.
    node_limit: int = Field(default=16, ge=1, le=1000)
    # Time from an order until its worker has registered; then the order has failed.
    node_order_s: float = Field(default=600.0, gt=0, le=86400)
    # Time without an assignment until an ordered node is released.
    node_idle_s: float = Field(default=600.0, gt=0, le=86400)
    # Most placements in the queue.
    queue_limit: int = Field(default=4096, ge=1, le=1_000_000)
    # Seconds without a leader until gateways place requests themselves.
    fallback_after_s: float = Field(default=1.5, gt=0, le=60)
    # Greatest age of the worker list for fallback placement.
    fallback_max_age_s: float = Field(default=120.0, gt=0, le=3600)
    # Age of the routes from which on a gateway uses the stable version of a split only; etcd confirms them
    # every 6 s.
    route_max_age_s: float = Field(default=15.0, ge=7, le=3600)
    # Share of a version's KV for fallback placements; 0: none.
    fallback_credit_ratio: float = Field(default=0.25, ge=0, le=1)
    # Seconds within which a grant must reach its worker.
    grant_ttl_s: float = Field(default=2.0, gt=0, le=20)
    # Reject early what cannot be served in time.
    shedding: bool = True
    # Predicted wait of interactive requests above which load is shed.
    ttft_target_interactive_s: float = Field(default=2.0, gt=0, le=3600)
    # The same for standard requests.
    ttft_target_standard_s: float = Field(default=10.0, gt=0, le=3600)
    # Step time over expected step time from which a worker is slow.
    ejection_ratio: float = Field(default=2.0, ge=1.5, le=100)
    # Place requests on workers that cached their prefix.
    prefix_routing: bool = True
    # Output tokens reserved for a new sequence before outputs were observed.
    predicted_output_tokens: int = Field(default=256, ge=1, le=1_048_576)
    # Quantile of observed outputs that is reserved afterwards.
    output_quantile: float = Field(default=0.8, ge=0.1, le=0.99)
    # Wait after which a lower priority class gets its own share.
    class_head_start_s: float = Field(default=30.0, ge=0, le=3600)
    # Tokens per worker by which other tenants may overtake one that waits for room.
    bypass_window_tokens: float = Field(default=32768.0, ge=0, le=1_000_000_000)
    # Largest HTTP request body.
    max_body_bytes: int = Field(default=8 * 1024**2, ge=1024)
    # Interval of keep-alive events on an idle client stream.
    heartbeat_s: float = Field(default=5.0, gt=0, le=300)
    # Seconds that a request with an idempotency key runs without a client; 0: it ends.
    detach_grace_s: float = Field(default=30.0, ge=0, le=3600)
    # Seconds without renewal until another gateway continues such a request.
    idempotency_lease_s: float = Field(default=5.0, ge=1, le=60)
    # Seconds that a finished answer can be replayed.
    idempotency_body_s: float = Field(default=3600.0, ge=10, le=86_400)
    # Seconds that a finished key cannot run again.
    idempotency_tombstone_s: float = Field(default=86_400.0, ge=10, le=2_592_000)
    # Most keys stored per tenant.
    idempotency_tenant_keys: int = Field(default=1_000_000, ge=1, le=10_000_000)
    # Most bytes of stored answers per tenant.
    idempotency_tenant_bytes: int = Field(default=256 * 1024**2, ge=1024**2)

    # Seconds that a response of the Responses API is stored.
    responses_retention_s: float = Field(default=2_592_000.0, ge=60, le=31_536_000)
    # Most bytes of stored responses per tenant; beyond it the oldest are dropped.
    responses_tenant_bytes: int = Field(default=256 * 1024**2, ge=8 * 1024**2)

    # Seconds that answers at temperature 0 serve equal requests that permit it; 0: never.
    response_cache_ttl_s: float = Field(default=0.0, ge=0, le=3600)
    # Most bytes of such answers per tenant.
    response_cache_tenant_bytes: int = Field(default=16 * 1024**2, ge=1024**2)

    @field_validator(
        "etcd_endpoints", "cors_origins", "followers", "key_labels", "alertmanagers", mode="before"
    )
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part for part in value.split(",") if part) if isinstance(value, str) else value

    @field_validator("alertmanagers")
    @classmethod
    def _reachable_alertmanagers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(checked_url, value))

    @field_validator("labels", "model_aliases", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        """Return `gpu=h100,disk=fast` as a mapping."""
        if not isinstance(value, str):
            return value
        pairs = [part.partition("=") for part in value.split(",") if part]
        if any(not key or not equals for key, equals, _ in pairs):
            raise ValueError("pairs are written key=value,key=value")
        return {key: text for key, _, text in pairs}

    @field_validator("model_aliases")
    @classmethod
    def _valid_aliases(cls, value: dict[str, str]) -> dict[str, str]:
        for alias in value:
            if len(alias) > 128 or not _ALIAS.fullmatch(alias):
                raise ValueError(f"the alias {alias!r} needs a capital, _ or one slash, as no deployment has")
        return value

    @field_validator("model_upload_bytes_per_s", "model_download_bytes_per_s")
    @classmethod
    def _rate_passes_chunks(cls, value: int) -> int:
        if 0 < value < _LEAST_RATE:
            raise ValueError(
                f"the least rate of model files is {_LEAST_RATE} bytes per second, and 0 is no bound: a "
                "slower node holds up those that fetch from it"
            )
        return value

    @model_validator(mode="after")
    def _a_step_holds_every_sequence(self) -> Settings:
        if self.max_sequences > self.token_budget:
            raise ValueError(
                f"FAIRWAY_MAX_SEQUENCES is {self.max_sequences}, above FAIRWAY_TOKEN_BUDGET "
                f"{self.token_budget}: a step could not decode them all"
            )
        return self

    @model_validator(mode="after")
    def _one_source_of_certificates(self) -> Settings:
        if self.tls_dir is not None and self.spiffe_socket:
            raise ValueError("FAIRWAY_TLS_DIR and FAIRWAY_SPIFFE_SOCKET exclude each other: leave one out")
        return self

    @model_validator(mode="after")
    def _one_provider_of_nodes(self) -> Settings:
        if self.node_command and self.node_namespace:
            raise ValueError(
                "FAIRWAY_NODE_COMMAND and FAIRWAY_NODE_NAMESPACE exclude each other: leave one out"
            )
        return self

    def secures(self, choice: Tls, listen: str) -> bool:
        """Whether a port has TLS. Raises ConfigError when it should and there is no certificate."""
        is_beyond = not listen.startswith(LOOPBACK)
        if choice == "off" or (choice == "auto" and (not is_beyond or self.insecure)):
            return False
        if self.tls_dir is None and not self.spiffe_socket:
            raise ConfigError(
                f"{listen} is to have TLS, and there is no certificate: set FAIRWAY_TLS_DIR (`fairway certs "
                "issue` makes one), or FAIRWAY_INSECURE=true for plain text beyond the loopback address"
            )
        return True

    @property
    def longest_retention_s(self) -> float:
        """The longest time for which something of a tenant is stored."""
        return max(self.files_retention_days * 86_400.0, self.responses_retention_s, self.idempotency_body_s)

    @property
    def advertised(self) -> str:
        """host:port at which other services reach this one. Raises ConfigError when none could."""
        address = self.advertise or self.listen
        if address.endswith(":0"):
            raise ConfigError(
                "set FAIRWAY_LISTEN to a fixed port, or FAIRWAY_ADVERTISE to where it is reached"
            )
        return address


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of this process. Raises ConfigError naming the variable that is wrong."""
    source = os.environ if environ is None else environ
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    unknown = sorted(name for name in source if name.startswith(PREFIX) and name not in known)
    if unknown:
        near = get_close_matches(unknown[0], sorted(known))
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(known))}"
        raise ConfigError(f"unknown setting {unknown[0]}; {hint}")
    values = {
        name: source[PREFIX + name.upper()]
        for name in Settings.model_fields
        if PREFIX + name.upper() in source
    }
    try:
        return Settings.model_validate(values)
    except ValidationError as exc:
        first = exc.errors()[0]
        name = (
            PREFIX + "_".join(str(part) for part in first["loc"][:1]).upper() if first["loc"] else "settings"
        )
        raise ConfigError(f"{name}: {first['msg']}; got {first.get('input')!r}") from exc


def read_secret(path: Path) -> str:
    """Return the text of a secret file, stripped. Raises ConfigError when it cannot be read or is short."""
    text = _read_file(path, "`fairway up` creates it")
    if len(text) < MIN_SECRET_CHARS:
        raise ConfigError(f"the secret in {path} has less than {MIN_SECRET_CHARS} characters")
    return text


def read_secrets(path: Path) -> tuple[str, ...]:
    """Return the secrets of a file, one per line. Raises ConfigError without any, or for a short one."""
    found = tuple(filter(None, map(str.strip, _read_file(path, "`fairway up` creates it").splitlines())))
    if not found or min(map(len, found)) < MIN_SECRET_CHARS:
        raise ConfigError(f"a secret in {path} has less than {MIN_SECRET_CHARS} characters")
    return found


def read_password(path: Path) -> str:
    """Return a password of any length above zero, which another system chose. Raises ConfigError."""
    text = _read_file(path, "write the password into it")
    if not text:
        raise ConfigError(f"the password file {path} is empty: write the password into it")
    return text


def _read_file(path: Path, next_step: str) -> str:
    try:
        return path.read_text("utf-8").strip()
    except OSError as exc:
        raise ConfigError(f"cannot read the secret {path}: {exc.strerror}; {next_step}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"the secret {path} is not UTF-8 text: {exc.reason}; {next_step}") from exc
