"""Command `penstock doctor`: checks of a machine, a cluster or a loader."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.deploy.console.app import subcommands
from penstock.deploy.console.options import LARGEST_SEED, AsJson
from penstock.deploy.console.peer import Peer


class _DefaultsByTarget(TyperGroup):
    """Group of commands in which `penstock doctor` means `doctor machine`, and `penstock doctor MODULE:NAME` means
    `doctor loader MODULE:NAME`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing and not args:  # completion in a shell, where the target is not typed yet
            return super().parse_args(ctx, args)
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["loader" if args and not args[0].startswith("-") else "machine", *args]
        return super().parse_args(ctx, args)


doctor = subcommands(_DefaultsByTarget)


@doctor.callback()
def _doctor() -> None:
    """Check a machine, a cluster or a loader. Prints the remedies.

    `penstock doctor` alone is `penstock doctor machine`; `penstock doctor MODULE:NAME` is `penstock doctor loader
    MODULE:NAME`.

    \b
    Examples:
      penstock doctor                                   is this machine ready?
      penstock doctor cluster                           can the workers be reached from here?
      penstock doctor mypackage.data:train_input        can my loader be saved and resumed exactly?
    """


@doctor.command("machine")
def doctor_machine(
    slots: Annotated[
        int | None,
        typer.Option(
            "--slots",
            metavar="N",
            min=1,
            help="Slots of a worker here. Default: the number of cores.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Check this machine for a worker: sandbox, memory, and what kernel and container allow.

    Exit code 32 if there is a problem; 0 if there are only warnings.

    \b
    Examples:
      penstock doctor machine
      penstock doctor machine --slots 32
      penstock doctor machine --json | jq '.findings[] | select(.level != "ok")'
    """
    from penstock.deploy.doctor.findings import show_findings
    from penstock.deploy.doctor.machine_check import check_machine

    return show_findings("This machine", list(check_machine(slots)), as_json)


@doctor.command("cluster")
def doctor_cluster(peer: Peer, as_json: AsJson = False) -> int:
    """Check a cluster from here: can every worker's lanes be reached?

    Run it where the training job runs. Connects to each live worker. Exit code 32 if there is a problem. Needs a token
    of the role admin.

    \b
    Examples:
      penstock doctor cluster --coordinator head:7070
    """
    from penstock.deploy.doctor.cluster_check import check_cluster
    from penstock.deploy.doctor.findings import show_findings

    with peer.client() as client:
        findings = list(check_cluster(client, peer.address, peer.tls()))
    return show_findings(f"Cluster of {peer.address}", findings, as_json)


@doctor.command("loader")
def doctor_loader(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME",
            help="An importable input_fn.",
        ),
    ],
    args: Annotated[str, typer.Option("--args", metavar="JSON", help="Positional arguments, a JSON list.")] = "[]",
    kwargs: Annotated[str, typer.Option("--kwargs", metavar="JSON", help="Keyword arguments, a JSON object.")] = "{}",
    batches: Annotated[
        int, typer.Option("--batches", metavar="N", min=2, max=5000, help="Batches to stream from each worker.")
    ] = 32,
    workers: Annotated[int, typer.Option("--workers", metavar="W", min=1, max=64, help="Workers of the box.")] = 1,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay", help="Accept saving by replay for a loader without state methods: Appliance(replay=True)."
        ),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, max=LARGEST_SEED, help="Seed of the run.")] = 0,
    deadline: Annotated[
        float,
        typer.Option("--deadline", metavar="SECONDS", min=1, help="Limit of each child process that runs the loader."),
    ] = 300.0,
    as_json: AsJson = False,
) -> int:
    """Check that a loader resumes exactly.

    Streams N batches with a snapshot after each, restores some snapshots in fresh processes, and compares
    the next batches. Exit code 0: the loader is exact. 30: a restored loader yields other batches. 31: the loader
    streams, but cannot be saved as it is.

    \b
    Examples:
      penstock doctor mypackage.data:train_input --workers 2 --batches 100
      penstock doctor mypackage.data:train_input --kwargs '{"root": "/data", "batch_size": 8}'
    """
    from penstock.deploy.doctor.loader_check import LoaderRequest
    from penstock.deploy.doctor.loader_report import show_doctor

    return show_doctor(LoaderRequest(target, args, kwargs, batches, workers, replay, seed, deadline), as_json)
