"""What Ray runs before a worker of the tests, as its own `setup_worker.py`, which imports Ray for that: 0.7 s of every worker.

The worker's environment is completed by that of its actor, then its program takes this one's place. Where more is asked for,
Ray's own program does it.
"""

import argparse
import json
import os
import re
import shlex
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--serialized-runtime-env-context", default="{}")
parser.add_argument("--language")
own, rest = parser.parse_known_args()
context = json.loads(own.serialized_runtime_env_context)
if own.language != "PYTHON" or context.get("command_prefix") or context.get("override_worker_entrypoint"):
    os.execv(sys.executable, [sys.executable, str(Path(rest[0]).with_name("setup_worker.py")), *sys.argv[1:]])
for name, value in (context.get("env_vars") or {}).items():
    os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
program = shlex.split(context.get("py_executable") or sys.executable)
os.execv(program[0], [*program, *rest])
