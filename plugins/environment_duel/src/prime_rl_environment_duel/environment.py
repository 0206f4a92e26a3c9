"""The verifiers environment: two agents, or one and a program, play a game against each other."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Literal

import verifiers.v1 as vf

from prime_rl_environment_duel.game import Game
from prime_rl_environment_duel.rules import perfect_move, random_move
from prime_rl_environment_duel.taskset import DuelData, DuelTask


class DuelEnvConfig(vf.EnvConfig):
    """Who plays."""

    first: vf.AgentConfig = vf.AgentConfig()
    """Makes the first move."""
    second: vf.AgentConfig = vf.AgentConfig()
    """Answers it."""
    opponent: Literal["self", "random", "perfect"] = "self"
    """Who plays second: the agent of that name, or a program that makes any legal move, or the best
    one. A program leaves no trace."""


class DuelEnv(vf.Env[DuelEnvConfig]):
    """Tells the player whose turn it is how many stones are left, and takes the reply as a move.

    Each agent has a conversation of its own, which opens with its first move. Both are rewarded by
    name when the game is over: `win` 1 or 0.
    """

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """See vf.Env.run."""
        assert isinstance(task, DuelTask)
        game = Game(task.data.stones)
        talks: dict[str, vf.Interaction] = {}
        async with AsyncExitStack() as open_talks:
            while not game.is_over:
                if game.player == "second" and self.config.opponent != "self":
                    game.play(str(self._programmed_move(game, task.data)))
                    continue
                if game.player not in talks:
                    agent = agents.first if game.player == "first" else agents.second
                    talks[game.player] = await open_talks.enter_async_context(
                        agent.interaction(task)
                    )
                segment = await talks[game.player].turn(str(game.stones))
                if segment.terminated:
                    return  # the agent's own trace says why
                game.play(segment.last_reply)
        for name, talk in talks.items():
            _record(talk.trace, game, name)

    def _programmed_move(self, game: Game, data: DuelData) -> int:
        if self.config.opponent == "perfect":
            return perfect_move(game.stones)
        return random_move(game.stones, f"{data.stones}/{game.moves}")


def _record(trace: vf.Trace, game: Game, player: str) -> None:
    trace.record_reward("win", game.reward(player))
    trace.record_metric("broke_rules", float(game.broke_rules == player))
    if game.chances[player]:
        trace.record_metric("best_moves", game.taken[player] / game.chances[player])
