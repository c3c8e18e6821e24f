"""Settings of `penstock up`: flags take precedence over PENSTOCK_UP_* variables, those over the section [up] of the
settings file, and the file over defaults. The module imports little, because every command imports it."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field
from pydantic_settings import SettingsConfigDict

from penstock.deploy.console.daemon_settings import (
    DEFAULT_COORDINATOR,
    Count,
    LaneListen,
    MemorySize,
    Modules,
    Seconds,
    Section,
)
from penstock.runtime.config.settings import IsPath, Unit

__all__ = ["ENGINES", "UpSettings"]

ENGINES = ("local", "ray")


def _engine(value: str) -> str:
    if value not in ENGINES:
        raise ValueError(f"the engine must be one of {', '.join(ENGINES)}")
    return value


def _fleet_name(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?", value):
        raise ValueError(
            "a fleet's name must have 1 to 42 lowercase letters (a to z), digits and dashes, without a dash at its "
            "beginning or end"
        )
    return value


class UpSettings(Section):
    """Settings of `penstock up`."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_UP_")
    table: ClassVar[str] = "up"

    engine: Annotated[str, AfterValidator(_engine), Unit("ENGINE")] = Field(
        "local", description=f"Engine: {', '.join(ENGINES)}."
    )
    name: Annotated[str, AfterValidator(_fleet_name), Unit("NAME")] = Field(
        "penstock",
        description="Name of the fleet: lowercase letters, digits and dashes. Workers are called NAME-1, NAME-2.",
    )
    dir: Annotated[str, IsPath(), Unit("DIR")] = Field(
        "",
        description="Folder of the fleet's record, token and logs (default: XDG_STATE_HOME/penstock/NAME).",
    )
    workers: Count = Field(2, ge=1, le=10_000, description="Number of worker daemons.")
    slots: Count = Field(
        0,
        ge=0,
        le=4096,
        description="Runners of each worker at a time (default: local: the cores, divided among workers; else 8).",
    )
    allow: Modules = Field(
        "", description="Prefix of modules whose input_fn may run: mypackage, mypackage.data; repeatable. '*': any."
    )
    listen: LaneListen = Field(
        DEFAULT_COORDINATOR,
        description="Address of the coordinator, HOST:PORT; port 0 takes a free one. Ray: only the port is "
        "used, on its node's address.",
    )
    runner_memory: MemorySize = Field("", description="Memory limit of a runner, such as 4GiB: see `penstock worker`.")
    insecure: bool = Field(False, description="Listen beyond one machine without TLS.")
    timeout: Seconds = Field(120.0, ge=1, le=86_400, description="Seconds to wait until all is ready.")
    ray_address: Annotated[str, Unit("ADDRESS")] = Field(
        "auto", description="Ray: the cluster, as `ray.init` takes it: auto, HOST:PORT, ray://..."
    )
    near: Annotated[str, Unit("RESOURCE|KEY=VALUE")] = Field(
        "",
        description="Ray: put workers on nodes with this resource (accelerator_type:H100) or label (KEY=VALUE), such "
        "as "
        "those of the boxes.",
    )
    coordinator_node: Annotated[str, Unit("NODE")] = Field(
        "", description="Ray: id or address of the coordinator's node (default: the head node)."
    )
    send_token: bool = Field(
        False, description="Ray: send the token to the nodes through Ray, which stores it in clear text."
    )
    state_dir: Annotated[str, Unit("DIR")] = Field(
        "", description="Ray: the coordinator's journal, on a disk of its node (default: below /var/tmp)."
    )
