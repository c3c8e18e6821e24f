"""A cluster with TLS, roles and token files as an operator runs it, and where its secrets must not be found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from census import descendants
from cluster import INPUTS
from pki import ROLES, Pki
from tests.security.conftest import SECRETS, TOKENS, Starter, tls_flags

TRAIN = """
import json, sys
import streams
from penstock.client import Appliance, DataLoader

if __name__ == "__main__":
    with Appliance(num_workers_per_box=2, timeout_s=60) as appliance:
        print(json.dumps([int(batch.flatten()[0]) for batch in DataLoader(streams.unsharded, 4)]))
        print(repr(appliance), appliance.settings, appliance._access, file=sys.stderr)
"""


def test_mutual_tls_training_shows_no_secret(start: Starter, pki: Pki, tmp_path: Path) -> None:
    name = "*.penstock"
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKENS)
    tokens.chmod(0o600)
    shown = pki.issue("by-name", ROLES)
    state = ("--state-dir", str(tmp_path / "state"))
    coordinator = start("penstock.appliance", *tls_flags(pki.ca, shown, name), *state, own=True)
    worker = start.worker(coordinator.line, *tls_flags(pki.ca, shown, name), own=True)
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    environment = {
        **os.environ,
        "PENSTOCK_LANE": "tcp",
        "PYTHONPATH": os.pathsep.join(filter(None, [INPUTS, os.environ.get("PYTHONPATH")])),
        "PENSTOCK_COORDINATOR": coordinator.line,
        "PENSTOCK_TOKEN_FILE": str(tokens),
        "PENSTOCK_TLS_CA": pki.ca,
        "PENSTOCK_TLS_CERT": shown.cert,
        "PENSTOCK_TLS_KEY": shown.key,
        "PENSTOCK_TLS_NAME": name,
    }
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=90)
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)) == 8

    penstock = str(Path(sys.executable).with_name("penstock"))
    status = subprocess.run([penstock, "status", "--json"], env=environment, capture_output=True, text=True, timeout=60)
    assert status.returncode == 0, status.stderr
    assert len(json.loads(status.stdout)["workers"]) == 1

    keys = [line for line in Path(shown.key).read_text().splitlines() if not line.startswith("-")]
    said = run.stderr + run.stdout + status.stdout + status.stderr
    said += coordinator.log.read_text() + worker.log.read_text()
    daemons = [started.process.pid for started in (coordinator, worker)]
    running = [Path(f"/proc/{pid}") for pid in daemons + [below for pid in daemons for below in descendants(pid)]]
    assert len(running) >= 3, "the fork server too"
    arguments = b"".join((entry / "cmdline").read_bytes() for entry in running).decode()
    for secret in (*SECRETS.values(), *keys):
        assert secret not in said
        assert secret not in arguments
    # User code runs as the worker's user and could find them, but not by accident, in a dump of its environment.
    for entry in running[len(daemons) :]:
        environ = (entry / "environ").read_bytes()
        assert b"PENSTOCK_TOKEN" not in environ
        assert not any(secret.encode() in environ for secret in (*SECRETS.values(), *keys))
    journal = b"".join(file.read_bytes() for file in (tmp_path / "state").iterdir() if file.is_file())
    assert not any(secret.encode() in journal for secret in SECRETS.values())
