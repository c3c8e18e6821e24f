"""One type for each column of a dataset whose files disagree, so that no batch's dtype depends on the files that its
rows come from: the wider one by pyarrow's rule (`promote_options="permissive"`). Files with another one are cast when
they are read; their entries in the index have the field "types", a serialized Arrow schema of these columns, in base64.
"""

from __future__ import annotations

import base64
import importlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from penstock.data.formats.fields import InvalidField
from penstock.proto.errors import DatasetError

TYPES = "types"
"""Field of a file's entry in the index."""


class CommonTypes:
    """Schemas of all files of a dataset, which have columns of the same names. Few differ, and only these are kept."""

    def __init__(self) -> None:
        self._schemas: list[tuple[str, Any]] = []
        """Different schemas, each with the first file that has it."""
        self._files: list[int] = []
        """Number of each file's schema."""

    def add(self, name: str, schema: Any) -> None:
        same = (number for number, (_, known) in enumerate(self._schemas) if known.equals(schema))
        number = next(same, len(self._schemas))
        if number == len(self._schemas):
            self._schemas.append((name, schema))
        self._files.append(number)

    def settings(self) -> list[dict[str, str]]:
        """Return the fields to add to the entry of each file. Raises DatasetError for types that do not fit."""
        if len(self._schemas) < 2:
            return [{}] * len(self._files)
        arrow = importlib.import_module("pyarrow")
        common = {name: self._common(name) for name in self._schemas[0][1].names}
        found = []
        for _, schema in self._schemas:
            cast = [
                field.with_type(common[field.name])
                for field in schema
                if _shown(field.type) != _shown(common[field.name])
            ]
            text = base64.b64encode(arrow.schema(cast).remove_metadata().serialize().to_pybytes()).decode()
            found.append({TYPES: text} if cast else {})
        return [found[number] for number in self._files]

    def _common(self, column: str) -> Any:
        arrow = importlib.import_module("pyarrow")
        (file, first), *others = self._schemas
        kind = first.field(column).type
        for other_file, schema in others:
            other = schema.field(column).type
            try:
                both = [arrow.schema([(column, each)]) for each in (kind, other)]
                wider = arrow.unify_schemas(both, promote_options="permissive").field(0).type
            except (arrow.ArrowInvalid, arrow.ArrowTypeError):
                raise DatasetError(
                    f"column {column!r} must have types that fit together in all files of a dataset: {file} has "
                    f"{kind}, but {other_file} has {other}. Write one of them again, or move it into another folder"
                ) from None
            if wider != kind:
                file, kind = other_file, wider
        return kind


def _shown(kind: Any) -> Any:
    """Return what decides the types of values in samples: Python's numbers and texts have no width, arrays do."""
    types = importlib.import_module("pyarrow").types
    if types.is_integer(kind) or types.is_floating(kind):
        return "int" if types.is_integer(kind) else "float"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = kind.value_type
        return "list", str(inner) if types.is_primitive(inner) else _shown(inner)
    return str(kind).removeprefix("large_")


def common_types_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the types to which columns of a file are cast, from its entry in the index."""
    return _decoded(settings[TYPES]) if TYPES in settings else {}


def check_types(settings: Mapping[str, Any]) -> None:
    """Raises InvalidField."""
    try:
        common_types_of(settings)
    except ImportError:
        pass  # the reader says so
    except Exception as error:  # of base64, and of pyarrow
        raise InvalidField(TYPES, f"must be a serialized Arrow schema in base64: {error}") from None


@lru_cache(maxsize=64)
def _decoded(text: str) -> dict[str, Any]:
    arrow = importlib.import_module("pyarrow")
    schema = arrow.ipc.read_schema(arrow.py_buffer(base64.b64decode(text, validate=True)))
    return {field.name: field.type for field in schema}
