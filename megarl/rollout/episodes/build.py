"""Opens the kind of episode that a config names: its function, and what all its episodes share."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from megarl.config.rollout import AgentConfig, McpServerConfig, OpenEnvConfig, SandboxConfig
from megarl.config.sections import DataConfig
from megarl.data.sample import Prompt, Sample
from megarl.errors import EpisodeError
from megarl.options.agents import verifiers_agent
from megarl.options.agents.agents import Agent, Agents, FunctionAgent, OtherPython, open_agent
from megarl.options.agents.sandboxed_agent import SandboxedAgent
from megarl.options.agents.server import SessionServer
from megarl.options.environments.openenv import OpenEnvironment
from megarl.options.pictures.picture_reader import PictureSettings
from megarl.options.pictures.told_pictures import PictureKeeper
from megarl.options.sandboxes.sandbox import Sandboxes, open_sandboxes
from megarl.options.tools import mcp_servers
from megarl.options.tools.functions import FunctionTools
from megarl.options.tools.sandbox_tools import PREFIX, SandboxTools
from megarl.options.tools.source import ToolSource
from megarl.options.tools.toolbox import ToolBox
from megarl.rollout.episodes.base import BUILT_IN, Episode, EpisodeContext, SampleTokens, load_episode
from megarl.rollout.episodes.turns import CHARACTERS_PER_TOKEN, TurnTemplate
from megarl.system.user_code import CLASS_FORMS, absolute_name, load_user_function


class EpisodeSettings(Protocol):
    """What `open_episodes` reads of `rollout.episode`."""

    @property
    def kind(self) -> str: ...
    @property
    def tools(self) -> Sequence[str]: ...
    @property
    def max_turns(self) -> int: ...
    @property
    def tool_timeout_s(self) -> float: ...
    @property
    def tool_max_tokens(self) -> int: ...
    @property
    def agent(self) -> AgentConfig: ...
    @property
    def sandbox(self) -> SandboxConfig: ...
    @property
    def openenv(self) -> OpenEnvConfig: ...
    @property
    def mcp(self) -> Mapping[str, McpServerConfig]: ...


@dataclass(frozen=True)
class Episodes:
    """All episodes of a run: the function of one of them, and what they share. `close` when the run ends."""

    function: Episode
    context: EpisodeContext

    async def branches(self, prompt: Prompt, number: int, sample: SampleTokens) -> list[Sample]:
        """Episode `number` of the group that `prompt` names: its branches, which is one of it but for agents."""
        made = await self.function(prompt, number, sample, self.context)
        return made if isinstance(made, list) else [made]

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools as the chat template's `tools=` takes them; prompts must have been built with them."""
        return self.context.tool_schemas

    def take_counts(self) -> dict[str, int]:
        """How often what happened since the last call."""
        return self.context.take_counts()

    def close(self) -> None:
        """End what the episodes started."""
        self.context.close()


def open_episodes(
    settings: EpisodeSettings,
    data: DataConfig,
    tokenizer: Any,
    max_new_tokens: int,
    pictures: PictureSettings | None = None,
) -> Episodes:
    """The episodes that the config's section `rollout.episode` names; the model takes `pictures`, or none.

    The prompts of episodes with tools must have been built with `tool_schemas`. An episode of the user's own gets
    tools if it names some, and turns if the tokenizer has a chat template.

    Raises:
        EpisodeError: there is no such kind, a tool or an environment cannot be imported, or the tokenizer's chat template
            does not serve the kind.
    """
    kind, timeout_s = settings.kind, settings.tool_timeout_s
    episode = load_episode(kind)
    context = EpisodeContext(
        tokenizer,
        data.max_prompt_tokens,
        max_new_tokens,
        settings.max_turns,
        timeout_s,
        settings.tool_max_tokens,
        system_prompt=data.system_prompt,
        pictures=PictureKeeper(pictures.rules, pictures.media_folder, data.image_folder) if pictures is not None else None,
    )
    if kind == "single":
        return Episodes(episode, context)
    if kind in BUILT_IN and data.chat_template == "never":
        raise EpisodeError(f"data.chat_template is 'never', but rollout.episode.kind is '{kind}', whose turns are a chat")
    if kind == "agent":
        context.agents = _open_agents(settings.agent, settings.sandbox, data.prompt_key, tokenizer, pictures, context.choices)
    elif kind == "environment":
        if settings.openenv.url:
            context.environment_name = f"at {settings.openenv.url}"
            context.environment = partial(OpenEnvironment, settings.openenv)
            context.environments_at_once = asyncio.Semaphore(settings.openenv.at_once)
        elif len(settings.tools) != 1:
            raise EpisodeError(
                f"rollout.episode.tools has {len(settings.tools)} names, but rollout.episode.kind = 'environment' needs one: "
                f"the environment as {CLASS_FORMS}"
            )
        else:
            context.environment_name = settings.tools[0]
            context.environment = load_user_function(settings.tools[0], EpisodeError)
    elif settings.tools:
        characters = settings.tool_max_tokens * CHARACTERS_PER_TOKEN
        context.tools = _open_tools(settings, characters, context.pictures, context.choices)
    elif kind == "tools":
        raise EpisodeError("rollout.episode.tools is empty, but rollout.episode.kind = 'tools' needs at least one")
    if kind in BUILT_IN or tokenizer.chat_template:
        observation_role = "tool" if context.tools is not None else "user"
        context.chat = TurnTemplate(tokenizer, context.tool_schemas, observation_role, pictures)
    return Episodes(episode, context)


def _open_tools(settings: EpisodeSettings, max_characters: int, pictures: PictureKeeper | None, choices: list[str]) -> ToolBox:
    """The tools of a run; what is chosen for them is added to `choices`.

    Raises:
        EpisodeError: a tool is not there, or this machine has no sandbox of the kind that is wanted.
    """
    of_sandbox = [name for name in settings.tools if name.startswith(PREFIX)]
    of_servers = [name for name in settings.tools if name.startswith(mcp_servers.PREFIX)]
    functions = [name for name in settings.tools if name not in (*of_sandbox, *of_servers)]
    sources: list[ToolSource] = []
    try:
        if functions:
            sources.append(FunctionTools(functions, settings.tool_timeout_s, max_characters, pictures))
        if of_sandbox:
            sources.append(SandboxTools(of_sandbox, _sandboxes(settings.sandbox, choices)))
        sources += mcp_servers.open_mcp_tools(of_servers, settings.mcp, settings.tool_timeout_s, pictures)
        return ToolBox(sources)
    except BaseException:
        for source in sources:
            source.close()
        raise


def _sandboxes(settings: SandboxConfig, choices: list[str], port: int | None = None) -> Sandboxes:
    opened = open_sandboxes(settings, port)
    if settings.kind == "auto":
        choices.append(f"sandboxes: {opened.kind} (rollout.episode.sandbox.kind is 'auto')")
    return opened


def _open_agents(
    settings: AgentConfig,
    sandbox: SandboxConfig,
    prompt_key: str,
    tokenizer: Any,
    pictures: PictureSettings | None,
    choices: list[str],
) -> Agents:
    """The agents of a run, their endpoint and their sandboxes; what is chosen for them is added to `choices`.

    Raises:
        EpisodeError: the agent cannot be started, nothing can listen, or the chat template does not serve.
    """

    def renderer(tools: Sequence[Mapping[str, Any]]) -> TurnTemplate:
        return TurnTemplate(tokenizer, [dict(tool) for tool in tools], "user", pictures)

    def question(prompt: Prompt) -> str:
        asked = prompt.row.get(prompt_key, prompt.prompt_text)
        return asked if isinstance(asked, str) else json.dumps(asked)

    renderer(())
    if settings.function is not None:
        load_user_function(settings.function, EpisodeError)
    function = absolute_name(settings.function) if settings.function is not None else None
    server = SessionServer(("megarl", *settings.models), settings.host)
    try:
        sandboxes = None
        if sandbox.kind != "none":
            sandboxes = _sandboxes(sandbox, choices, server.port if settings.command else None)
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
    return Agents(agent, server, renderer, question, **limits, history=settings.history, sandboxes=asked)


def _verifiers_agent(settings: AgentConfig) -> Agent:
    named = {"environment": settings.verifiers.environment, "arguments": settings.verifiers.arguments}
    python = settings.verifiers.python or sys.executable
    if shutil.which(python) is None:
        raise EpisodeError(f"rollout.episode.agent.verifiers.python is '{python}', which is no program that can be found")
    function = f"{verifiers_agent.__file__}:{verifiers_agent.solve.__name__}"
    other = OtherPython(python, {verifiers_agent.VARIABLE: json.dumps(named)})
    return FunctionAgent(function, settings.processes or 1, other)
