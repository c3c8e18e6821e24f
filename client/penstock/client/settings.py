"""Where a training job runs: the arguments of an Appliance over the environment over defaults.

An explicit argument wins, then a PENSTOCK_* variable, then what torchrun sets, then the default. torchrun's RANK and
WORLD_SIZE stand for box and num_boxes, because with plain data parallelism they are; with tensor or pipeline
parallelism the box is the data-parallel rank, which only the script knows, and it passes that itself.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import AliasChoices, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from penstock.client.device import check_device
from penstock.proto.compression import require
from penstock.proto.errors import BoxOutOfRangeError, InvalidArgumentError

__all__ = ["Settings", "Torchrun", "attempt_key", "resolve"]


def _named(name: str, *more: str) -> Any:
    """The variables of a setting. Never the bare name: JOB, SEED and DEVICE are other people's variables."""
    return AliasChoices(f"PENSTOCK_{name.upper()}", *more)


class Settings(BaseSettings):
    """What an Appliance was given, complete and checked."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, env_ignore_empty=True, env_prefix="PENSTOCK_"
    )

    address: str = Field("", validation_alias=_named("address", "PENSTOCK_COORDINATOR"))
    """ "host:port" of the coordinator; "" = embedded."""
    token: SecretStr = Field(SecretStr(""), validation_alias=_named("token"))
    tls_ca: str = Field("", validation_alias=_named("tls_ca"))
    """File with the CA of coordinator and workers; "" = no TLS."""
    tls_cert: str = Field("", validation_alias=_named("tls_cert"))
    tls_key: str = Field("", validation_alias=_named("tls_key"))
    tls_name: str = Field("", validation_alias=_named("tls_name"))
    """Name to expect in their certificates, instead of their addresses."""
    num_workers_per_box: int = Field(1, ge=1, le=4096, validation_alias=_named("num_workers_per_box"))
    box: int = Field(0, validation_alias=_named("box", "RANK"))
    num_boxes: int = Field(1, ge=1, validation_alias=_named("num_boxes", "WORLD_SIZE"))
    job: str = Field("", validation_alias=_named("job"))
    seed: int | None = Field(None, ge=0, lt=1 << 64, validation_alias=_named("seed"))
    attempt: str = Field("", validation_alias=_named("attempt"))
    lane: Literal["auto", "tcp"] = Field("auto", validation_alias=_named("lane"))
    compression: Literal["lz4", "zstd"] | None = Field(None, validation_alias=_named("compression"))
    """Of batches over TCP, where the worker has it too."""
    max_batch_bytes: int = Field(1 << 30, ge=1, validation_alias=_named("max_batch_bytes"))
    """Bytes; a batch above is an error."""
    digest: Literal["sample", "full"] | None = Field(None, validation_alias=_named("digest"))
    """What digests of batches cover; None = as the loaded state has it, else a sample."""
    strict_structure: bool = Field(False, validation_alias=_named("strict_structure"))
    replay: bool = Field(False, validation_alias=_named("replay"))
    retention_steps: int = Field(256, ge=1, validation_alias=_named("retention_steps"))
    """Delivered steps back for which a state can be had."""
    timeout_s: float = Field(120.0, gt=0, allow_inf_nan=False, validation_alias=_named("timeout_s"))
    """Seconds; the deadline of every wait."""
    poison: Literal["fail", "skip"] = Field("fail", validation_alias=_named("poison"))
    """What becomes of a batch that kills its runner again and again."""
    progress: bool = Field(False, validation_alias=_named("progress"))
    http: str = Field("", validation_alias=_named("http"))
    """ "host:port" of this process's metrics; "" = none."""
    otel: bool = Field(False, validation_alias=_named("otel"))
    """Trace calls to the coordinator."""
    device: str = Field("", validation_alias=_named("device"))
    """Where batches arrive; "" = in the ring."""

    @field_validator("device")
    @classmethod
    def _usable(cls, device: str) -> str:
        return device and check_device(device)

    @field_validator("job")
    @classmethod
    def _one_name(cls, job: str) -> str:
        if "/" in job:
            raise ValueError("a job's name cannot hold a slash, which separates it from the loader's number")
        if len(job) > 200 or not job.isprintable():
            raise ValueError("a job's name has at most 200 characters, all of them printable")
        return job


def resolve(**given: Any) -> Settings:
    """Settings from the arguments that were given (others are None) and the environment.

    Raises:
        InvalidArgumentError: a value that cannot be meant; names it and where it came from.
        BoxOutOfRangeError: the box does not lie in [0, num_boxes).
    """
    explicit = {name: value for name, value in given.items() if value is not None}
    for name in ("tls_ca", "tls_cert", "tls_key"):
        if name in explicit:
            explicit[name] = os.fspath(explicit[name])
    device = explicit.get("device")
    if device is not None:
        explicit["device"] = str(device)  # torch.device too
    if explicit.get("num_boxes") == 1 and not os.environ.get("PENSTOCK_BOX"):
        explicit.setdefault("box", 0)  # a loader of this rank's own under torchrun: RANK is not meant
    try:
        settings = Settings(**explicit)
    except ValidationError as error:
        raise InvalidArgumentError(_explain(error, explicit)) from error
    if settings.compression is not None:
        require(settings.compression)
    if not settings.address and any(name.startswith("tls_") for name in explicit):
        raise InvalidArgumentError(
            "Appliance: TLS is for a coordinator elsewhere, and no address was given: an embedded one never leaves "
            "this machine"
        )
    if not 0 <= settings.box < settings.num_boxes:
        source = "" if "box" in explicit else f" (from {_source('box')})"
        raise BoxOutOfRangeError(
            f"box {settings.box}{source} is not one of num_boxes={settings.num_boxes}: boxes count from 0 to "
            f"{settings.num_boxes - 1}; pass both box= and num_boxes=, or neither under torchrun"
        )
    return settings


def _source(name: str) -> str:
    """The variable that a setting came from."""
    for variable in Settings.model_fields[name].validation_alias.choices:  # type: ignore[union-attr]
        if os.environ.get(str(variable)):
            return str(variable)
    return "its default"


def _explain(error: ValidationError, explicit: dict[str, Any]) -> str:
    parts = []
    for detail in error.errors():
        place = str(detail["loc"][0]) if detail["loc"] else "the settings"
        name = next((field for field in Settings.model_fields if place in (field, f"PENSTOCK_{field.upper()}")), place)
        source = "" if name in explicit or name not in Settings.model_fields else f" (from {_source(name)})"
        shown = "" if name == "token" else f"={detail['input']!r}"
        parts.append(f"{name}{shown}{source}: {detail['msg']}")
    return "Appliance: " + "; ".join(parts)


class Torchrun:
    """What torchrun tells its processes; all empty outside it."""

    def __init__(self) -> None:
        env = os.environ
        self.present = "TORCHELASTIC_RUN_ID" in env or {"RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"} <= env.keys()
        self.run_id = env.get("TORCHELASTIC_RUN_ID", "") if self.present else ""
        self.master = f"{env.get('MASTER_ADDR', '')}:{env.get('MASTER_PORT', '')}" if self.present else ""
        self.restarts = env.get("TORCHELASTIC_RESTART_COUNT", "0") if self.present else "0"
        self.local_rank = int(env.get("LOCAL_RANK", "0")) if self.present else 0
        self.local_world_size = int(env.get("LOCAL_WORLD_SIZE", "1")) if self.present else 1
        self.world_size = int(env.get("WORLD_SIZE", "1")) if self.present else 1

    @property
    def one_host(self) -> bool:
        return self.present and self.local_world_size == self.world_size


def attempt_key(settings: Settings, torchrun: Torchrun) -> str:
    """The same on all boxes of one launch, and another one after a restart of them."""
    if settings.attempt or not torchrun.present:
        return settings.attempt
    return f"{torchrun.master}:{torchrun.restarts}"
