"""Options of an Appliance, and its settings: an option wins, then a PENSTOCK_* variable, then torchrun's variables,
then the settings file (sections [cluster] and [client]), then the default.

Each option is declared once for users, here, with its type and meaning: signatures and pages are made from that. Its
default, limits and variable are in penstock.runtime.config.job_settings, which needs no torch.

With plain data parallelism each rank is a box, so RANK and WORLD_SIZE are used for box and num_boxes, or else what
torch.distributed was initialised with. With tensor or pipeline parallelism only the script can determine the box, so it
must pass both."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, get_type_hints

import torch
from pydantic import ValidationError, field_validator

from penstock.client.stream.device import check_device
from penstock.proto.errors import BoxOutOfRangeError, InvalidArgumentError
from penstock.proto.lane.compression import require
from penstock.runtime.config.job_settings import JobSettings, check_file
from penstock.runtime.config.settings import field_of, reason_of, source_of
from penstock.runtime.process.ranks import distributed_ranks, launched_ranks, process_age_s

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
"""Values of MASTER_ADDR with which all ranks are on one machine."""


class ApplianceOptions(TypedDict, total=False):
    """Options of an Appliance, besides its address; in brackets their defaults. What is not about one job is set by
    variables and the settings file alone: `penstock config` lists it."""

    num_workers_per_box: int | None
    """Number of worker slots, each with a process that runs input_fn, for each box (1). 0: input_fn runs in this
    process and thread, even with an address, so that breakpoint(), print() and profilers work (docs/debugging.md).
    Batches and states are those of one worker."""
    box: int | None
    """Number of this box, from 0 (0)."""
    num_boxes: int | None
    """Number of boxes (1)."""
    job: str | None
    """Name of the job. A job that is started again under its name takes over its runs (torchrun's run id unless that is
    "none", else a new name). With an address and several boxes a job must have a name."""
    seed: int | None
    """Seed of the run, 0 to 2**64 - 1 (that of the resumed run, else a random one)."""
    device: str | torch.device | None
    """Device where tensors arrive, as copies in memory of their own: "cuda", "cuda:N" or "cpu". With CUDA the next
    batch is copied on a separate stream while the loop computes, which takes device memory for two batches. "cuda" is
    the device that is current when the loop starts, so under torchrun call torch.cuda.set_device(LOCAL_RANK) first.
    None: batches are views of the shared memory that workers fill."""
    digest: Literal["sample", "full", "rows"] | None
    """Bytes that a batch's digest covers (docs/guarantees.md): "sample" (of large tensors a sample; 1 to 6 us), "full"
    (every byte, 20 us a MiB), or "rows" (the sum of the digests of all rows, to compare runs on different numbers of
    boxes, see DataExecutor.digest). Default: that of the loaded state, else "sample"."""
    replay: bool | None
    """Save loaders without state methods too, by counting their batches and replaying them (False)."""
    poison: Literal["fail", "skip"] | None
    """Treatment of a batch that kills its runner (the worker process that makes it) each time: "fail" ends the stream
    before it with an error, "skip" leaves it out, with a warning and a count in DataExecutor.stats ("fail"). "skip"
    needs a loader that can skip a batch (docs/faults.md)."""
    timeout_s: float | None
    """Longest wait in seconds: for a batch, for a state, for the start of the daemons (120)."""


def signature_of(init: Callable[..., None]) -> inspect.Signature:
    """Return the signature of an __init__(self, ..., **options) with each option by name."""
    _, *own, _ = inspect.signature(init).parameters.values()
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in get_type_hints(ApplianceOptions).items()
    ]
    return inspect.Signature([*own, *named])


def check_names(given: Mapping[str, Any]) -> None:
    known = ApplianceOptions.__annotations__.keys()
    if unknown := sorted(given.keys() - known):
        raise TypeError(f"{unknown[0]!r} is no option here: pass some of {', '.join(sorted(known))}")


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
    device = explicit.get("device")
    if device is not None:
        explicit["device"] = str(device)  # accepts a torch.device too
    if explicit.get("num_boxes") == 1 and not os.environ.get("PENSTOCK_BOX"):
        explicit.setdefault("box", 0)  # box 0 of its own loader, even under torchrun: RANK does not apply
    if kind is ApplianceSettings and not given_ranks(given):
        ranks = launched_ranks()
        if ranks is not None and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            explicit["box"], explicit["num_boxes"] = ranks
    if kind is ApplianceSettings:
        check_file(JobSettings)
    try:
        settings = kind(**explicit)
    except ValidationError as error:
        raise InvalidArgumentError(_explain(error, explicit)) from None
    if settings.compression is not None:
        require(settings.compression)
    if not 0 <= settings.box < settings.num_boxes:
        source = "" if "box" in explicit else f" (from {_source('box')})"
        raise BoxOutOfRangeError(
            f"box must be from 0 to {settings.num_boxes - 1} (num_boxes={settings.num_boxes}), got {settings.box}"
            f"{source}: pass both box= and num_boxes=, or neither under torchrun"
        )
    if settings.num_workers_per_box == 0 and settings.synthetic:
        raise InvalidArgumentError(
            f"Appliance: synthetic (from {_source('synthetic')}) must be False with num_workers_per_box=0, where no "
            "worker makes batches, got True"
        )
    return settings


def given_ranks(given: Mapping[str, Any]) -> frozenset[str]:
    """Return which of box and num_boxes are set by arguments or PENSTOCK_* variables, not by the launcher."""
    names = {name for name in ("box", "num_boxes") if given.get(name) is not None}
    names |= {name for name in ("box", "num_boxes") if os.environ.get(f"PENSTOCK_{name.upper()}")}
    return frozenset(names | ({"box"} if given.get("num_boxes") == 1 else set()))


def check_ranks(settings: ApplianceSettings, given: frozenset[str]) -> None:
    """Raise InvalidArgumentError if torch.distributed tells another box or number of boxes than the settings, in which
    `given` ones are by arguments or variables. Tensor-parallel ranks, for example, have a box's number of their own."""
    ranks = distributed_ranks()
    ours = {"box": settings.box, "num_boxes": settings.num_boxes}
    if ranks is None or all(
        name in given or ours[name] == by_torch for name, by_torch in zip(ours, ranks, strict=True)
    ):
        return
    raise InvalidArgumentError(
        f"Appliance must have box={ranks[0]} and num_boxes={ranks[1]}, as torch.distributed was initialised after it, "
        f"got box={settings.box} and num_boxes={settings.num_boxes}: make it after init_process_group, start the ranks "
        "with torchrun, which sets RANK and WORLD_SIZE, or pass box= and num_boxes="
    )


def _source(name: str) -> str:
    return source_of(ApplianceSettings, name) or "its default"


def _explain(error: ValidationError, explicit: dict[str, Any]) -> str:
    parts = []
    for detail in error.errors():
        name = field_of(ApplianceSettings, detail["loc"])
        source = "" if name in explicit or name not in ApplianceSettings.model_fields else f" (from {_source(name)})"
        parts.append(f"{name}={detail['input']!r}{source}: {reason_of(detail)}")
    return "Appliance: " + "; ".join(parts)


class Launcher:
    """What the launcher's variables and torch.distributed tell of this process and of the job's other ranks."""

    def __init__(self) -> None:
        env: Mapping[str, str] = os.environ
        ranks = distributed_ranks()
        torchrun = "TORCHELASTIC_RUN_ID" in env or {"RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"} <= env.keys()
        self.present = torchrun or ranks is not None
        env = env if self.present else {}
        rank, self.world_size = ranks or (int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1")))
        self.local_rank = int(env.get("LOCAL_RANK", rank))
        self._local_world_size = env.get("LOCAL_WORLD_SIZE", "")
        self._address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
        self.run_id = env.get("TORCHELASTIC_RUN_ID", "")
        self.launch = f"{self.run_id}@{self._address}:{port}" if port else ""
        """Equal on all ranks of a launch, and perhaps on those of later ones; "" if unknown."""
        self.key = self.launch if torchrun else ""
        self.restarts = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        """How often the launcher of this machine has restarted its ranks by itself: another machine's count differs."""
        self.began = time.monotonic() - process_age_s()

    @property
    def one_host(self) -> bool:
        if self._local_world_size:
            return int(self._local_world_size) == self.world_size
        return bool(self.launch) and self._address in LOOPBACK


def attempt_key(settings: ApplianceSettings, launcher: Launcher) -> str:
    """Return a key of this launch of the job, the same on all boxes; "" if neither attempt= nor torchrun gives one.

    The ranks' restarts are not in it, because each machine counts its own: the coordinator sees by the boxes' processes
    which of them are of one round (OpenRunRequest.process_age_s)."""
    return settings.attempt or launcher.key
