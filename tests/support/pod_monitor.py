"""The PodMonitor of monitoring.coreos.com/v1, as far as our manifests use it, strictly: an unknown field is an error.

It is the Prometheus operator's and no part of Kubernetes; this model is written after the API's reference.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["PodMonitor"]

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Metadata(_Strict):
    name: Name
    labels: dict[str, str] = {}


class SecretKey(_Strict):
    """Reference to a key of a Secret in the PodMonitor's namespace."""

    name: Name
    key: str


class _SecretOrConfigMap(_Strict):
    secret: SecretKey


class _Tls(_Strict):
    ca: _SecretOrConfigMap
    cert: _SecretOrConfigMap
    keySecret: SecretKey
    serverName: str


class _Authorization(_Strict):
    type: Literal["Bearer"] = "Bearer"
    credentials: SecretKey


class _Endpoint(_Strict):
    port: str
    path: str = "/metrics"
    scheme: Literal["http", "https"] = "http"
    tlsConfig: _Tls
    authorization: _Authorization


class _Selector(_Strict):
    matchLabels: dict[str, str]


class _Spec(_Strict):
    selector: _Selector
    podMetricsEndpoints: Annotated[list[_Endpoint], Field(min_length=1)]


class PodMonitor(_Strict):
    """A whole document."""

    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: _Metadata
    spec: _Spec
