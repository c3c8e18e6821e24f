"""Settings of a training job, by variables or the settings file; some are arguments of an Appliance too.

They are declared here, not in the client, so that `penstock config` can show them without torch. torchrun's variables
rank between Penstock's own and the settings file: see penstock.client.api.appliance_settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AliasChoices, Field, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from penstock.proto.errors import InvalidArgumentError
from penstock.proto.rpc.tls import Tls, load_tls
from penstock.runtime.config.settings import FilePath, Section, Unit, source_of
from penstock.runtime.config.settings_file import CLUSTER, read_settings_file, token_file_of_settings

_ONE_JOB = "this setting is for one job, but all jobs read this file: pass it to Appliance, or set its variable"


class TlsFiles(Section):
    """TLS settings of every process that listens or calls the coordinator: names of files, which are not secret."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_")
    table: ClassVar[str] = CLUSTER
    role: ClassVar[str] = "*"
    """Role of the process, for the `*` in `credentials`; "*": leave it."""
    FILES: ClassVar[tuple[str, ...]] = ("tls_ca", "tls_cert", "tls_key", "tls_name", "credentials")

    tls_ca: FilePath = Field(
        "",
        description="File with the CA that must have signed the other end's certificate; a coordinator with it "
        "requires certificates of its callers.",
    )
    tls_cert: FilePath = Field("", description="File with the certificate to show.")
    tls_key: FilePath = Field("", description="File with the certificate's key, readable by its owner only.")
    tls_name: Annotated[str, Unit("NAME")] = Field(
        "", description="Name to expect in the other end's certificate, instead of its address; `*` = that end's role."
    )

    credentials: FilePath = Field(
        "",
        description="File with CA, certificate, key and token of this role, as `penstock up` writes it, instead of the "
        "TLS settings and the token; `*` = this role.",
    )

    insecure: bool = Field(
        False, description="Allow to listen beyond this machine, and to send tokens over TCP, without TLS."
    )

    @field_validator("credentials")
    @classmethod
    def _alone(cls, credentials: str, info: ValidationInfo) -> str:
        if credentials and (given := [name for name, value in info.data.items() if name.startswith("tls_") and value]):
            raise ValueError(f"credentials must be given without TLS settings, got {given[0]} too. Leave one out")
        return credentials.replace("*", cls.role)

    def tokens_in(self, given: str | os.PathLike[str] | None = None) -> str | os.PathLike[str] | None:
        """Return the file with the token: that of the credentials, else `given`. Raises InvalidArgumentError if a token
        is given, or set, besides credentials."""
        if not self.credentials:
            return given
        source = source_of(type(self), "credentials")  # none for an argument, which precedes variables
        set_too = [name for name in ("PENSTOCK_TOKEN", "PENSTOCK_TOKEN_FILE") if source and os.environ.get(name)]
        if source not in ("", "PENSTOCK_CREDENTIALS") and token_file_of_settings():
            set_too.append("token_file")
        if given or set_too:
            raise InvalidArgumentError(
                f"credentials={self.credentials} must be given without another token, got "
                f"{set_too[0] if set_too else os.fspath(given or '')} too. Leave one out"
            )
        return self.credentials

    def tls(self) -> Tls | None:
        """Return the TLS files, checked; None without TLS. Raises TlsError, which names the file and the remedy."""
        if file := self.credentials:
            return load_tls(file, file, file, "*.penstock")
        return load_tls(self.tls_ca, self.tls_cert, self.tls_key, self.tls_name)


class JobSettings(TlsFiles):
    """Settings of a training job. What is about one job alone can be an argument of `Appliance(...)` too."""

    # Always with the prefix, because other programs use the variables JOB, SEED and DEVICE.
    model_config = SettingsConfigDict(populate_by_name=True, env_prefix="PENSTOCK_")
    table: ClassVar[str] = "client"
    role: ClassVar[str] = "client"
    places: ClassVar[Mapping[str, tuple[str, str]]] = {
        "address": (CLUSTER, "coordinator"),
        **{name: (CLUSTER, name) for name in TlsFiles.model_fields},
    }
    not_in_file: ClassVar[Mapping[str, str]] = {
        "token": "it is a secret: name its file, token_file in [cluster]",
        **dict.fromkeys(("box", "num_boxes", "job", "attempt"), _ONE_JOB),
    }

    address: str = Field(
        "",
        validation_alias=AliasChoices("PENSTOCK_ADDRESS", "PENSTOCK_COORDINATOR"),
        description="HOST:PORT of the coordinator (default: embedded, all on this machine).",
    )
    num_workers_per_box: int = Field(
        1, ge=0, le=4096, description="Workers that feed each box; 0: batches are made in this process, to debug."
    )
    box: int = Field(
        0, validation_alias=AliasChoices("PENSTOCK_BOX", "RANK"), description="Number of this box, from 0."
    )
    num_boxes: int = Field(
        1, ge=1, validation_alias=AliasChoices("PENSTOCK_NUM_BOXES", "WORLD_SIZE"), description="Boxes of the job."
    )
    job: str = Field("", description="Name of the job (default: torchrun's, or fresh).")
    seed: int | None = Field(None, ge=0, lt=1 << 64, description="Seed of new runs (default: a fresh one for each).")
    attempt: str = Field("", description="Id of this launch of the job, the same on all boxes.")
    lane: Literal["auto", "tcp"] = Field(
        "auto", description="Transport of batches: auto (shared memory on the same host, else TCP) or tcp (always TCP)."
    )
    compression: Literal["lz4", "zstd"] | None = Field(
        None, description="Compression of batches over TCP, if the worker has it too: lz4 or zstd (default: none)."
    )
    max_batch_bytes: int = Field(1 << 30, ge=1, description="Largest batch, bytes; a larger batch is an error.")
    digest: Literal["sample", "full", "rows"] | None = Field(
        None, description="Bytes that digests cover: sample, full or rows (default: as in the state, else sample)."
    )
    strict_structure: bool = Field(False, description="Error for a batch of another structure than the first batch's.")
    replay: bool = Field(False, description="Saving of loaders without state methods too, by replay of their batches.")
    replay_s: float = Field(
        2.0, ge=0, description="Seconds of work up to which an epoch is made again from its beginning (inf: always)."
    )
    retention_steps: int = Field(256, ge=1, description="Number of latest steps for which a state can be saved.")
    timeout_s: float = Field(
        120.0, gt=0, allow_inf_nan=False, description="Deadline of every wait of the training loop, seconds."
    )
    poison: Literal["fail", "skip"] = Field(
        "fail", description="Action for a batch that kills its runner repeatedly: fail or skip."
    )
    synthetic: bool = Field(
        False, description="Repetition of each worker's first batch, to measure a job without the cost of its input."
    )
    http: str = Field("", description="HOST:PORT of metrics; ranks of a host take PORT + LOCAL_RANK (default: none).")
    device: str = Field("", description="Device of the batches: cuda, cuda:N or cpu (default: shared memory).")

    @field_validator("job")
    @classmethod
    def _one_name(cls, job: str) -> str:
        if "/" in job or len(job) > 200 or not job.isprintable():
            raise ValueError("a job's name must have at most 200 printable characters, and no slash")
        return job


CLUSTER_KEYS = frozenset(
    {*(key for table, key in JobSettings.places.values() if table == CLUSTER), "token_file", "log_format"}
)
"""Keys that the section [cluster] of the settings file may have."""


_SHARED = dict.fromkeys(CLUSTER_KEYS, "it is shared by the whole cluster and belongs in [cluster]")


def check_file(*sections: type[Section]) -> None:
    """Raise InvalidArgumentError if the settings file has an unknown key in [cluster] or in these sections."""
    file = read_settings_file()
    if file is None:
        return
    file.check(CLUSTER, CLUSTER_KEYS, {})
    for section in sections:
        known = [name for name in section.model_fields if section.place(name) == (section.table, name)]
        elsewhere = {name: f"it goes into [{table}], as {key}" for name, (table, key) in section.places.items()}
        file.check(section.table, known, {**_SHARED, **elsewhere, **section.not_in_file})
