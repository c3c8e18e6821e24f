"""Settings of an Appliance: an explicit argument wins, then a PENSTOCK_* variable, then torchrun's variables, then the
settings file (sections [cluster] and [client]), then the default.

With plain data parallelism each rank is a box, so RANK and WORLD_SIZE are used for box and num_boxes. With tensor or
pipeline parallelism only the script can determine the box, so it must pass both."""

from __future__ import annotations

import os
from typing import Any

from pydantic import ValidationError, field_validator

from penstock.client.stream.device import check_device
from penstock.proto.errors import BoxOutOfRangeError, InvalidArgumentError
from penstock.proto.lane.compression import require
from penstock.runtime.config.job_settings import JobSettings, check_file
from penstock.runtime.config.settings import field_of, reason_of, source_of

__all__ = ["ApplianceSettings", "Torchrun", "attempt_key", "resolve", "resolve_given"]


class ApplianceSettings(JobSettings):
    @field_validator("device")
    @classmethod
    def _usable(cls, device: str) -> str:
        return device and check_device(device)

    @property
    def slots_per_box(self) -> int:
        return max(1, self.num_workers_per_box)


def resolve(**given: Any) -> ApplianceSettings:
    """Return the settings from arguments (None: not given), environment and settings file."""
    return _resolved(ApplianceSettings, given)


class _GivenOnly(ApplianceSettings):
    only_given = True


def resolve_given(**given: Any) -> ApplianceSettings:
    return _resolved(_GivenOnly, given)


def _resolved(kind: type[ApplianceSettings], given: dict[str, Any]) -> ApplianceSettings:
    explicit = {name: value for name, value in given.items() if value is not None}
    for name in ("tls_ca", "tls_cert", "tls_key"):
        if name in explicit:
            explicit[name] = os.fspath(explicit[name])
    device = explicit.get("device")
    if device is not None:
        explicit["device"] = str(device)  # accepts a torch.device too
    if explicit.get("num_boxes") == 1 and not os.environ.get("PENSTOCK_BOX"):
        explicit.setdefault("box", 0)  # box 0 of its own loader, even under torchrun: RANK does not apply
    if kind is ApplianceSettings:
        check_file()
    try:
        settings = kind(**explicit)
    except ValidationError as error:
        raise InvalidArgumentError(_explain(error, explicit)) from None
    if settings.compression is not None:
        require(settings.compression)
    if not settings.address and any(name.startswith("tls_") for name in explicit):
        raise InvalidArgumentError(
            "Appliance: tls_* arguments need an address, got none: an embedded coordinator is reached on this machine "
            "alone. Pass address, or leave out the tls_* arguments"
        )
    if not 0 <= settings.box < settings.num_boxes:
        source = "" if "box" in explicit else f" (from {_source('box')})"
        raise BoxOutOfRangeError(
            f"box must be from 0 to {settings.num_boxes - 1} (num_boxes={settings.num_boxes}), got {settings.box}"
            f"{source}: pass both box= and num_boxes=, or neither under torchrun"
        )
    if settings.num_workers_per_box == 0 and settings.synthetic:
        raise InvalidArgumentError(
            "Appliance: synthetic must be False with num_workers_per_box=0, got True: synthetic batches are made by "
            "workers, and there are none. Leave out synthetic= and PENSTOCK_SYNTHETIC, or pass num_workers_per_box >= 1"
        )
    return settings


def _source(name: str) -> str:
    return source_of(ApplianceSettings, name) or "its default"


def _explain(error: ValidationError, explicit: dict[str, Any]) -> str:
    parts = []
    for detail in error.errors():
        name = field_of(ApplianceSettings, detail["loc"])
        source = "" if name in explicit or name not in ApplianceSettings.model_fields else f" (from {_source(name)})"
        shown = "" if name == "token" else f"={detail['input']!r}"
        parts.append(f"{name}{shown}{source}: {reason_of(detail)}")
    return "Appliance: " + "; ".join(parts)


class Torchrun:
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


def attempt_key(settings: ApplianceSettings, torchrun: Torchrun) -> str:
    """Return a key of this launch of the job, the same on all boxes; "" if neither attempt= nor torchrun gives one."""
    if settings.attempt or not torchrun.present:
        return settings.attempt
    return f"{torchrun.master}:{torchrun.restarts}"
