"""The verifiers environment: a proposer invents a word, solvers turn it round, both are rewarded."""

from __future__ import annotations

import asyncio
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from prime_rl_environment_proposer.scoring import proposal_reward
from prime_rl_environment_proposer.taskset import ProposerTask, solver_task
from prime_rl_environment_proposer.words import is_proposal


class ProposerEnvConfig(vf.EnvConfig):
    """Who plays, and where words come from."""

    proposer: vf.AgentConfig = vf.AgentConfig()
    """Invents the word."""
    solver: vf.AgentConfig = vf.AgentConfig()
    """Turns it round; plays once per attempt."""
    solvers: int = Field(default=4, ge=1)
    """Attempts at each word."""
    max_letters: int = Field(default=12, ge=3)
    """Longest word that may be invented."""
    words: Literal["proposed", "given"] = "proposed"
    """proposed: invented by the proposer. given: the task's own, and nobody proposes; that measures
    solvers on words which do not depend on the proposer."""


class ProposerEnv(vf.Env[ProposerEnvConfig]):
    """One trace of `proposer`, then `solvers` traces of `solver` on its word.

    A solver's reward is its own. The proposer's is `proposal`: 1 - |2p - 1| for the share p of solvers
    that were right. A word that breaks the rules is worth 0 and is given to nobody.
    """

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """See vf.Env.run."""
        assert isinstance(task, ProposerTask)
        if self.config.words == "given":
            await self._solve(task.data.word, agents)
            return
        proposal = await agents.proposer.run(task)
        word = proposal.last_reply
        if proposal.ok and is_proposal(word, task.data.beginning, self.config.max_letters):
            await self._solve(word, agents)

    async def _solve(self, word: str, agents: vf.Agents) -> None:
        task = solver_task(word)
        async with asyncio.TaskGroup() as attempts:
            for _ in range(self.config.solvers):
                attempts.create_task(agents.solver.run(task))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        """See vf.Env.finalize. Nothing is recorded when an agent failed: the episode did, too."""
        by_agent = episode.by_agent
        if not all(trace.ok for trace in episode.traces):
            return
        rewards = [trace.reward for trace in by_agent.get("solver", ())]
        solved = sum(rewards) / len(rewards) if rewards else 0.0
        for trace in by_agent.get("proposer", ()):
            trace.record_reward("proposal", proposal_reward(solved) if rewards else 0.0)
            trace.record_metric("valid_word", float(bool(rewards)))
            trace.record_metric("word_letters", float(len(trace.last_reply)))
