"""Lays file over file and sorts the keys into run and stages."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from prime_rl.configs.orchestrator import INHERITED
from prime_rl.configs.run import RLConfig, SFTConfig
from prime_rl.configs.tree import Node, Path, empty_table, merge, names_other_type

RUN_KEYS = ("run", "output_dir", "plugin_versions")
"""Top-level keys of a recipe that belong to the run; every other one belongs to stages."""

STAGE_CLASSES: dict[str, type[BaseModel]] = {"rl": RLConfig, "sft": SFTConfig}
DEFAULT_STAGE = "rl"

_GROUPS: tuple[Path, ...] = (("orchestrator", "train"), ("orchestrator", "eval"), ("eval",))
_OF_FIRST_STAGE = ("name", "fresh")
"""Keys of a shared [model] that only the first stage takes: the others go on from its weights."""
_OF_ONE_STAGE = ("type", "name")


@dataclass
class Draft:
    """A run that is not validated yet."""

    run: Node
    """The run's own keys, and those that belong nowhere."""
    stages: list[Node]
    is_staged: bool
    """False when the only stage is written at top level."""
    malformed: Node | None = None
    """What `stages` is when it is no list."""

    def root(self) -> Node:
        """The whole as the table that `RunConfig` validates."""
        origin = self.stages[0].origin if self.stages else self.run.origin
        return self.run.with_key("stages", self.malformed or Node(self.stages, origin))

    def stages_with(self, key: str) -> list[int]:
        """Numbers of the stages that have this key."""
        return [i for i, stage in enumerate(self.stages) if key in stage_keys(stage)]


def stage_type(stage: Node) -> str | None:
    """The stage's type; None when it is no known one."""
    written = stage.get("type")
    name = DEFAULT_STAGE if written is None else written.value
    return name if isinstance(name, str) and name in STAGE_CLASSES else None


def stage_keys(stage: Node) -> set[str]:
    """Keys that a stage of this type has; of an unknown type: keys of any stage."""
    known = stage_type(stage)
    classes = [STAGE_CLASSES[known]] if known else list(STAGE_CLASSES.values())
    return {key for one in classes for key in one.model_fields}


def compose(layers: list[Node]) -> Draft:
    """One draft from the files' tables, later over earlier.

    Without `stages` every key that is not the run's belongs to the only stage. With it, such keys
    are defaults of every stage that has them; in a file after the one with `stages` they win over
    what the stages say.
    """
    run = empty_table()
    below: list[Node] = []
    above: list[Node] = []
    stages: Node | None = None
    for layer in layers:
        run = merge(run, layer.only(set(RUN_KEYS)))
        shared = layer.without(*RUN_KEYS, "stages")
        written = layer.get("stages")
        if written is None:
            above.append(shared)
        else:
            stages = written if stages is None else merge(stages, written)
            below, above = [*below, *above, shared], []
    if stages is None:
        only = empty_table() if not layers else Node({}, layers[0].origin)
        for shared in above:
            only = overlay(only, shared)
        return Draft(run, [only], is_staged=False)
    if not stages.is_list:
        return Draft(run, [], is_staged=True, malformed=stages)
    draft = Draft(run, list(stages.value), is_staged=True)
    for index, stage in enumerate(draft.stages):
        if stage.is_table:
            draft.stages[index] = _complete(index, stage, below, above)
    for shared in [*below, *above]:
        lost = {k for k in shared.value if k in _OF_ONE_STAGE or not draft.stages_with(k)}
        draft.run = merge(draft.run, shared.only(lost))
    return draft


def _complete(index: int, stage: Node, below: list[Node], above: list[Node]) -> Node:
    keys = stage_keys(stage) - set(_OF_ONE_STAGE)
    complete = empty_table(stage.origin)
    for shared in below:
        complete = overlay(complete, for_stage(index, shared.only(keys)))
    complete = overlay(complete, stage)
    for shared in above:
        complete = overlay(complete, for_stage(index, shared.only(keys)))
    return complete


def for_stage(index: int, shared: Node) -> Node:
    """What stage `index` takes of a shared table."""
    model = shared.get("model")
    if index == 0 or model is None or not model.is_table:
        return shared
    return shared.with_key("model", model.without(*_OF_FIRST_STAGE))


def overlay(stage: Node, over: Node) -> Node:
    """`over` on top of a stage.

    Defaults of a source group in `over` win over what the sources below say, as for every later
    layer.
    """
    for path in _GROUPS:
        group = over.get(*path)
        if group is not None and group.is_table:
            stage = _trim_sources(stage, path, group.only(set(INHERITED)))
    merged = dict(stage.value)
    for key, node in over.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return Node(merged, stage.origin)


def _trim_sources(node: Node, path: Path, defaults: Node) -> Node:
    """The stage without what its sources say about the keys of `defaults`."""
    if path:
        inner = node.get(path[0])
        if inner is None:
            return node
        return node.with_key(str(path[0]), _trim_sources(inner, path[1:], defaults))
    sources = node.get("source")
    if sources is None or not sources.is_list or not defaults.value:
        return node
    trimmed = [_trim(one, defaults) or one for one in sources.value]
    return node.with_key("source", Node(trimmed, sources.origin))


def _trim(own: Node, over: Node) -> Node | None:
    """`own` without the keys that `over` has; None when nothing but such a key is left."""
    if not own.is_table:
        return None
    if not over.is_table or names_other_type(own, over) or _names_other_taskset(own, over):
        return own if over.is_table else None
    kept = {}
    for key, node in own.value.items():
        left = _trim(node, over.value[key]) if key in over.value else node
        if left is not None:
            kept[key] = left
    return Node(kept, own.origin)


def _names_other_taskset(own: Node, over: Node) -> bool:
    mine, other = own.get("taskset", "id"), over.get("taskset", "id")
    return mine is not None and other is not None and bool(mine.value != other.value)
