"""Episodes of an agent that is not ours: its program, its endpoint and its sandboxes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.data.sample import Prompt
from megarl.errors import EpisodeError
from megarl.option_list import part
from megarl.options.agents import verifiers_agent
from megarl.options.agents.agents import Agent, Agents, FunctionAgent, OtherPython, open_agent
from megarl.options.agents.sandboxed_agent import SandboxedAgent
from megarl.options.agents.section import AgentConfig, agent_of
from megarl.options.agents.server import SessionServer
from megarl.rollout.episodes.build import EpisodeOpening
from megarl.rollout.episodes.turns import TurnTemplate
from megarl.system.user_code import absolute_name, load_user_function

KINDS = {"agent": "megarl.options.agents.acting:with_agent"}


def open_part(opening: EpisodeOpening) -> None:
    """Open the agents of a run, their endpoint and their sandboxes.

    Raises:
        EpisodeError: the agent cannot be started, nothing can listen, or the chat template does not serve.
    """
    if opening.settings.kind != "agent":
        return
    settings, context = agent_of(opening.settings), opening.context

    def renderer(tools: Sequence[Mapping[str, Any]]) -> TurnTemplate:
        return TurnTemplate(context.tokenizer, [dict(tool) for tool in tools], "user", opening.pictures)

    def question(prompt: Prompt) -> str:
        asked = prompt.row.get(opening.prompt_key, prompt.prompt_text)
        return asked if isinstance(asked, str) else json.dumps(asked)

    renderer(())
    if settings.function is not None:
        load_user_function(settings.function, EpisodeError)
    function = absolute_name(settings.function) if settings.function is not None else None
    server = SessionServer(("megarl", *settings.models), settings.host)
    try:
        sandboxes = None
        sandbox = getattr(opening.settings, "sandbox", None)  # another option's
        if sandbox is not None and sandbox.kind != "none":
            opened = part("sandboxes", "opened", "rollout.episode.sandbox")
            sandboxes = opened.open_chosen(sandbox, context.choices, server.port if settings.command else None)
        agent: Agent
        if settings.verifiers.environment:
            agent = _verifiers_agent(settings)
        elif sandboxes is not None and settings.command:
            given = {name: os.environ[name] for name in settings.pass_environment if name in os.environ}
            environment = {**given, **settings.environment}
            agent = SandboxedAgent(settings.command, environment, sandboxes, settings.timeout_s)
        else:
            agent = open_agent(settings.command, function, settings.processes, settings.environment, settings.pass_environment)
    except BaseException:
        server.close()
        raise
    asked = sandboxes if function is not None else None
    limits: dict[str, Any] = {"timeout_s": settings.timeout_s, "at_once": settings.at_once}
    context.shared = Agents(agent, server, renderer, question, **limits, history=settings.history, sandboxes=asked)


def _verifiers_agent(settings: AgentConfig) -> Agent:
    named = {"environment": settings.verifiers.environment, "arguments": settings.verifiers.arguments}
    python = settings.verifiers.python or sys.executable
    if shutil.which(python) is None:
        raise EpisodeError(f"rollout.episode.agent.verifiers.python is '{python}', which is no program that can be found")
    function = f"{verifiers_agent.__file__}:{verifiers_agent.solve.__name__}"
    other = OtherPython(python, {verifiers_agent.VARIABLE: json.dumps(named)})
    return FunctionAgent(function, settings.processes or 1, other)
