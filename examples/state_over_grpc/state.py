"""State of a run over gRPC, with protoc's output for Penstock's .proto files: neither Penstock nor torch.

    pip install grpcio grpcio-tools
    python -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. \
        proto/penstock/proto/v1/coordinator.proto proto/penstock/proto/v1/records.proto
    PENSTOCK_TOKEN=... python state.py unix:/home/me/.local/state/penstock/socket myjob/0

It prints a line of JSON for each worker of each box. With PENSTOCK_TLS_CA, the path of a CA's certificate, it connects
over TLS. To another address than a Unix socket it sends the token only over TLS, or with PENSTOCK_INSECURE=true.
"""

import json
import os
import sys
from pathlib import Path

import grpc

from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1.coordinator_pb2_grpc import CoordinatorStub


def connect(address: str) -> grpc.Channel:
    ca = os.environ.get("PENSTOCK_TLS_CA")
    if ca is not None:
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(Path(ca).read_bytes()))
    if not address.startswith("unix:") and os.environ.get("PENSTOCK_INSECURE") != "true":
        sys.exit(f"the token would go to {address} in clear text: set PENSTOCK_TLS_CA=FILE, or PENSTOCK_INSECURE=true")
    return grpc.insecure_channel(address)


def main(address: str, run: str) -> None:
    metadata = (("authorization", f"Bearer {os.environ['PENSTOCK_TOKEN']}"),)
    request = pb.FetchStateRequest(run=run, newest=True, deadline_s=60, format=pb.STATE_JSON)
    records: list[tuple[pb.WorkerRecord, bytearray]] = []
    with connect(address) as channel:
        for part in CoordinatorStub(channel).FetchState(request, timeout=90, metadata=metadata):
            if part.HasField("record"):  # the next worker; large states continue in parts without one
                records.append((part.record, bytearray()))
            records[-1][1].extend(part.data)
    for record, data in records:
        state = json.loads(data)
        line = {
            "worker": record.box * record.num_workers_per_box + record.local_worker_id,
            "step": record.step,
            "worker_step": record.worker_step,
            "samples_streamed": record.samples_streamed,
            "user_state_dict": None if state is None else state["user"],
        }
        print(json.dumps(line))


main(*sys.argv[1:])
