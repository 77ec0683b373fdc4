"""Gloo's shared device listens where GLOO_SOCKET_IFNAME says, or a world could not reach over nodes."""

from __future__ import annotations

import pytest

from megarl.platform.gloo import _device


def test_the_shared_device_is_on_the_named_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    make = _device.__wrapped__
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert make() is not None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0,lo")
    with pytest.raises(RuntimeError, match="Unable to find address for: nosuch0"):
        make()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert make() is not None
