"""A coordinator that knows the token, towards a training job: texts that are printed where they arrive."""

from __future__ import annotations

import pytest

from penstock.client.stream.open_run import _plain
from penstock.proto.rpc.wire_errors import error_of
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.runtime.telemetry.logs import LONGEST

FORGED = "\x1b[2J\n2026 INFO forged\u202e" + "x" * (1 << 20)


@pytest.mark.parametrize("name", ["note", "doing", "stack", "worker", "target_worker", "tcp_address"])
def test_texts_of_a_view_are_plain(name: str) -> None:
    view = pb.SlotView()
    setattr(view, name, FORGED)
    text = getattr(_plain(view), name)
    assert text.startswith("\\x1b[2J\n2026 INFO forged\\u202exxx")
    assert len(text) < LONGEST + 100


def test_errors_of_a_peer_are_plain() -> None:
    detail = records_pb2.ErrorDetail(name="StateCorruptError", message=FORGED, remote_traceback=FORGED)
    error = error_of(detail)
    assert type(error).__name__ == "StateCorruptError"
    for text in (error.message, error.remote_traceback):
        assert text.startswith("\\x1b[2J\n2026 INFO forged\\u202exxx")
        assert len(text) < LONGEST + 100
    assert error_of(records_pb2.ErrorDetail(name="DeadlineError", message="a\n\tb – 漢字")).message == "a\n    b – 漢字"
