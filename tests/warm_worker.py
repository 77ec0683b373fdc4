"""Asks the server of tests/warm_workers.py for a worker in this process's place; ends when that does, and it with this."""

import json
import os
import socket
import sys
import time

while not os.path.exists(sys.argv[1]):  # the server is still importing
    time.sleep(0.05)
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    request = {"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd()}
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    server.recv(1)  # nothing is ever sent: it returns when the other end closes
