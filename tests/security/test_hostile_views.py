"""A coordinator that knows the token, towards a training job: texts that are printed where they arrive."""

from __future__ import annotations

from penstock.client.stream.open_run import _plain
from penstock.proto.rpc.wire_errors import error_of
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.runtime.telemetry.logs import LONGEST

FORGED = "\x1b[2J\n2026 INFO forged\u202e" + "x" * (1 << 20)


def test_texts_of_a_peer_are_plain() -> None:
    view = _plain(pb.SlotView(note=FORGED, worker=FORGED))
    detail = records_pb2.ErrorDetail(name="StateCorruptError", message=FORGED, remote_traceback=FORGED)
    error = error_of(detail)
    assert type(error).__name__ == "StateCorruptError"
    for text in (view.note, view.worker, error.message, error.remote_traceback):
        assert text.startswith("\\x1b[2J\n2026 INFO forged\\u202exxx")
        assert len(text) < LONGEST + 100
    assert error_of(records_pb2.ErrorDetail(name="DeadlineError", message="a\n\tb – 漢字")).message == "a\n    b – 漢字"
