"""Packages that `import penstock.client` loads in a training job besides torch: few, and each is needed there. And
processes that convert and index datasets, which need no torch.

No time is measured here (`python -m benchmarks.import_time` does): a package that is not in this list is what makes
imports slow, and is to be imported where it is used.
"""

from __future__ import annotations

import json
import subprocess
import sys

LIGHT = {
    "annotated_types",
    "dotenv",
    "google",
    "grpc",
    "grpc_health",
    "grpc_reflection",  # grpc looks whether it is there
    "grpc_tools",  # the same
    "penstock",
    "pydantic",
    "pydantic_core",
    "pydantic_settings",
    "typing_extensions",
    "typing_inspection",
    "xxhash",
}
OTHER_ROOTS = ("penstock.appliance", "penstock.worker", "penstock.deploy")

PROBE = """
import json, sys
import torch
before = set(sys.modules)
import penstock.client
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_importing_the_client_brings_few_packages() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=100, check=True)
    modules = json.loads(done.stdout)
    packages = {name.partition(".")[0] for name in modules}
    ours = packages - set(sys.stdlib_module_names)
    extra = {name for name in ours - LIGHT if not name.startswith(("_cython", "cython_runtime", "_sysconfigdata"))}
    assert not extra, "import it where it is used, or say here why every training job needs it"
    assert not [name for name in modules if name.startswith(OTHER_ROOTS)]


def test_conversions_import_no_torch() -> None:
    modules = "penstock.data.converting.convert_part, penstock.deploy.datasets.dataset_folders"
    code = f"import sys, penstock.data, {modules}; penstock.data.index_folder; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "False\n"
