"""Threads of a process that has asked for it share two heaps."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNTED = """
import ctypes, sys, threading
from megarl.system.threads import share_heaps
if sys.argv[1] == "shared":
    share_heaps()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
together = threading.Barrier(6)
def allocate():
    together.wait()
    libc.malloc(1000)
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p] * 2
libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
listing = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, listing)
libc.fclose(listing)
print(open(sys.argv[2]).read().count("<heap"))
"""


@pytest.mark.parametrize(("how", "at_least", "at_most"), [("shared", 1, 2), ("own", 4, 64)])
def test_threads_share_two_heaps(how: str, at_least: int, at_most: int, tmp_path: object) -> None:
    command = [sys.executable, "-c", COUNTED, how, f"{tmp_path}/heaps.xml"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert at_least <= int(ended.stdout) <= at_most
