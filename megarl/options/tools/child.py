"""The program of a process that runs the synchronous tools of a run, one call at a time. Run by path.

A process of its own, because a policy chooses the arguments: 9**9**9**9 stops an interpreter, and only a process can be
ended from outside. In: lines of JSON, first `{"path": sys.path, "tools": {name: import path}, "pictures"}`, then `{"name",
"arguments", "max_characters", "timeout_s"}`. Out: `"ready"`, then per call `{"told", "characters", "failure", "fault"}`.
Pictures are kept here, and named by their hashes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a tool prints must not look like an answer
    questions = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    setting = json.loads(questions.readline())
    sys.path[:] = setting["path"]
    from megarl.errors import EpisodeError
    from megarl.option_list import part
    from megarl.options.tools.answers import ToolAnswer, failure_text, told_answer
    from megarl.system.user_code import load_user_function

    functions = {name: load_user_function(path, EpisodeError) for name, path in setting["tools"].items()}
    pictures = None
    if setting["pictures"]:
        pictures = part("pictures", "picture_keeper", "a tool that shows pictures").PictureKeeper.of_json(setting["pictures"])
    print('"ready"', file=answers, flush=True)
    for line in questions:
        question: dict[str, Any] = json.loads(line)
        # The default action ends this process, even inside an operation in C and even if nobody waits any more.
        signal.setitimer(signal.ITIMER_REAL, question["timeout_s"])
        fault = None
        try:
            answer = functions[question["name"]](**question["arguments"])
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the policy is told
            tool_answer = ToolAnswer.whole(failure_text(error), "tool_errors")
        else:
            try:
                tool_answer = told_answer(answer, pictures)
            except EpisodeError as error:
                tool_answer, fault = ToolAnswer.whole(""), str(error)
        signal.setitimer(signal.ITIMER_REAL, 0)
        head = tool_answer.told.beginning(question["max_characters"]).to_json()
        reply = {"told": head, "characters": tool_answer.characters, "failure": tool_answer.failure, "fault": fault}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
