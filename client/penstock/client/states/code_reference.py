"""References to user code: a callable's name, which another process can import.

Only "module:qualname" leaves this machine, never pickled code, and the arguments in an envelope, which runs no code
when it is read. What has no name to import (a lambda, a local function, a partial, a bound method), or fits no
envelope, goes by value, only to this machine's own child processes, in embedded mode (penstock.proto.state.by_value);
else opening the run raises an error.

A main script run with `python -m` has a real module name. One run as a file is loaded by runners on this machine as
`penstock_main`, so that its main guard is not executed; workers on other machines cannot load it. A notebook, `python
-c` and standard input have no file at all. A loader that needs nothing of the script is loaded without it."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.proto.errors import InvalidArgumentError, PenstockError, UnsupportedStateError
from penstock.proto.state.codec import encode_state
from penstock.proto.state.loader_names import BY_VALUE, MAIN, loader_name
from penstock.proto.state.main_script import MAIN_NAMES, main_module

RUNNER_VARIABLE = "PENSTOCK_RUNNER"
"""Environment variable that a worker sets in every process that runs user code."""
_BRANCHES = (ast.If, ast.IfExp, ast.BoolOp)
"""What can be a main guard."""

MAX_COMMAND_LINE = 64 << 10
"""A quarter of the largest request to open a run, in bytes."""


@dataclass(frozen=True)
class CodeReference:
    name: str
    main_path: str = ""
    """Absolute path of the training script that runners load as MAIN, because `name` or a pickled argument refers to
    it; else ""."""
    of_main: str = field(default="", compare=False)
    """Function or class of the training script for which runners load it, as MAIN or by its own name."""
    only_here: PenstockError | None = field(default=None, compare=False)
    """Error for a run with workers on other machines, because something can be sent only by value."""
    title: str = field(default="", compare=False)
    """Name for people of what has no function of the user's: a dataset."""

    @property
    def label(self) -> str:
        return loader_name(self.name, self.title)

    def same_as(self, name: str) -> bool:
        """Compare names. Modules may differ if one is MAIN or BY_VALUE: a script run as a file has no module name."""
        module, _, qualname = self.name.partition(":")
        other, _, other_qualname = name.partition(":")
        return qualname == other_qualname and (module == other or bool({MAIN, BY_VALUE} & {module, other}))


def check_arguments(input_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    try:
        # The outermost wrapper is called, not the wrapped function, for which a decorator may supply arguments.
        signature = inspect.signature(input_fn, follow_wrapped=False)
    except (TypeError, ValueError):
        return  # a callable of C code, which has no signature
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"input_fn {_label(input_fn)}{signature} cannot be called with the given arguments: {error}"
        ) from None


def copied(
    input_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of the arguments. Raises the errors of `ship`."""
    try:
        return copy.deepcopy(args), copy.deepcopy(kwargs)
    except Exception as error:
        ship(input_fn, args, kwargs)  # which names the one that no worker can get
        raise UnsupportedStateError(
            f"the arguments of input_fn {_label(input_fn)} cannot be copied: {error}. Build what they hold inside it"
        ) from error


def ship(input_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[CodeReference, bytes]:
    """Return reference and arguments. Raises TypeError, InvalidArgumentError or UnsupportedStateError."""
    by_value: Any = None
    try:
        reference = refer(input_fn)
    except InvalidArgumentError as error:
        reference, by_value = CodeReference(f"{BY_VALUE}:{_label(input_fn)}", only_here=error), input_fn
    try:
        arguments = encode_arguments(reference.name, args, kwargs)
        if by_value is None:
            return reference, arguments
    except UnsupportedStateError as error:
        reference = reference if reference.only_here else replace(reference, only_here=error)
    assert reference.only_here is not None
    try:
        from penstock.proto.state.by_value import dump  # imports cloudpickle, which few loaders need

        data, of_main = dump((by_value, args, dict(kwargs)))
    except Exception as error:
        words = f"{reference.only_here.message}. Sending it by value to workers of this machine failed too: {error}"
        raise type(reference.only_here)(words) from error
    if of_main:
        reference = replace(reference, main_path=main_module()[1], of_main=of_main)
    return reference, encode_state({"by_value": data})


def _label(input_fn: Any) -> str:
    while isinstance(input_fn, functools.partial):
        input_fn = input_fn.func
    return str(getattr(input_fn, "__qualname__", type(input_fn).__qualname__))


def refer(input_fn: Callable[..., Any]) -> CodeReference:
    """Return the reference to an input_fn. Raises InvalidArgumentError, with what to write instead, without a name."""
    if not callable(input_fn):
        raise TypeError(f"input_fn must be callable, got a {type(input_fn).__qualname__}: pass the function itself")
    module, qualname = getattr(input_fn, "__module__", None), getattr(input_fn, "__qualname__", None)
    owner = getattr(input_fn, "__self__", None)
    if isinstance(input_fn, functools.partial):
        raise _not_importable(f"a functools.partial of {_label(input_fn)}")
    if not isinstance(module, str) or not isinstance(qualname, str):
        raise _not_importable(f"an instance of {type(input_fn).__qualname__}")
    label = f"{module}.{qualname}"
    if "<lambda>" in qualname:
        raise _not_importable(f"the lambda {label}")
    if "<locals>" in qualname:
        raise _not_importable(f"{label}, which is defined inside a function")
    if owner is not None and not isinstance(owner, type) and not hasattr(owner, "__spec__"):
        raise _not_importable(f"{label}, a method of an instance of {type(owner).__qualname__}")
    reference = _of_main(module, qualname) if module in MAIN_NAMES else CodeReference(f"{module}:{qualname}")
    if RUNNER_VARIABLE not in os.environ:
        _check_found(input_fn, module, qualname)
    return reference


def _not_importable(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"input_fn must be a function or class that a worker can import, got {what}: write a def at the top level of a "
        "module, and pass what it uses as arguments after it"
    )


def _of_main(module: str, qualname: str) -> CodeReference:
    name, path = main_module(module)
    if not name and not path:
        raise _not_importable(f"{qualname!r}, which is defined in a notebook, an interactive session or by python -c")
    return CodeReference(f"{name or MAIN}:{qualname}", path, of_main=qualname)


def _check_found(input_fn: Callable[..., Any], module: str, qualname: str) -> None:
    try:
        imported: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in qualname.split("."):
            imported = getattr(imported, part)
    except (ImportError, AttributeError) as error:
        raise _not_importable(f"{module}.{qualname}, which cannot be imported here ({error})") from error
    if imported is not input_fn and imported != input_fn:
        raise _not_importable(f"another object than {module}.{qualname} has (a decorator may lack functools.wraps)")


def encode_arguments(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Return an envelope. Raises UnsupportedStateError, which names the argument that does not fit."""
    named = [(f"args[{number}]", value) for number, value in enumerate(args)]
    for what, value in [*named, *((f"argument {name!r}", value) for name, value in kwargs.items())]:
        try:
            encode_state(value, what)
        except UnsupportedStateError as error:
            raise UnsupportedStateError(
                f"{what} of input_fn {name} cannot be sent to a worker: {error.reason}. Build it inside input_fn"
            ) from error
    return encode_state({"args": tuple(args), "kwargs": dict(kwargs)})


def main_line() -> int:
    """Return the line of the training script that its main thread runs; 0 if it runs no script."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is sys.modules["__main__"].__dict__:
            return frame.f_lineno or 0
        frame = frame.f_back
    return 0


def check_guard(reference: CodeReference, lines: Collection[int]) -> None:
    """Raise InvalidArgumentError if runners load the script and would run one of these lines, at which it starts the
    training: it is under no `if` with `__name__`."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if not reference.of_main or not path:
        return
    try:
        with open(path, "rb") as file:
            nodes = [*ast.walk(ast.parse(file.read()))]
    except (OSError, SyntaxError, ValueError):
        return  # no longer the script that runs here
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and _reads(node.value, {"__name__"})]
    names = {"__name__", *(ast.unparse(target) for node in assigned for target in node.targets)}
    guards = [node for node in nodes if isinstance(node, _BRANCHES) and _reads(getattr(node, "test", node), names)]
    for line in sorted(lines):
        if line and not any(guard.lineno <= line <= (guard.end_lineno or 0) for guard in guards):
            raise InvalidArgumentError(
                f"{reference.of_main!r} is defined in {path}, which workers load too, and line {line} of it starts the "
                "training: put that part, with all that workers do not need, under\n\n"
                '    if __name__ == "__main__":\n'
            )


def _reads(node: ast.AST, names: Collection[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))


def search_path() -> list[str]:
    """Return sys.path as absolute paths, so that child processes find the same modules."""
    return list(dict.fromkeys(os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)))


def command_line() -> bytes:
    """Return sys.argv, joined by NUL; b"" if a request has no room for it, as with thousands of file names. As bytes,
    because these need not be UTF-8."""
    joined = os.fsencode("\0".join(sys.argv))
    return joined if len(joined) <= MAX_COMMAND_LINE else b""


def forbid_in_runner(what: str) -> None:
    """Raise RuntimeError in a runner: a script without a main guard would start further workers endlessly."""
    if os.environ.get(RUNNER_VARIABLE):
        raise RuntimeError(
            f"{what} inside a worker is not possible: leave it out of input_fn; if the script that defines input_fn "
            'starts the training when a worker imports it, put that part under\n\n    if __name__ == "__main__":\n'
        )
