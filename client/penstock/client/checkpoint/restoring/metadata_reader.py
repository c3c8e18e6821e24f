"""Program that reads torch's index of a checkpoint, the pickle `.metadata`, from standard input, and writes it as
Penstock's index.json. Stand-ins take the place of torch's classes, so nothing that the pickle names is imported or
called."""

import io
import json
import pickle
import resource
import sys
from typing import Any

LARGEST = 1 << 30
"""Bytes of memory that any index may take, in addition to FACTOR times its length."""
FACTOR = 400


class StandIn:
    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:  # TensorProperties
            self.dtype = state[0]


def ignored(*_: object) -> None:
    """Stand-in for functions whose results nobody reads: a layout, a memory format, the path of the save."""


STAND_INS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("builtins", "getattr"): ignored,
    ("pathlib", "PosixPath"): ignored,
    ("pathlib._local", "PosixPath"): ignored,  # of Python 3.13
    ("torch.serialization", "_get_layout"): ignored,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StandIn,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): ignored,
    **{
        ("torch.distributed.checkpoint.metadata", name): StandIn
        for name in (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
            *("StorageMeta", "TensorProperties", "TensorStorageMetadata"),
        )
    },
}


class Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in STAND_INS:
            return STAND_INS[module, name]
        if module == "torch":
            return name  # a dtype
        raise pickle.UnpicklingError(f"the pickle names {module}.{name}, which no index of torch contains")


def index_of(metadata: Any) -> dict[str, Any]:
    tensors: list[Any] = []
    known: dict[int, int] = {}
    files: dict[str, int] = {}
    values: dict[str, Any] = {name: [None, path] for name, path in metadata.planner_data.items()}
    for name, saved in metadata.state_dict_metadata.items():
        if hasattr(saved, "properties"):
            values[name][0] = kind = known.setdefault(id(saved), len(tensors))
            if kind == len(tensors):
                chunks = [[chunk.offsets, chunk.sizes] for chunk in saved.chunks]
                tensors.append([saved.properties.dtype, saved.size, chunks])
    for entry, info in metadata.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise ValueError("its values are compressed or transformed, which only torch's dcp.load can undo")
        kind = values[entry.fqn][0]
        chunk = 0 if kind is None else [offsets for offsets, _ in tensors[kind][2]].index(entry.offset)
        file = files.setdefault(info.relative_path, len(files))
        values[entry.fqn] += [chunk, file, info.offset, info.length]
    return {"format": 1, "tensors": tensors, "files": list(files), "values": values}


def main() -> None:
    data = sys.stdin.buffer.read()
    largest = LARGEST + FACTOR * len(data)
    resource.setrlimit(resource.RLIMIT_AS, (largest, largest))
    try:
        json.dump(index_of(Reader(io.BytesIO(data)).load()), sys.stdout)
    except Exception as error:  # an arbitrary pickle can raise any error
        sys.exit(f"{error or type(error).__name__}")


if __name__ == "__main__":
    main()
