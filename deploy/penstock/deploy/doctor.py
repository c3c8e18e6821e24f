"""`penstock doctor`: can this loader be saved and resumed exactly? Found out before a run, by doing it.

A worker checks one early snapshot once per run. Here the loader is streamed with a snapshot after every batch, and
restored in fresh processes early, in the middle, late, at the end of its first pass and at the start of its passes; a
four-method loader also goes through aggregate and deaggregate. What comes next is compared, batch by batch, with what
came then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.deploy.exits import CANNOT_SAVE, DIFFERS
from penstock.deploy.ward import Ward
from penstock.proto.errors import DeadlineError, InvalidArgumentError, PenstockError

__all__ = ["Check", "Diagnosis", "Patient", "Question", "examine", "examine_in", "json_option"]

COMPARED = 8
"""Batches and ends of passes that are compared after a restored snapshot; after the start of the first pass it is
all."""
_WHERE = {
    "start": "from the start, by replay",
    "early": "after batch {total}",
    "mid": "after batch {total}",
    "end": "after batch {total}, the last of its pass",
    "second pass": "at the start of the next pass (batch {total} done)",
    "late": "after batch {total}",
    "resume": "after batch {total}, by aggregate and deaggregate",
}


@dataclass(frozen=True)
class Question:
    """What to examine."""

    input_fn: str
    args: str
    """A JSON list."""
    kwargs: str
    """A JSON object."""
    batches: int
    """Of each worker."""
    workers: int
    """Of the one box."""
    replay: bool
    """A loader without state methods counts as one that can be saved."""
    seed: int
    deadline_s: float
    """Seconds, of each child process."""

    def fields(self, slot: int) -> dict[str, Any]:
        """For a task on one of the workers. Raises InvalidArgumentError."""
        module, _, name = self.input_fn.partition(":")
        if not module or not name:
            raise InvalidArgumentError(f"{self.input_fn!r} is not MODULE:NAME, such as mypackage.data:train_input")
        return {
            "input_fn": self.input_fn,
            "args": json_option("--args", self.args, list),
            "kwargs": json_option("--kwargs", self.kwargs, dict),
            "slot": slot,
            "workers": self.workers,
            "seed": self.seed,
        }


def json_option(option: str, text: str, kind: type) -> Any:
    """The value of an option that is JSON. Raises InvalidArgumentError."""
    what = "list, such as '[1, \"a\"]'" if kind is list else "object, such as '{\"name\": 1}'"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(f"{option} {text!r} is no JSON {what}: {error}") from error
    if not isinstance(value, kind):
        raise InvalidArgumentError(f"{option} {text!r} is no JSON {what}")
    return value


@dataclass
class Check:
    """One restore."""

    where: str
    total: int
    """Batches of this worker before it."""
    snapshot: bool
    """From a worker's own state_dict(), and not from the start of a pass or by aggregate and deaggregate."""
    exact: bool = True
    differs: int | None = None
    """The first batch that is another one."""
    what: str = ""
    traceback: str = ""
    """Of user code that raised in this process."""


@dataclass
class Patient:
    """One worker's loader, and what was found of it."""

    slot: int
    traits: dict[str, Any]
    streamed: dict[str, Any]
    """As penstock.deploy.examine tells: events, looked_at, samples, unsaved, state_bytes, batch_ms, snapshot_ms."""
    bases: dict[str, tuple[int, bool, bytes]]
    """Name -> (total, whether it is the start of a pass, encoded)."""
    checks: list[Check] = field(default_factory=list)

    def events_after(self, total: int, *, origin: bool) -> list[list[Any]]:
        """What came after `total` batches. The end of the pass before, if this is the start of a pass, does not."""
        events: list[list[Any]] = self.streamed["events"]
        start = next(
            (i for i, event in enumerate(events) if event[1] > total or (event[1] == total and event[2] is None))
        )
        return events[start + 1 :] if origin and total and events[start][2] is None else events[start:]


@dataclass
class Diagnosis:
    """All that was found, and what it means."""

    question: Question
    patients: list[Patient]
    code: int
    verdict: str
    warnings: list[str]


def examine(question: Question) -> Diagnosis:
    """Run all checks. Raises what the loader raised before it could be examined."""
    question.fields(0)
    with Ward(question.seed, question.deadline_s) as ward:
        return examine_in(ward, question)


def examine_in(ward: Ward, question: Question) -> Diagnosis:
    """The same in a ward that is there already, with its deadline."""
    patients = [_streamed(ward, question, slot) for slot in range(question.workers)]
    for patient in patients:
        for name in patient.bases:
            if name == "start" or _saves(patient):
                _restore(ward, question, patient, name)
    if _saves(patients[0]) and patients[0].traits["state_methods"] == 4:
        _aggregated(ward, question, patients)
    code, verdict = _verdict(question, patients)
    return Diagnosis(question, patients, code, verdict, list(_warnings(question, patients)))


def _saves(patient: Patient) -> bool:
    """It has snapshots to restore."""
    traits = patient.traits
    return bool(traits["state_methods"]) and not traits["not_restartable"] and not patient.streamed["unsaved"]


def _streamed(ward: Ward, question: Question, slot: int) -> Patient:
    what = f"streaming {question.batches} batches of {question.input_fn}, worker {slot}"
    answer = ward.ask(what, "stream", **question.fields(slot), batches=question.batches)
    bases = {
        message.fields["name"]: (message.fields["total"], message.fields["origin"], message.payload)
        for message in answer
        if message.kind == "base"
    }
    found = dict(answer.done.fields)
    return Patient(slot, found.pop("traits"), found, bases)


def _restore(
    ward: Ward, question: Question, patient: Patient, name: str, task: str = "check", more: Sequence[bytes] = ()
) -> None:
    """Restore one of the patient's bases, and note whether what comes next is what came then."""
    total, origin, data = patient.bases[name]
    by_methods = task == "resume"
    events = patient.events_after(total, origin=origin)
    check = Check(_WHERE[task if by_methods else name].format(total=total), total, not origin and not by_methods)
    patient.checks.append(check)
    try:
        done = ward.ask(
            f"restoring {question.input_fn} {check.where}, worker {patient.slot}",
            task,
            [data, *more],
            **question.fields(patient.slot),
            events=events if name == "start" else events[:COMPARED],
            step=total * question.workers,
        ).done
    except DeadlineError:
        raise
    except PenstockError as error:
        check.exact, check.what, check.traceback = False, error.message, error.remote_traceback
        return
    if not done.fields["same"]:
        check.exact, check.differs, check.what = False, done.fields["differs"], done.fields["what"]


def _aggregated(ward: Ward, question: Question, patients: list[Patient]) -> None:
    """Through the loader's own aggregate and deaggregate, at a place that all workers reach in their first pass."""
    name = next(
        (name for name in ("mid", "early") if all(_within_first_pass(patient, name) for patient in patients)), ""
    )
    if not name:
        return
    total, states = patients[0].bases[name][0], [patient.bases[name][2] for patient in patients]
    try:
        aggregated = ward.ask(
            f"aggregate_state_dict() of {question.input_fn}", "aggregate", states, **question.fields(0)
        ).done.payload
    except DeadlineError:
        raise
    except PenstockError as error:
        where = _WHERE["resume"].format(total=total)
        patients[0].checks.append(Check(where, total, False, False, None, error.message, error.remote_traceback))
        return
    for patient in patients:
        _restore(ward, question, patient, name, "resume", [aggregated])


def _within_first_pass(patient: Patient, name: str) -> bool:
    if name not in patient.bases:
        return False
    epoch, _, digest = patient.events_after(patient.bases[name][0], origin=False)[0]
    return epoch == 0 and digest is not None


# ---- what it means


def _verdict(question: Question, patients: list[Patient]) -> tuple[int, str]:
    traits, unsaved = patients[0].traits, next((p.streamed["unsaved"] for p in patients if p.streamed["unsaved"]), "")
    if traits["not_restartable"]:
        return CANNOT_SAVE, f"cannot be saved: {traits['not_restartable']}"
    if unsaved:
        return CANNOT_SAVE, f"cannot be saved: {unsaved}"
    wrong = [check for patient in patients for check in patient.checks if not check.exact]
    if not traits["state_methods"]:
        if wrong:
            return DIFFERS, "cannot be resumed: it has no state methods, and started again it yields other batches"
        if question.replay:
            return 0, "can be saved and resumed exactly, by replay from the start of the pass (Appliance(replay=True))"
        return CANNOT_SAVE, (
            "cannot be saved as it is: it has no state_dict and load_state_dict; give it the methods of "
            "RestartableDataLoader, or ask for saving by replay: Appliance(replay=True), checked by --replay"
        )
    if not wrong:
        return 0, "can be saved at any step and resumed exactly"
    if traits["own_workers"] and all(check.snapshot for check in wrong):
        return 0, (
            "can be saved at any step and resumed exactly, by replay from the start of the pass: its state does not "
            "hold all that its own worker processes hold (randomness, probably)"
        )
    first = next((check for check in wrong if check.differs is not None), None)
    if first is None:
        return DIFFERS, f"cannot be resumed: {wrong[0].what}"
    return DIFFERS, (
        f"cannot be resumed exactly: restored {first.where}, {first.what}. Its state must be that of the batches it "
        "has handed out: does it count after its `yield`, prefetch in the background, or hold something that the state "
        "leaves out?"
    )


def _warnings(question: Question, patients: list[Patient]) -> Iterator[str]:
    digests = [[event[2] for event in patient.streamed["events"] if event[2] is not None] for patient in patients]
    asked = any(patient.streamed["looked_at"] for patient in patients)
    if question.workers > 1 and (not asked or all(of_one == digests[0] for of_one in digests)):
        why = "and all stream the same batches" if asked else "and it never asks who it is"
        yield (
            f"there are {question.workers} workers, {why}: each streams the whole input. Shard by "
            "penstock.worker.current_assignment() or torch's get_worker_info()"
        )
    if all(len(set(of_one)) == 1 for of_one in digests):
        yield "all its batches are the same, so that a wrong one cannot be told from the right one: try real data"
