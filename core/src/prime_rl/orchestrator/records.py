"""An env server's episode record -> what the orchestrator needs of it, and what is stored of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prime_rl.errors import what_was_raised
from prime_rl.orchestrator.arrays import LARGEST_FLOAT32, fit_float32
from prime_rl.orchestrator.episode import AgentTrace, EpisodeRequest, EpisodeResult
from prime_rl.orchestrator.needs import EpisodeNeeds, check_samples
from prime_rl.orchestrator.samples import samples_with_paths
from prime_rl.traces.rounding import round_decimals
from prime_rl.wire import EpisodeOutcome

log = logging.getLogger(__name__)

TRUNCATING = frozenset(
    ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
)
"""Stop conditions that mean: a limit ended the trace, not the agent."""

NEEDS_NOTHING = EpisodeNeeds()

NO_REWARD = (
    "NoReward: the episode ended without a reward: its task set has no reward function, or scoring "
    "did not run. Give the tasks a reward, or use an algorithm that needs none (opd, opsd, sft)"
)

TOKEN_DECIMALS = 4
"""Digits of stored log-probabilities. Training uses the wire's own, never these."""


def read_episode(
    record: Mapping[str, Any],
    request: EpisodeRequest,
    *,
    temperature: float,
    seq_len: int,
    end_version: int,
    duration_s: float,
    is_frozen: bool = False,
    needs: EpisodeNeeds = NEEDS_NOTHING,
) -> EpisodeResult:
    """`is_frozen`: a frozen model played it; experts and candidates it chose are not the policy's.

    Raises ValueError when the streams of a trace do not fit together or a number is none (a record
    that lacks a field, or has another type in its place, raises what Python raises); RunError when
    the engine does not return what `needs` says.
    """
    traces = [_agent_trace(trace, request, temperature, seq_len) for trace in record["traces"]]
    trainable = [
        raw for raw, trace in zip(record["traces"], traces, strict=True) if trace.trainable
    ]
    if is_frozen:
        for sample in (sample for trace in traces for sample in trace.samples):
            sample.routed_experts = sample.sampling_mask = None
            sample.temperatures = [1.0] * len(sample.token_ids)
    outcome = _outcome(record, trainable)
    error = _last_error(record)
    sampled_tokens = sum(_sampled_tokens(trace) for trace in trainable)
    if outcome in ("completed", "truncated") and not sampled_tokens:
        outcome, error = "error", "EmptyEpisode: the episode ended without a sampled token"
    if outcome in ("completed", "truncated"):
        if needs.reward and lacks_reward(trainable):
            outcome, error = "error", NO_REWARD
        check_samples(request.source, traces, needs)
    rewards = [trace.reward for trace in traces if trace.trainable]
    if not math.isfinite(sum(rewards)):
        raise ValueError(f"rewards {rewards} are not all finite")
    if request.split == "train" and not fit_float32(rewards):
        raise ValueError(
            f"rewards {rewards}: float32, which the trainer computes in, holds at most "
            f"{LARGEST_FLOAT32:.2g}"
        )
    return EpisodeResult(
        request=request,
        id=record["id"],
        outcome=outcome,
        reward=sum(rewards) / len(rewards) if rewards else 0.0,
        traces=traces,
        error=error,
        metrics=_mean_metrics(trainable) | _agent_rewards(traces),
        input_tokens=_usage(trainable, "prompt_tokens"),
        output_tokens=sampled_tokens,
        turns=sum(sum(node["sampled"] for node in trace["nodes"]) for trace in trainable),
        duration_s=duration_s,
        end_version=end_version,
        record=dict(record),
    )


def _agent_trace(
    trace: Mapping[str, Any], request: EpisodeRequest, temperature: float, seq_len: int
) -> AgentTrace:
    agent = trace["agent"]
    trainable = bool(agent.get("trainable", True))
    found = []
    if trainable and request.split == "train" and trace["ok"]:
        found = samples_with_paths(
            trace["id"], trace["nodes"], request.source, temperature, seq_len
        )
    return AgentTrace(
        id=trace["id"],
        agent=agent.get("name", "agent"),
        trainable=trainable,
        reward=reward_of(trace),
        samples=[sample for sample, _ in found],
        forks=max(0, len(found) - 1),
        paths=[path for _, path in found],
    )


def lacks_reward(traces: Sequence[Mapping[str, Any]]) -> bool:
    """No trace has a reward, or those of one were not computed. A trace without any reward function
    beside others that have one is an agent that is not scored."""
    scored = [trace["rewards"] for trace in traces if trace["rewards"]]
    return not scored or any(all(r is None for r in found.values()) for found in scored)


def reward_of(trace: Mapping[str, Any]) -> float:
    """Sum of score times weight."""
    rewards = trace["rewards"].values()
    return float(sum(r["score"] * r.get("weight", 1.0) for r in rewards if r is not None))


def _outcome(record: Mapping[str, Any], traces: Iterable[Mapping[str, Any]]) -> EpisodeOutcome:
    traces = list(traces)
    if record.get("is_timeout") or any(trace.get("is_timeout") for trace in traces):
        return "timeout"
    if not record.get("ok") or not all(trace["ok"] for trace in traces):
        return "error"
    return "truncated" if any(map(is_truncated, traces)) else "completed"


def is_truncated(trace: Mapping[str, Any]) -> bool:
    """A limit of turns, tokens or completion length ended it."""
    if trace.get("stop_condition") in TRUNCATING:
        return True
    calls = [call for call in trace["calls"] if call.get("error") is None]
    return bool(calls) and calls[-1].get("finish_reason") == "length"


def _last_error(record: Mapping[str, Any]) -> str:
    errors = [*record.get("errors", ())]
    for trace in record["traces"]:
        errors += trace.get("errors", ())
    return f"{errors[-1]['type']}: {errors[-1]['message']}" if errors else ""


def _sampled_tokens(trace: Mapping[str, Any]) -> int:
    return sum(node["mask"].count(True) for node in trace["nodes"] if node["sampled"])


def _usage(traces: Iterable[Mapping[str, Any]], name: str) -> int:
    """Sum over traces of the last call's count: the longest prompt of each."""
    total = 0
    for trace in traces:
        usages = [call["usage"] for call in trace["calls"] if call.get("usage")]
        total += usages[-1].get(name, 0) if usages else 0
    return total


def _mean_metrics(traces: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for trace in traces:
        for name, value in trace["metrics"].items():
            if value is not None:
                values.setdefault(name, []).append(float(value))
        for name, reward in trace["rewards"].items():
            if reward is not None:
                values.setdefault(name, []).append(float(reward["score"]))
    return {name: sum(found) / len(found) for name, found in values.items()}


def _agent_rewards(traces: Sequence[AgentTrace]) -> dict[str, float]:
    """`reward/<agent>`: mean reward of the agent's traces. The one agent of an environment that
    has no other is called `agent`; its reward is the episode's."""
    rewards: dict[str, list[float]] = {}
    for trace in traces:
        if trace.trainable and trace.agent != "agent":
            rewards.setdefault(trace.agent, []).append(trace.reward)
    return {f"reward/{agent}": sum(found) / len(found) for agent, found in rewards.items()}


def stored_record(result: EpisodeResult, task_key: str) -> dict[str, Any]:
    """What the trace stream keeps of an episode: messages, tokens, rewards, provenance."""
    request = result.request
    return {
        "id": result.id,
        "split": request.split,
        "source": request.source,
        "step": request.step,
        "group": request.group_id,
        "member": request.member,
        "task_key": task_key,
        "policy": {"start": request.version, "end": result.end_version},
        "outcome": result.outcome,
        "error": result.error,
        "reward": result.reward,
        "duration_s": round(result.duration_s, 3),
        "traces": _stored_traces(result),
    }


def _stored_traces(result: EpisodeResult) -> list[dict[str, Any]]:
    """None of a record that is damaged where nothing else reads it: evaluations and failures."""
    try:
        return [_stored_trace(trace) for trace in result.record.get("traces", ())]
    except Exception as error:  # whatever other contents than promised make raise
        source, text = result.request.source, what_was_raised(error)
        log.warning("episode %s of source %r is stored without traces: %s", result.id, source, text)
        return []


def _stored_trace(trace: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": trace["id"],
        "agent": trace["agent"].get("name", "agent"),
        "rewards": trace["rewards"],
        "metrics": trace["metrics"],
        "info": trace["info"],
        "stop_condition": trace.get("stop_condition"),
        "errors": trace.get("errors", ()),
        "nodes": [
            {
                "parent": node["parent"],
                "sampled": node["sampled"],
                "message": node["message"],
                "token_ids": node["token_ids"],
                "mask": list(bytes(node["mask"])),
                "logprobs": round_decimals(node["logprobs"], TOKEN_DECIMALS),
            }
            for node in trace["nodes"]
        ],
    }
