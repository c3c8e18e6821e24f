"""The JobSet of jobset.x-k8s.io/v1alpha2, as far as our manifests use it, strictly: an unknown field is an error.

Its schema is not among those that kubernetes-validate brings, for it is no part of Kubernetes; this model is written
after the API's reference. The Jobs inside are Kubernetes' own, and are validated by its schema: see `JobSet.jobs`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["JobSet"]

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Count = Annotated[int, Field(ge=0, strict=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Metadata(_Strict):
    name: Name
    namespace: Name | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _Network(_Strict):
    enableDNSHostnames: bool = True
    subdomain: Name | None = None
    publishNotReadyAddresses: bool = True


class _SuccessPolicy(_Strict):
    operator: Literal["All", "Any"]
    targetReplicatedJobs: list[Name] = []


class _FailurePolicy(_Strict):
    maxRestarts: Count = 0
    restartStrategy: Literal["Recreate", "BlockingRecreate"] = "Recreate"


class _DependsOn(_Strict):
    name: Name
    status: Literal["Ready", "Complete"]


class _JobTemplate(_Strict):
    metadata: dict[str, Any] = {}
    spec: dict[str, Any]


class _ReplicatedJob(_Strict):
    name: Name
    replicas: Count = 1
    template: _JobTemplate
    dependsOn: Annotated[list[_DependsOn], Field(max_length=1)] = []


class _Spec(_Strict):
    replicatedJobs: Annotated[list[_ReplicatedJob], Field(min_length=1)]
    network: _Network = _Network()
    successPolicy: _SuccessPolicy
    failurePolicy: _FailurePolicy
    suspend: bool = False
    ttlSecondsAfterFinished: Count | None = None

    @model_validator(mode="after")
    def _names(self) -> _Spec:
        names = [job.name for job in self.replicatedJobs]
        if len(set(names)) != len(names):
            raise ValueError(f"two jobs of one name: {names}")
        if unknown := set(self.successPolicy.targetReplicatedJobs) - set(names):
            raise ValueError(f"successPolicy names no job: {unknown}")
        for number, job in enumerate(self.replicatedJobs):
            if any(other.name not in names[:number] for other in job.dependsOn):
                raise ValueError(f"{job.name} depends on what is not before it")
        return self


class JobSet(_Strict):
    """A whole document."""

    apiVersion: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: _Metadata
    spec: _Spec

    def jobs(self) -> list[dict[str, Any]]:
        """The Jobs that the controller makes of it, the first of each kind."""
        return [
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {**job.template.metadata, "name": f"{self.metadata.name}-{job.name}-0"},
                "spec": job.template.spec,
            }
            for job in self.spec.replicatedJobs
        ]
