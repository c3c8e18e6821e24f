"""Promise of penstock.proto.v1 to programs that were built against it, and the changes that break it.

The promise is a file, `tests/proto/baseline.json`: each message's fields by number, each enum's values, each
method's types. It is read from the descriptors of the generated code, so no tool and no download is needed. What was
added since is no break, and enters the promise by `make proto-baseline`, which refuses to write a broken one.

Three rules. What the read-only calls can reach never changes: programs of others depend on it, and no protocol number
tells them. Of the other messages a field may go if its number and name are reserved. Anything else needs a new number
of the protocol that speaks it (PROTOCOL, for lane.proto LANE_PROTOCOL), which refuses peers of the old one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto

from penstock.proto.lane.frames import LANE_PROTOCOL
from penstock.proto.rpc.credentials.roles import READ_ONLY
from penstock.proto.rpc.version import PROTOCOL
from penstock.proto.v1 import coordinator_pb2, lane_pb2, records_pb2

BASELINE = Path(__file__).parents[1] / "proto" / "baseline.json"
FILES: tuple[FileDescriptor, ...] = (coordinator_pb2.DESCRIPTOR, lane_pb2.DESCRIPTOR, records_pb2.DESCRIPTOR)
SCALARS = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_")
}
Contract = dict[str, Any]


def described() -> Contract:
    """Return the contract that the generated code has now."""
    contract: Contract = {
        "protocol": PROTOCOL,
        "lane_protocol": LANE_PROTOCOL,
        "messages": {},
        "enums": {},
        "methods": {},
    }
    for file in FILES:
        lane = file.name.endswith("lane.proto")
        for message in _messages(file.message_types_by_name.values()):
            contract["messages"][message.full_name] = {**_message(message), **({"lane": True} if lane else {})}
        for enum in file.enum_types_by_name.values():
            contract["enums"][enum.full_name] = _values(enum)
        for service in file.services_by_name.values():
            for method in service.methods:
                takes = "stream " * method.client_streaming + method.input_type.full_name
                gives = "stream " * method.server_streaming + method.output_type.full_name
                contract["methods"][f"{service.full_name}/{method.name}"] = [takes, gives]
    return contract


def _messages(found: Any) -> Iterator[Descriptor]:
    for message in found:
        yield message
        yield from _messages(message.nested_types)


def _message(message: Descriptor) -> Contract:
    proto = DescriptorProto()
    message.CopyToProto(proto)
    numbers = [number for taken in proto.reserved_range for number in range(taken.start, taken.end)]
    fields = {str(field.number): _field(field) for field in sorted(message.fields, key=lambda one: one.number)}
    reserved = {"reserved": [*numbers, *proto.reserved_name]} if numbers or proto.reserved_name else {}
    return {"fields": fields, **reserved}


def _field(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    # What is absent is told from 0 where there is presence: for readers that is a part of the type.
    how = "repeated " if field.is_repeated else "optional " if field.has_presence and not field.message_type else ""
    return f"{how}{kind.full_name if kind is not None else SCALARS[field.type]} {field.name}"


def _values(enum: EnumDescriptor) -> dict[str, str]:
    return {str(value.number): value.name for value in enum.values}


def public(contract: Contract) -> set[str]:
    """Messages and enums that the read-only calls can reach."""
    to_see = [
        name.removeprefix("stream ")
        for method, types in contract["methods"].items()
        if method.rpartition("/")[2] in READ_ONLY
        for name in types
    ]
    seen: set[str] = set()
    while to_see:
        name = to_see.pop()
        if name in seen or name not in contract["messages"].keys() | contract["enums"].keys():
            continue
        seen.add(name)
        fields = contract["messages"].get(name, {"fields": {}})["fields"]
        to_see += [field.split(" ")[-2] for field in fields.values()]
    return seen


def breaks(before: Contract, now: Contract) -> list[str]:
    """Why a program that was built against `before` cannot rely on `now`; empty: it can."""
    found: list[str] = []
    for method, types in before["methods"].items():
        fixed = method.rpartition("/")[2] in READ_ONLY
        if now["methods"].get(method) != types and (fixed or now["protocol"] <= before["protocol"]):
            found.append(f"method {method} was {types}, is {now['methods'].get(method, 'gone')}")
    read = public(before)
    for name, message in before["messages"].items():
        lanes = "lane_protocol" if message.get("lane") else "protocol"
        if name in read or now[lanes] <= before[lanes]:
            found += _changed(name, message, now["messages"].get(name), may_go=name not in read)
    for name, values in before["enums"].items():
        left = now["enums"].get(name, {})
        if name in read or now["protocol"] <= before["protocol"]:
            found += [
                f"enum {name}: {number} was {value}, is {left.get(number, 'gone')}"
                for number, value in values.items()
                if left.get(number) != value
            ]
    return found


def _changed(name: str, before: Contract, now: Contract | None, *, may_go: bool) -> list[str]:
    if now is None:
        return [f"message {name} is gone"]
    found = []
    reserved = now.get("reserved", [])
    for number, field in before["fields"].items():
        left = now["fields"].get(number)
        gone_well = left is None and may_go and int(number) in reserved and field.split(" ")[-1] in reserved
        if left != field and not gone_well:
            found.append(f"message {name}: field {number} was {field!r}, is {left or 'gone'!r}")
    for one in before.get("reserved", []):
        if one not in reserved:
            found.append(f"message {name}: {one!r} is no longer reserved")
    return found


def main() -> int:
    now = described()
    found = breaks(json.loads(BASELINE.read_text()), now) if BASELINE.exists() else []
    if found:
        print("proto-baseline: programs built against the baseline would break:", *found, sep="\n  ", file=sys.stderr)
        return 1
    BASELINE.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
