"""An agent's trace -> training samples: one per merged sequence, every per-token stream aligned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prime_rl.orchestrator.arrays import fit_float32, join_routes, join_sampling_masks
from prime_rl.orchestrator.merging import MergedSequence, Turn, merge_turns
from prime_rl.wire import TrainingSample


class TraceGraph:
    """The message graph of a trace as the env server's wire carries it.

    A node holds the tokens its message adds; a path from a root to a node is what the model saw.
    """

    def __init__(self, nodes: Sequence[dict[str, Any]]) -> None:
        self.nodes = nodes

    def path(self, index: int) -> list[int]:
        """Node numbers from the root to `index`."""
        path = [index]
        while (parent := self.nodes[path[-1]]["parent"]) is not None:
            path.append(parent)
        return path[::-1]

    def leaves(self) -> list[int]:
        """Nodes without children, in order: the environment's branches."""
        parents = {node["parent"] for node in self.nodes}
        return [index for index in range(len(self.nodes)) if index not in parents]

    def rejected(self) -> set[int]:
        """Attempts to compact a history that the agent did not go on from; they never train."""
        links = [(index, link) for index, node in enumerate(self.nodes) for link in _links(node)]
        accepted = {link["node"] for _, link in links if link["type"] == "compaction"}
        attempts = {index for index, link in links if link["type"] == "compaction_attempt"}
        return attempts - accepted

    def sampled(self) -> list[int]:
        """Nodes that hold sampled tokens and may train, in the order they came to be."""
        rejected = self.rejected()
        return [
            index
            for index, node in enumerate(self.nodes)
            if node["sampled"] and index not in rejected and any(node["mask"])
        ]

    def turn(self, index: int) -> Turn:
        """The model call that made a sampled node."""
        node = self.nodes[index]
        prompt: list[int] = []
        for earlier in self.path(index)[:-1]:
            prompt += self.nodes[earlier]["token_ids"]
        mask = node["mask"]
        first = mask.index(True)
        prompt += node["token_ids"][:first]
        return Turn(
            prompt_ids=prompt,
            completion_ids=node["token_ids"][first:],
            completion_mask=mask[first:],
            logprobs=_spread(node["logprobs"], mask[first:]),
        )

    def branch_of(self, index: int) -> int:
        """Number of the first branch whose last sampled node is `index`; -1 when there is none."""
        for number, leaf in enumerate(self.leaves()):
            sampled = [node for node in self.path(leaf) if self.nodes[node]["sampled"]]
            if sampled and sampled[-1] == index:
                return number
        return -1


def _links(node: dict[str, Any]) -> Sequence[dict[str, Any]]:
    return node.get("semantic_parents") or ()


def _spread(values: Sequence[float], mask: Sequence[bool]) -> list[float]:
    """Values of the sampled tokens, 0.0 in between. Raises ValueError when their number differs or
    one is not finite: an engine that answers so has lost its weights."""
    if not fit_float32(values):
        raise ValueError("log-probabilities are not all finite")
    if len(values) == len(mask) and all(mask):
        return list(values)
    if len(values) != sum(mask):
        raise ValueError(f"{sum(mask)} sampled tokens with {len(values)} log-probabilities")
    remaining = iter(values)
    return [next(remaining) if sampled else 0.0 for sampled in mask]


def samples_of_trace(
    trace_id: str,
    nodes: Sequence[dict[str, Any]],
    env_name: str,
    temperature: float,
    seq_len: int,
) -> list[TrainingSample]:
    """The training samples of one trace, cut to `seq_len` tokens; those without a trainable token
    are left out. Raises ValueError when the trace's streams do not fit together."""
    return [
        sample for sample, _ in samples_with_paths(trace_id, nodes, env_name, temperature, seq_len)
    ]


def samples_with_paths(
    trace_id: str,
    nodes: Sequence[dict[str, Any]],
    env_name: str,
    temperature: float,
    seq_len: int,
) -> list[tuple[TrainingSample, list[dict[str, Any]]]]:
    """As samples_of_trace, each with the nodes whose tokens, joined, begin with the sample's."""
    graph = TraceGraph(nodes)
    sampled = graph.sampled()
    sequences = merge_turns([graph.turn(index) for index in sampled])
    samples = []
    for sequence in sequences:
        last_node = sampled[sequence.turns[-1]]
        path = [nodes[i] for i in graph.path(last_node)]
        sample = _sample(sequence, path, seq_len)
        if sample is None:
            continue
        sample.env_name = env_name
        sample.temperatures = [temperature] * len(sample.token_ids)
        sample.trace_id = trace_id
        sample.branch_index = graph.branch_of(last_node)
        sample.check_aligned()
        samples.append((sample, path))
    return samples


def content_roles(path: Sequence[Mapping[str, Any]], length: int) -> list[str]:
    """Role of the message whose content each of the first `length` tokens of a path is; "" for the
    template's tokens.

    Which tokens are content is what the renderer said of each when it wrote the prompt. Nodes of
    renderers that say nothing have no content; [] when that holds for all.
    """
    roles: list[str] = []
    is_attributed = False
    for node in path:
        flags = node.get("is_content") or ()
        if len(flags) == len(node["token_ids"]):
            role = node["message"].get("role", "")
            roles += [role if is_content else "" for is_content in flags]
            is_attributed = is_attributed or bool(flags)
        else:
            roles += [""] * len(node["token_ids"])
    return roles[:length] if is_attributed else []


def _sample(
    sequence: MergedSequence, path: Sequence[dict[str, Any]], seq_len: int
) -> TrainingSample | None:
    is_cut = len(sequence.token_ids) > seq_len
    token_ids = sequence.token_ids[:seq_len]
    mask = sequence.mask[:seq_len]
    logprobs = sequence.logprobs[:seq_len]
    mask[0], logprobs[0] = False, 0.0
    if not any(mask):
        return None
    return TrainingSample(
        token_ids=token_ids,
        mask=mask,
        logprobs=logprobs,
        temperatures=[],
        env_name="",
        routed_experts=join_routes(path, is_cut, len(token_ids)),
        sampling_mask=join_sampling_masks(path, mask),
    )
