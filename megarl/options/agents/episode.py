"""Episodes of an agent that is not ours: a program that asks an endpoint for turns of the policy, as it would ask OpenAI's.

Its histories are a tree (`options/agents/tree.py`). Every branch becomes a sample; a turn that several branches share counts
in the first of them, and is context in the others.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.data.left_out import LeftOut
from megarl.data.media import Media
from megarl.data.sample import EPISODE_REWARD, Prompt, Sample
from megarl.data.template_args import ROW_KEY, args_of_row
from megarl.errors import EpisodeError
from megarl.option_list import part
from megarl.options.agents import verifiers_agent
from megarl.options.agents.agents import Agent, AgentEnd, Agents, FunctionAgent, OtherPython, SandboxedAgent, open_agent
from megarl.options.agents.section import AgentConfig, agent_of
from megarl.options.agents.server import SessionServer
from megarl.options.agents.session import AgentSession, SessionLimits
from megarl.options.agents.tree import TurnTree
from megarl.rollout.engines.protocol import Generation
from megarl.rollout.engines.stops import NO_STOPS, Stops
from megarl.rollout.episodes.base import EpisodeContext, SampleTokens
from megarl.rollout.episodes.build import EpisodeOpening
from megarl.rollout.episodes.transcript import Transcript
from megarl.rollout.episodes.turns import TurnTemplate
from megarl.system.user_code import absolute_name, load_user_function


class KeptTurns:
    """Samples, and gives what an earlier try of the episode has sampled to a later one that asks the same."""

    def __init__(self, sample: SampleTokens) -> None:
        self._sample = sample
        self._kept: dict[Any, list[Generation]] = {}
        self._given: Counter[Any] = Counter()

    def begin_try(self) -> None:
        """From now on everything may be given once more."""
        self._given.clear()

    async def __call__(
        self, ids: list[int], most: int, media: Sequence[Media] | None = None, /, stops: Stops = NO_STOPS
    ) -> Generation:
        question = (most, tuple(ids), tuple(shown.pixels for shown in media or ()), stops)
        generations, number = self._kept.setdefault(question, []), self._given[question]
        self._given[question] += 1
        if number < len(generations):
            return generations[number]
        generation = await self._sample(ids, most, media, **({"stops": stops} if stops else {}))
        generations.append(generation)
        return generation


TRIES = 3
"""How often an agent is begun that ends without having asked for a turn, or with the process that it shares with others."""


async def with_agent(prompt: Prompt, number: int, sample: SampleTokens, context: EpisodeContext) -> list[Sample]:
    """The branches of one episode of the agent, that of its last turn first.

    The reward that the agent gave itself, or 0 if it failed or was ended before, is under `environment` in the rewards of the
    first one. An agent that was ended, or that asked for more than it may, leaves a last turn that is truncated.
    """
    agents: Agents = context.shared
    most = context.max_new_tokens
    limits = SessionLimits(context.max_turns, context.max_prompt_tokens + most, most)
    end = AgentEnd()
    own_args = args_of_row(prompt.row.get(ROW_KEY), f"row {prompt.row_id}")
    async with agents.at_once:
        kept_turns = KeptTurns(sample)
        for _ in range(TRIES):
            kept_turns.begin_try()
            session = AgentSession(
                limits, kept_turns, agents.renderer, context.counts, agents.history, context.pictures, own_args
            )
            end = await agents.act(session, prompt)
            if session.tree.turns and not end.with_process:
                break
    if not session.tree.turns:
        raise EpisodeError(
            f"{agents.name} ended {TRIES} times on row {prompt.row_id} without asking for a turn of the policy: {end.why}"
        )
    context.counts["agent_errors"] += end.failed
    context.counts["agent_timeouts"] += end.was_ended
    template = agents.renderer(())
    folder = context.pictures.media_folder if context.pictures is not None else Path()
    samples = samples_of(prompt, number, session.tree, context.tokenizer, template, context.max_new_tokens, folder)
    context.counts["branches"] += len(samples) - 1
    if session.is_cut or end.was_ended:
        samples[0] = replace(samples[0], finish_reason="length")
    reward = end.reward if end.reward is not None else session.reward
    if reward is None and (end.failed or end.was_ended):
        reward = 0.0
    if reward is not None:
        samples[0] = replace(samples[0], rewards={EPISODE_REWARD: reward})
    return samples


def samples_of(
    prompt: Prompt, number: int, tree: TurnTree, tokenizer: Any, template: TurnTemplate, max_new_tokens: int, folder: Path
) -> list[Sample]:
    """Each branch of `tree` as a sample; every token that the policy sampled is in the mask of one of them. Pictures are files
    in `folder`."""
    samples: list[Sample] = []
    for index, branch in enumerate(tree.branches()):
        root, leaf = branch.turns[0], branch.turns[-1]
        text = tokenizer.decode(root.told_ids, skip_special_tokens=False)
        began = replace(prompt, prompt_ids=root.told_ids, prompt_text=text, media=list(root.told_media))
        transcript = Transcript(began, max_new_tokens)
        for turn, is_own in zip(branch.turns, branch.is_own, strict=True):
            if turn is not root:
                messages = [message.for_readers(folder) for message in turn.told]
                transcript.append_observation(turn.told_ids, messages, turn.told_media)
            append = transcript.append_turn if is_own else transcript.append_earlier_turn
            append(turn.generation, template.turn_text(turn.generation))
        sample = transcript.sample(began, number, leaf.generation.finish_reason)
        if index:
            sample = replace(sample, sample_id=f"{sample.sample_id}+{index}", branch_of=samples[0].sample_id)
        samples.append(sample)
    return samples


KINDS = {"agent": "megarl.options.agents.episode:with_agent"}


def open_part(opening: EpisodeOpening) -> None:
    """Open the agents of a run, their endpoint and their sandboxes.

    Raises:
        EpisodeError: the agent cannot be started, nothing can listen, or the chat template does not serve.
    """
    if opening.settings.kind != "agent":
        return
    settings, context = agent_of(opening.settings), opening.context

    # ids and names that the protocols want are no news to the policy
    left_out = LeftOut(context.tokenizer, (*opening.ignore_fields, "name", "tool_call_id"), refuses=False)

    def renderer(tools: Sequence[Mapping[str, Any]]) -> TurnTemplate:
        schemas, args = [dict(tool) for tool in tools], opening.template_args
        template = TurnTemplate(context.tokenizer, schemas, "user", opening.pictures, args)
        template.left_out = left_out
        return template

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
            kind = part("sandboxes", "sandbox", "rollout.episode.sandbox")
            sandboxes = kind.open_sandboxes(sandbox, context.choices, server.port if settings.command else None)
        agent: Agent
        if settings.verifiers.environment:
            agent = _verifiers_agent(settings)
        elif sandboxes is not None and settings.command:
            passed = {name: os.environ[name] for name in settings.pass_environment if name in os.environ}
            environment = {**passed, **settings.environment}
            agent = SandboxedAgent(settings.command, environment, sandboxes)
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
