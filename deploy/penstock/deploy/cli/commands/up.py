"""`penstock up`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.deploy.console.common_options import quiet_grpc, tls_flags
from penstock.deploy.console.fleet_settings import UpSettings
from penstock.deploy.console.options import AsJson, Debug, TlsCa, TlsCert, TlsKey, TlsName, TokenFile, option

__all__ = ["up"]


def up(
    engine: Annotated[str | None, option(UpSettings, "engine", "ENGINE")] = None,
    name: Annotated[str | None, option(UpSettings, "name", "NAME")] = None,
    workers: Annotated[int | None, option(UpSettings, "workers", "N")] = None,
    slots: Annotated[int | None, option(UpSettings, "slots", "N")] = None,
    allow: Annotated[list[str] | None, option(UpSettings, "allow", "PREFIX")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Local: return once it is ready, and leave it running (other engines do).")
    ] = False,
    dir: Annotated[str | None, option(UpSettings, "dir", "DIR")] = None,
    listen: Annotated[str | None, option(UpSettings, "listen", "HOST:PORT")] = None,
    runner_memory: Annotated[str | None, option(UpSettings, "runner_memory", "SIZE")] = None,
    insecure: Annotated[bool | None, option(UpSettings, "insecure")] = None,
    timeout: Annotated[float | None, option(UpSettings, "timeout", "SECONDS")] = None,
    ray_address: Annotated[str | None, option(UpSettings, "ray_address", "ADDRESS")] = None,
    near: Annotated[str | None, option(UpSettings, "near", "RESOURCE|KEY=VALUE")] = None,
    coordinator_node: Annotated[str | None, option(UpSettings, "coordinator_node", "NODE")] = None,
    send_token: Annotated[bool | None, option(UpSettings, "send_token")] = None,
    state_dir: Annotated[str | None, option(UpSettings, "state_dir", "DIR")] = None,
    sbatch: Annotated[str | None, option(UpSettings, "sbatch", "ARGS")] = None,
    namespace: Annotated[str | None, option(UpSettings, "namespace", "NAMESPACE")] = None,
    image: Annotated[str | None, option(UpSettings, "image", "IMAGE")] = None,
    storage: Annotated[str | None, option(UpSettings, "storage", "SIZE")] = None,
    tls_secret: Annotated[str | None, option(UpSettings, "tls_secret", "NAME")] = None,
    render: Annotated[
        bool, typer.Option("--render", help="Slurm, Kubernetes: print what would be submitted, and do nothing.")
    ] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Start a coordinator and workers, and keep them running: here, or on Ray, Slurm or Kubernetes.

    Prints what a training job needs once all is ready: eval "$(penstock up --detach --allow mypackage)". In the
    foreground Ctrl-C ends it; else `penstock down`. A detached local fleet that is up is given another number of
    workers by the same command with another --workers, and those that left are started anew by the very same.

    \b
    Examples:
      penstock up --allow mypackage                             here, until Ctrl-C
      eval "$(penstock up --detach --allow mypackage)"          here, in the background
      penstock up --engine ray --workers 8 --allow mypackage --insecure
      penstock up --engine slurm --workers 8 --allow mypackage --dir /shared/penstock --insecure
      penstock up --engine kubernetes --image registry/penstock:1 --allow mypackage --insecure --render
    """
    quiet_grpc()
    from penstock.deploy.engines.up_down import run_up

    flags = {
        "engine": engine,
        "name": name,
        "workers": workers,
        "slots": slots,
        "allow": ",".join(allow) if allow else None,
        "dir": dir,
        "listen": listen,
        "runner_memory": runner_memory,
        "insecure": insecure,
        "timeout": timeout,
        "ray_address": ray_address,
        "near": near,
        "coordinator_node": coordinator_node,
        "send_token": send_token,
        "state_dir": state_dir,
        "sbatch": sbatch,
        "namespace": namespace,
        "image": image,
        "storage": storage,
        "tls_secret": tls_secret,
    }
    tls = tls_flags(tls_ca, tls_cert, tls_key, tls_name)
    run_up(flags, tls, token_file, detach=detach, render=render, as_json=as_json, debug=debug)
