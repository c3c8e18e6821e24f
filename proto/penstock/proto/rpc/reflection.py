"""gRPC's server reflection: a caller can list the methods, and needs no .proto files (grpcurl, Postman).

Optional: it is served where the package grpcio-reflection is installed, `pip install 'penstock[reflection]'`. It
returns the content of coordinator.proto, only to callers with a token of any role.
"""

from __future__ import annotations

from typing import Any

__all__ = ["add_reflection"]


def add_reflection(service: str, server: Any) -> bool:
    """Adds the reflection service that describes `service`, and itself; false if its package is not installed."""
    try:
        from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
    except ImportError:
        return False
    servicer = reflection.aio.ReflectionServicer((service, reflection.SERVICE_NAME))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    return True
