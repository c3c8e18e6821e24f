"""Import of a user's input_fn by its name: names of code are sent, never code. Only a training job that embeds this
worker may also send a pickle. The operator lists prefixes of modules that may run. In embedded mode the training script
may define input_fn; it is loaded as `penstock_main`, so that code under `if __name__ == "__main__":` does not run."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from penstock.proto.errors import InputFnError, InputFnNotAllowedError, InputFnNotFoundError
from penstock.proto.state.allowed_modules import module_of, under
from penstock.proto.state.loader_names import BY_VALUE, MAIN, name_of
from penstock.proto.tracebacks import format_remote
from penstock.proto.v1 import records_pb2
from penstock.worker.processes.control_channel import describe
from penstock.worker.processes.interpreters import working_directory

ANOTHER_VERSION = "Install the same version of the module on the worker as in the training job"
UNDER_GUARD = (
    'Define it above `if __name__ == "__main__":`, because workers import the script without the code under that line'
)


def check_allowed(name: str, allow: Sequence[str]) -> None:
    """Raise InputFnNotAllowedError unless the module of "module:qualname" is in `allow`, or below a package in it."""
    _check_module(f"input_fn {name!r} is in", module_of(name), allow)


def _check_module(what: str, module: str, allow: Sequence[str]) -> None:
    if under(module, allow):
        return
    allowed = ", ".join(allow) if allow else "none"
    raise InputFnNotAllowedError(
        f"{what} module {module!r}, which is not allowed here: start the worker with --allow (now: {allowed})"
    )


def check_plain(spec: records_pb2.LoaderSpec) -> None:
    """Raise InputFnNotAllowedError for a search path or a script: outside embedded mode they would bypass the allowed
    modules."""
    if spec.main_path or spec.sys_path:
        raise InputFnNotAllowedError(
            f"input_fn {spec.input_fn!r} was sent with a search path or script, which only an embedded worker accepts"
        )


def load_input_fn(spec: records_pb2.LoaderSpec) -> Callable[..., Any]:
    """Import the function that `spec.input_fn` names; for one sent by value return a stand-in, which `unpacked`
    replaces. Raises InputFnNotFoundError, InputFnError (an import raised), and InputFnNotAllowedError for a callable
    defined in another, not allowed module: otherwise anything that an allowed module imports could be called, such as
    `os.system`."""
    module_name, _, qualname = spec.input_fn.partition(":")
    if module_name == BY_VALUE:
        return _comes_with_arguments
    if spec.sys_path:
        _resemble_the_training_process(spec)
    try:
        module = _load_main(spec.main_path) if module_name == MAIN else importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(missing + "."):
            raise InputFnNotFoundError(
                f"input_fn {spec.input_fn!r}: no module named {missing!r} on this worker. Install the module, add its "
                f"folder to PYTHONPATH, or start the worker in its folder (now: {working_directory()})"
            ) from error
        raise _import_failed(spec, error) from error
    except BaseException as error:
        raise _import_failed(spec, error) from error
    target: Any = module
    for part in qualname.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            raise InputFnNotFoundError(
                f"input_fn {name_of(spec)!r}: module {module_name!r} ({getattr(module, '__file__', '?')}) has no "
                f"{qualname!r}. {UNDER_GUARD if module_name == MAIN else ANOTHER_VERSION}"
            ) from None
    if not callable(target):
        raise InputFnNotFoundError(f"input_fn must be callable, got {name_of(spec)!r}, a {type(target).__qualname__}")
    if spec.allow and module_name != MAIN:
        _check_module(f"input_fn {spec.input_fn!r} is defined in", _defined_in(target), spec.allow)
    return target  # type: ignore[no-any-return]


def _comes_with_arguments(*args: Any, **kwargs: Any) -> Any:
    raise InputFnNotFoundError("input_fn has no importable name and no pickle: define it at the top of a module")


def unpacked(
    fn: Callable[..., Any], spec: records_pb2.LoaderSpec
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return input_fn and its arguments; values are unpickled. Raises InputFnNotAllowedError for a pickle that the
    embedding training process did not send. (Only its specs have a search path: `check_plain` refuses others.)"""
    from penstock.proto.state.codec import decode_state  # imports torch, which the daemon must not import

    arguments: Any = decode_state(spec.arguments) if spec.arguments else {}
    if "by_value" not in arguments:
        return fn, arguments.get("args", ()), arguments.get("kwargs", {})
    if not spec.sys_path:
        raise InputFnNotAllowedError(
            f"input_fn {name_of(spec)!r} came as a pickle, which only an embedded worker accepts: put it into a module"
        )
    _resemble_the_training_process(spec)
    from penstock.proto.state.by_value import load  # imports cloudpickle, which few loaders need

    given, args, kwargs = load(arguments["by_value"], lambda: _load_main(spec.main_path))
    return fn if given is None else given, args, kwargs


def load_class(name: str, spec: records_pb2.LoaderSpec) -> Any:
    """Return the class "module:qualname", of a loader that the spec's input_fn returned here, or of Penstock. Raises
    load_input_fn's errors, also for a module that input_fn has imported."""
    if not module_of(name).startswith("penstock.") and spec.allow:
        check_allowed(name, spec.allow)
    return load_input_fn(records_pb2.LoaderSpec(input_fn=name, main_path=spec.main_path, sys_path=spec.sys_path))


def _defined_in(target: Any) -> str:
    while isinstance(target, functools.partial):
        target = target.func
    owner = target if hasattr(target, "__qualname__") else type(target)
    return str(getattr(owner, "__module__", None))


def _import_failed(spec: records_pb2.LoaderSpec, error: BaseException) -> InputFnError:
    return InputFnError(
        f"input_fn {name_of(spec)!r}: the import of its module raised {describe(error)}",
        remote_traceback=format_remote(error),
    )


def _resemble_the_training_process(spec: records_pb2.LoaderSpec) -> None:
    sys.path[:] = [*spec.sys_path, *(path for path in sys.path if path not in spec.sys_path)]
    if spec.argv:
        sys.argv[:] = os.fsdecode(spec.argv).split("\0")


def _load_main(path: str) -> types.ModuleType:
    """Import under another name than `__main__`, so that code under its guard does not run."""
    if MAIN in sys.modules:
        return sys.modules[MAIN]
    module = types.ModuleType(MAIN)
    module.__file__ = path
    sys.modules[MAIN] = module
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[MAIN]
        raise
    return module
