"""Kubernetes Secrets: the pages' commands make one for each role, and a pod names those of its role and no other."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documented import REPO, blocks
from manifests import VARIANTS, pods, rendered

ROLES = ("coordinator", "worker", "client")
OTHERS = {"penstock-tls-admin", "penstock-tokens-monitoring"}
"""Prometheus's own, which no pod of ours mounts."""
DRY_RUN = """set -euo pipefail
kubectl() { case "$*" in *" create secret "*) command kubectl "$@" --dry-run=client --output=json;; esac; }
helm() { :; }
"""
"""Secrets are printed, and nothing else is done: no cluster is asked."""


def secrets_in(value: Any) -> Iterator[str]:
    """Every name of a Secret of ours, wherever it stands: volumes, variables, monitors."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from secrets_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from secrets_in(inner)
    elif isinstance(value, str) and re.match(r"penstock-(tls|token)", value):
        yield value


def block(page: str, beginning: str) -> str:
    """The one block of a page that has a line that begins like this."""
    (found,) = [block for block in blocks(REPO / page) if re.search(f"^{beginning}", block.text, re.MULTILINE)]
    return found.text


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_name_their_own_secrets_alone(variant: str) -> None:
    for pod in pods(rendered(variant)):
        role = "client" if pod.role == "trainer" else pod.role
        kinds = ("tokens",) if variant == "insecure" else ("tls", "tokens")
        assert set(secrets_in(pod.spec)) == {f"penstock-{kind}-{role}" for kind in kinds}, pod.name
    given = {f"penstock-{kind}-{role}" for kind in ("tls", "tokens") for role in ROLES}
    assert set(secrets_in(list(rendered(variant)))) <= given | OTHERS


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The Secrets that the commands of the pages make, with their files, and the folder in which they were run."""
    for program in ("kubectl", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed, which the pages' commands call")
    folder = tmp_path_factory.mktemp("secrets")
    script = DRY_RUN + block("docs/security.md", "openssl req") + "\n" + block("docs/deploy.md", "kubectl create")
    done = subprocess.run(["bash"], input=script, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, str]] = {}
    decoder, rest = json.JSONDecoder(), done.stdout.lstrip()
    while rest:
        secret, end = decoder.raw_decode(rest)
        files = {name: base64.b64decode(text).decode() for name, text in secret["data"].items()}
        found[secret["metadata"]["name"]] = files
        rest = rest[end:].lstrip()
    found["folder"] = {path.name: f"{path.stat().st_mode & 0o777:o}" for path in folder.iterdir()}
    return found


def test_the_pages_make_a_certificate_a_role(made: dict[str, dict[str, str]], tmp_path: Path) -> None:
    certificates = {name for name in made if name.startswith("penstock-tls-")}
    assert certificates == {f"penstock-tls-{role}" for role in ROLES}
    assert len({made[name]["tls.key"] for name in certificates}) == len(ROLES)
    for role in ROLES:
        files = made[f"penstock-tls-{role}"]
        assert set(files) == {"ca.crt", "tls.crt", "tls.key"}
        (tmp_path / "crt").write_text(files["tls.crt"])
        command = ["openssl", "x509", "-in", str(tmp_path / "crt"), "-noout", "-ext", "subjectAltName"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
        assert re.findall(r"DNS:([\w.]+)", said) == [f"{role}.penstock"]


def test_the_pages_give_a_role_its_tokens(made: dict[str, dict[str, str]]) -> None:
    lines = {role: made[f"penstock-tokens-{role}"]["tokens"].splitlines() for role in ROLES}
    assert sorted(line.partition(":")[0] for line in lines["coordinator"]) == ["admin", "client", "worker"]
    for role in ("worker", "client"):
        assert lines[role] == [line for line in lines["coordinator"] if line.startswith(f"{role}:")]


def test_the_pages_leave_no_readable_token(made: dict[str, dict[str, str]]) -> None:
    """Tokens are in one file, its owner's alone: a copy made on the way could be read by every user of the machine."""
    readable = {name for name, mode in made["folder"].items() if not mode.endswith("00")}
    assert {name for name in readable if not name.endswith(("ca.pem", ".crt", ".csr", ".srl"))} == set()
