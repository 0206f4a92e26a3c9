"""The verifiers environment: the agent's calls are answered until it gives its answer."""

from __future__ import annotations

import verifiers.v1 as vf
from pydantic import Field

from prime_rl_environment_calculator.tool import calculate, called_expression


class CalculatorEnvConfig(vf.EnvConfig):
    """One agent and its calculator."""

    agent: vf.AgentConfig = vf.AgentConfig()
    """Who works the sums out."""
    max_calls: int = Field(default=4, ge=1)
    """Calls that are answered; an agent that calls once more has given no answer."""


class CalculatorEnv(vf.Env[CalculatorEnvConfig]):
    """Answers every call with a tool message; a reply that calls nothing ends the episode."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """See vf.Env.run."""
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            for number in range(self.config.max_calls):
                expression = called_expression(segment.last_reply)
                if segment.terminated or expression is None:
                    return
                answer = vf.ToolMessage(
                    tool_call_id=f"call-{number}", content=calculate(expression)
                )
                segment = await talk.turn([answer])
