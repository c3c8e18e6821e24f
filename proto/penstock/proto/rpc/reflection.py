"""Server reflection of gRPC, by which programs such as grpcurl and Postman list the methods without the .proto files.

The service is optional: it needs the package grpcio-reflection (`pip install 'penstock[reflection]'`), and returns the
content of coordinator.proto to callers with a token of any role.
"""

from __future__ import annotations

from typing import Any

__all__ = ["add_reflection"]


def add_reflection(service: str, server: Any) -> bool:
    """Add gRPC's reflection service to a server, so that programs can list the methods of `service`. Return False if
    the package grpcio-reflection is not installed."""
    try:
        from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
    except ImportError:
        return False
    servicer = reflection.aio.ReflectionServicer((service, reflection.SERVICE_NAME))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    return True
