"""Configuration of a role: environment variables with the prefix FAIRWAY_, parsed once at the start.

An unknown FAIRWAY_ variable or a bad value stops the start with a message that names it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

PREFIX = "FAIRWAY_"
Address = Annotated[str, Field(pattern=r"^[^\s:]+:\d{1,5}$")]
StoreAddress = Annotated[str, Field(pattern=r"^([^\s:]+:\d{1,5}|unix:/[^\s,]+)$")]


class ConfigError(Exception):
    """The environment does not configure a role; the message says which variable and what to do."""


class Settings(BaseModel):
    """Everything a role can be told. Sizes in bytes, times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    etcd_endpoints: tuple[StoreAddress, ...] = ("127.0.0.1:2379",)
    redis_url: str = "redis://127.0.0.1:6379/0"
    redis_password_file: Path | None = None
    listen: Address = "127.0.0.1:0"
    advertise: Address | None = None
    http_listen: Address = "127.0.0.1:8080"
    metrics_listen: Address = "127.0.0.1:0"
    state_dir: Path = Path(".fairway/state")
    internal_token_file: Path = Path(".fairway/secrets/internal_token")
    ticket_key_file: Path = Path(".fairway/secrets/ticket_key")
    admin_key_file: Path | None = None
    registry: Address = "127.0.0.1:9091"
    blob_store: str = Field(
        default="folder",
        pattern=r"^(folder|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._/-]{0,512})?)$",
    )
    s3_endpoint: str = Field(default="", pattern=r"^(https?://[^\s/@]+/?)?$")
    s3_region: str = Field(default="us-east-1", pattern=r"^[a-z0-9-]{1,64}$")
    s3_path_style: bool = True
    s3_credentials_file: Path | None = None
    s3_ca_file: Path | None = None
    worker_id: str = Field(default="worker-0", pattern=r"^[a-z0-9]([a-z0-9.-]{0,126}[a-z0-9])?$")
    zone: str = Field(default="", max_length=64)
    labels: dict[str, str] = Field(default_factory=dict, max_length=32)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"
    request_log_per_s: float = Field(default=200.0, ge=0, le=1_000_000)
    otlp_endpoint: str = Field(default="", pattern=r"^(https?://)?[^\s:/]+:\d{1,5}$|^$")
    trace_ratio: float = Field(default=0.01, ge=0, le=1)
    drain_s: float = Field(default=10.0, ge=0, le=3600)
    lease_ttl_s: int = Field(default=5, ge=1, le=120)
    leader_ttl_s: int = Field(default=2, ge=1, le=120)

    device: str = "cpu"
    device_type: str = Field(default="", pattern=r"^([a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?)?$")
    cost_per_hour: float = Field(default=0.0, ge=0, le=1_000_000)
    memory_bytes: int = Field(default=2 * 1024**3, ge=1024**2)
    kv_memory_bytes: int = Field(default=256 * 1024**2, ge=1024**2)
    engine_threads: int = Field(default=0, ge=0, le=1024)
    token_budget: int = Field(default=512, ge=16, le=65536)
    max_sequences: int = Field(default=64, ge=1, le=4096)
    itl_target_s: float = Field(default=0.05, ge=0, le=60)
    engine_dtype: Literal["float32", "bfloat16"] = "float32"
    engine_mode: Literal["auto", "exact", "free"] = "auto"
    engine_operators: Literal["auto", "native", "torch"] = "auto"
    prefix_cache: bool = True
    speculation: Literal["off", "prompt_lookup", "draft"] = "off"
    max_proposals: int = Field(default=8, ge=1, le=64)
    null_step_s: float = Field(default=0.0, ge=0, le=60)
    model_cache_bytes: int = Field(default=20 * 1024**3, ge=1024**2)

    queue_ttl_s: float = Field(default=30.0, gt=0, le=3600)
    queue_limit: int = Field(default=4096, ge=1, le=1_000_000)
    fallback_after_s: float = Field(default=1.5, gt=0, le=60)
    fallback_max_age_s: float = Field(default=120.0, gt=0, le=3600)
    fallback_credit_ratio: float = Field(default=0.25, ge=0, le=1)
    grant_ttl_s: float = Field(default=2.0, gt=0, le=20)
    shedding: bool = True
    ttft_target_interactive_s: float = Field(default=2.0, gt=0, le=3600)
    ttft_target_standard_s: float = Field(default=10.0, gt=0, le=3600)
    ejection_ratio: float = Field(default=2.0, ge=1.5, le=100)
    ejection_time_s: float = Field(default=30.0, gt=0, le=300)
    max_ejection_ratio: float = Field(default=0.3, ge=0, lt=1)
    degrade_cap_pressure_ratio: float = Field(default=0.6, gt=0, le=1)
    degrade_model_pressure_ratio: float = Field(default=0.85, gt=0, le=1)
    prefix_routing: bool = True
    predicted_output_tokens: int = Field(default=256, ge=1, le=1_048_576)
    output_quantile: float = Field(default=0.8, ge=0.1, le=0.99)
    class_head_start_s: float = Field(default=30.0, ge=0, le=3600)
    bypass_window_tokens: float = Field(default=32768.0, ge=0, le=1_000_000_000)
    max_body_bytes: int = Field(default=8 * 1024**2, ge=1024)
    heartbeat_s: float = Field(default=5.0, gt=0, le=300)
    detach_grace_s: float = Field(default=30.0, ge=0, le=3600)
    idempotency_lease_s: float = Field(default=5.0, ge=1, le=60)
    idempotency_body_s: float = Field(default=3600.0, ge=10, le=86_400)
    idempotency_tombstone_s: float = Field(default=86_400.0, ge=10, le=2_592_000)
    idempotency_tenant_keys: int = Field(default=1_000_000, ge=1, le=10_000_000)
    idempotency_tenant_bytes: int = Field(default=256 * 1024**2, ge=1024**2)

    @field_validator("etcd_endpoints", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part for part in value.split(",") if part) if isinstance(value, str) else value

    @field_validator("labels", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        """`gpu=h100,disk=fast` as a mapping."""
        if not isinstance(value, str):
            return value
        pairs = [part.partition("=") for part in value.split(",") if part]
        if any(not key or not equals for key, equals, _ in pairs):
            raise ValueError("labels are written key=value,key=value")
        return {key: text for key, _, text in pairs}

    @model_validator(mode="after")
    def _a_step_holds_every_sequence(self) -> Settings:
        if self.max_sequences > self.token_budget:
            raise ValueError(
                f"FAIRWAY_MAX_SEQUENCES is {self.max_sequences}, above FAIRWAY_TOKEN_BUDGET "
                f"{self.token_budget}: a step could not decode them all"
            )
        return self

    @model_validator(mode="after")
    def _outputs_are_capped_first(self) -> Settings:
        if self.degrade_cap_pressure_ratio > self.degrade_model_pressure_ratio:
            raise ValueError(
                "FAIRWAY_DEGRADE_CAP_PRESSURE_RATIO is above FAIRWAY_DEGRADE_MODEL_PRESSURE_RATIO: outputs "
                "are capped before smaller models answer"
            )
        return self

    @property
    def advertised(self) -> str:
        """host:port that other services reach this one at. Raises ConfigError when nobody could."""
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
        raise ConfigError(f"unknown setting {unknown[0]}; known: {', '.join(sorted(known))}")
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
    if len(text) < 32:
        raise ConfigError(f"the secret in {path} has less than 32 characters")
    return text


def read_password(path: Path) -> str:
    """Return a password that another system chose, of any length but none. Raises ConfigError."""
    text = _read_file(path, "write the password into it")
    if not text:
        raise ConfigError(f"the password file {path} is empty: write the password into it")
    return text


def _read_file(path: Path, next_step: str) -> str:
    try:
        return path.read_text().strip()
    except OSError as exc:
        raise ConfigError(f"cannot read the secret {path}: {exc.strerror}; {next_step}") from exc
