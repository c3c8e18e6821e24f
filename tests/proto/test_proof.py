"""Proof of a token: who is let in, who is believed, and what an impostor can do with what it hears."""

from __future__ import annotations

import pytest

from penstock.proto.rpc.credentials.token_proof import (
    CALLERS_KEPT,
    SCHEME,
    Caller,
    Challenged,
    TokenProver,
    TokenVerifier,
)
from penstock.proto.rpc.credentials.tokens import Tokens

TOKEN, OTHER = "a" * 64, "b" * 64


def verifier(text: str = f"client:{TOKEN}\nworker:{OTHER}") -> TokenVerifier:
    return TokenVerifier(Tokens(text))


def met(prover: TokenProver, end: TokenVerifier) -> Caller | Challenged | None:
    """Return the result for a caller that answers the challenge."""
    challenged = end.caller(prover.shown.header)
    assert isinstance(challenged, Challenged)
    assert prover.answers(challenged.challenge, prover.shown)
    return end.caller(prover.shown.header)


def test_both_ends_prove_token_without_sending_it() -> None:
    prover, end = TokenProver(TOKEN), verifier()
    caller = met(prover, end)
    assert isinstance(caller, Caller)
    assert caller.roles == {"client"}
    assert prover.shown.proven_by(caller.proof)
    assert TOKEN not in prover.shown.header + caller.proof + caller.credential
    assert end.caller(prover.shown.header) == caller


def test_wrong_token_is_not_challenged_again() -> None:
    prover, end = TokenProver("c" * 64), verifier()
    assert met(prover, end) is None
    assert not prover.answers(end.challenge, prover.shown)


def test_proof_is_worthless_at_another_start() -> None:
    prover, before, after = TokenProver(TOKEN), verifier(), verifier()
    met(prover, before)
    assert after.caller(prover.shown.header) == Challenged(after.challenge)
    again = met(prover, after)
    assert isinstance(again, Caller)
    assert prover.shown.proven_by(again.proof)


def test_an_impostor_is_not_believed() -> None:
    """Reject impostors: one with another token, one that answers with what it heard, one that says nothing, one from
    before."""
    prover, end = TokenProver(TOKEN), verifier()
    first = met(prover, end)
    assert isinstance(first, Caller)
    before = prover.shown
    impostor = TokenVerifier(Tokens(OTHER))
    assert met(prover, impostor) is None
    shown = prover.shown
    for proof in (None, "", b"x", "é", shown.header, shown.header.split(" ")[3], first.proof):
        assert not shown.proven_by(proof)
    assert before.proven_by(first.proof)
    assert not TokenProver(TOKEN).shown.proven_by("")


@pytest.mark.parametrize("challenge", [None, b"0" * 32, "0" * 31, "0" * 33, "g" * 32])
def test_only_a_challenge_is_answered(challenge: object) -> None:
    prover = TokenProver(TOKEN)
    assert not prover.answers(challenge, prover.shown)
    assert prover.shown.header == SCHEME


def test_lines_that_are_no_proof_let_nobody_in() -> None:
    prover, end = TokenProver(TOKEN), verifier()
    met(prover, end)
    scheme, challenge, nonce, mac = prover.shown.header.split(" ")
    for line in ("", scheme, f"{scheme} {challenge}", f"{scheme} {challenge} {nonce}", f"{scheme} x {nonce} {mac}"):
        assert not isinstance(end.caller(line), Caller)
    for line in (
        f"{scheme} {challenge} {nonce} {mac[:-1]}",
        f"{scheme} {challenge} {nonce} ",
        f"{scheme} {challenge} {nonce} é",
        f"{scheme} {challenge} {'0' * 32} {mac}",
        f"{scheme} {challenge} x {mac}",
        f"Bearer {mac}",
        "Bearer ",
    ):
        assert end.caller(line) is None
    mine = prover.shown.expected
    assert end.caller(f"{scheme} {challenge} {nonce} {mine}") is None, "the answer's proof is no caller's"


def test_memory_for_callers_is_bounded() -> None:
    end = verifier(TOKEN)
    for number in range(100):
        end.caller(f"Bearer {number}")
        end.caller(f"{SCHEME} {end.challenge} {number:032x} {number:064x}")
    assert not end._known
    end._known.update((str(number), Caller(frozenset(), "")) for number in range(CALLERS_KEPT))
    assert isinstance(met(TokenProver(TOKEN), end), Caller)
    assert len(end._known) == 1
