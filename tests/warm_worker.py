"""Asks the server of tests/warm_workers.py for a worker in this process's place; ends when that does, and it with this.

Both end with the raylet, as Ray's workers do.
"""

import json
import os
import select
import socket
import sys
import time

RAYLET = int(os.environ["RAY_RAYLET_PID"])
CHECK_S = 1.0
while not os.path.exists(sys.argv[1]):  # the server is still importing
    os.kill(RAYLET, 0)  # raises if it is gone
    time.sleep(0.05)
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    request = {"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd()}
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    # nothing is ever sent: it can be read from when the other end closes
    while not select.select([server], [], [], CHECK_S)[0]:
        os.kill(RAYLET, 0)
