"""Tokens that megarl's own servers ask of every request: made for one process, handed over where nobody else reads."""

from __future__ import annotations


def bearer(token: str | None) -> dict[str, str]:
    """The HTTP header that brings `token`; empty without one."""
    return {"Authorization": f"Bearer {token}"} if token else {}
