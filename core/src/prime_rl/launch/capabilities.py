"""Decides whether the choices of a stage fit together, from what plugins declare, never by name.

A plugin declares `capabilities` (what it can do) and `needs` (what others must be able to do). The
rules here compare the two and say why a pair does not fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from prime_rl.api import Algorithm, AlgorithmNeeds, Plugin
from prime_rl.configs.choices import Choice, chosen_plugins
from prime_rl.configs.orchestrator import SamplingConfig, TrainSourceConfig
from prime_rl.configs.paths import stage_name
from prime_rl.configs.run import RLConfig, RunConfig, SFTConfig
from prime_rl.errors import ConfigError
from prime_rl.plugins import Registry

Device = Literal["cpu", "cuda", "auto"]

LARGEST_REPLAYED_TOP_K = 512
"""Kept token sets are sent per token; more candidates than this would drown the batch."""

_TRAINER_KINDS: tuple[str, ...] = (
    "model",
    "loss",
    "moe_backend",
    "dsa_backend",
    "attention_backend",
)
_ENGINE_KINDS: tuple[str, ...] = ("engine",)
_COMPUTE_KINDS = ("model", "moe_backend", "dsa_backend", "attention_backend")


@dataclass(frozen=True)
class Part:
    """One chosen plugin, ready to be asked."""

    choice: Choice
    plugin: Plugin
    """Constructed from its settings; light by contract."""
    origin: str
    """`prime-rl-loss-ipo 0.1.0`"""

    @property
    def kind(self) -> str:
        """The plugin's kind."""
        return self.choice.kind

    def describe(self) -> str:
        """`loss 'ipo' (trainer.loss, prime-rl-loss-ipo 0.1.0)`."""
        return f"{self.kind} {self.choice.name!r} ({self.choice.path}, {self.origin})"

    def has(self, capability: str) -> Any:
        """The declared value; None when nothing is declared."""
        return self.plugin.capabilities.get(capability)


def check(run: RunConfig, stage_index: int, registry: Registry, device: Device) -> None:
    """Refuse a stage whose choices conflict, with every reason.

    `device` is what `auto` means on this machine; "auto" when that is not known yet: then the
    devices and dtypes that depend on it are not checked. Raises ConfigError, or PluginError when a chosen
    plugin cannot be loaded.
    """
    stage: SFTConfig | RLConfig = run.stages[stage_index]
    parts = [_part(choice, stage, registry) for choice in chosen_plugins(stage)]
    conflicts = [
        *_needs(parts),
        *_devices(stage, parts, device),
        *_dtypes(stage, parts, device),
        *_batch(stage),
    ]
    if isinstance(stage, RLConfig):
        conflicts += [
            *_router_replay(stage, parts),
            *_sampling_replay(stage, parts),
            *_aggregation(parts),
            *_group_sizes(stage, parts),
            *_staleness(stage, parts),
            *_frozen_sampling(parts),
            *_references(stage, parts),
            *_lengths(stage),
        ]
    conflicts = list(dict.fromkeys(conflicts))
    if conflicts:
        name = stage_name(run, stage_index)
        raise ConfigError(
            "\n  ".join([f"stage {name}: these choices do not fit together:", *conflicts])
        )


def _part(choice: Choice, stage: SFTConfig | RLConfig, registry: Registry) -> Part:
    plugin_class: Any = registry.load(choice.kind, choice.name)
    record = registry.find(choice.kind, choice.name)
    section = choice.section
    if section is None:
        config_class = registry.config_class(choice.kind, choice.name)
        section = config_class(**{**stage.model.options, "type": choice.name})
    try:
        plugin = plugin_class(section)
    except Exception as error:  # a third party's constructor may raise anything
        raise ConfigError(
            f"{record.describe()} cannot be made from its settings in {choice.path}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return Part(choice, plugin, f"{record.distribution} {record.version}")


def _needs(parts: list[Part]) -> Iterator[str]:
    """What plugins ask of each other in `needs`."""
    for part in parts:
        for wanted, value in part.plugin.needs.items():
            kind, _, capability = wanted.partition(".")
            others = [other for other in parts if other.kind == kind]
            if not others:
                yield f"{part.describe()} needs a {kind}, and this stage has none."
            for other in others:
                if not offers(other.has(capability), value):
                    yield _lacks(f"{part.describe()} needs", other, capability, value)


def offers(declared: Any, wanted: Any) -> bool:
    """Whether a declared value satisfies a wanted one.

    A collection offers each of its members, or every member of a wanted collection; a number offers
    what is not larger; anything else must be equal.
    """
    if isinstance(declared, Collection) and not isinstance(declared, (str, bytes)):
        members = wanted if isinstance(wanted, (list, tuple, set, frozenset)) else [wanted]
        return all(member in declared for member in members)
    if isinstance(wanted, bool) or isinstance(declared, bool) or wanted is None:
        return bool(declared) == bool(wanted)
    if isinstance(wanted, (int, float)) and isinstance(declared, (int, float)):
        return declared >= wanted
    return bool(declared == wanted)


def _lacks(why: str, part: Part, capability: str, wanted: Any) -> str:
    declared = part.has(capability)
    found = "does not declare it" if declared is None else f"declares {capability} = {declared!r}"
    return (
        f"{why} {part.kind} capability {capability} = {wanted!r}, but {part.describe()} {found}. "
        f"Change one of the two."
    )


def _devices(stage: SFTConfig | RLConfig, parts: list[Part], device: Device) -> Iterator[str]:
    """Every plugin runs where its process runs; one that declares no devices runs anywhere."""
    trainer = device if stage.trainer.device == "auto" else stage.trainer.device
    engine = device if stage.inference.device == "auto" else stage.inference.device
    places = [("trainer.device", trainer, _TRAINER_KINDS)]
    if isinstance(stage, RLConfig) or stage.eval is not None:
        places.append(("inference.device", engine, _ENGINE_KINDS))
    for field, wanted, kinds in places:
        if wanted == "auto":
            continue
        for part in parts:
            declared = part.has("devices")
            if part.kind in kinds and declared is not None and wanted not in declared:
                runs_on = ", ".join(map(str, declared))
                yield f"{field} is {wanted!r}, but {part.describe()} runs on {runs_on} only."


def _dtypes(stage: SFTConfig | RLConfig, parts: list[Part], device: Device) -> Iterator[str]:
    dtype = stage.model.compute_dtype
    if dtype == "auto":
        trainer = device if stage.trainer.device == "auto" else stage.trainer.device
        if trainer == "auto":
            return
        dtype = "float32" if trainer == "cpu" else "bfloat16"
    for part in parts:
        declared = part.has("dtypes")
        if part.kind in _COMPUTE_KINDS and declared is not None and dtype not in declared:
            computes_in = ", ".join(map(str, declared))
            yield (
                f"model.compute_dtype is {dtype!r}, but {part.describe()} computes in "
                f"{computes_in} only."
            )


def _batch(stage: SFTConfig | RLConfig) -> Iterator[str]:
    """Every rank needs something to do in every step."""
    ranks = stage.trainer.parallel.ranks
    field, size = (
        ("orchestrator.batch_size", stage.orchestrator.batch_size)
        if isinstance(stage, RLConfig)
        else ("data.batch_size", stage.data.batch_size)
    )
    if size < ranks:
        yield (
            f"{field} is {size}, fewer than the {ranks} trainer.parallel.ranks; some ranks would "
            "have nothing to train on. Raise the batch size or use fewer ranks."
        )


def _router_replay(stage: RLConfig, parts: list[Part]) -> Iterator[str]:
    returned = stage.inference.return_routed_experts
    if stage.trainer.enable_router_replay:
        why = "trainer.enable_router_replay replays the experts that the engine chose: it needs"
        yield from _passed_on(why, "routed_experts", parts)
        if returned is False:
            yield (
                "trainer.enable_router_replay is on, but inference.return_routed_experts is off, "
                "so there is nothing to replay. Leave the latter at 'auto'."
            )
    elif returned is True:
        yield from _passed_on("inference.return_routed_experts needs", "routed_experts", parts)


def _sampling_replay(stage: RLConfig, parts: list[Part]) -> Iterator[str]:
    """Truncated sampling changes the probabilities; the trainer must know the kept tokens."""
    samplings = {
        source.label: source.sampling
        for part, source in _sources(stage, parts)
        if _needs_of(part).components & {"rl", "ref_kl"}
    }
    truncated = {label: one for label, one in samplings.items() if is_truncated(one)}
    for label, sampling in truncated.items():
        text = f"top_p = {sampling.top_p}" if sampling.top_p < 1 else f"top_k = {sampling.top_k}"
        why = (
            f"train source {label!r} samples with {text}, so the trainer has to know which tokens "
            "were kept: it needs"
        )
        yield from _passed_on(why, "sampling_mask", parts)
        if sampling.top_k is not None and sampling.top_k > LARGEST_REPLAYED_TOP_K:
            yield (
                f"train source {label!r} samples with top_k = {sampling.top_k}; at most "
                f"{LARGEST_REPLAYED_TOP_K} kept tokens can be replayed."
            )


def is_truncated(sampling: SamplingConfig) -> bool:
    """True when some tokens could not be sampled at all."""
    return sampling.top_p < 1 or sampling.top_k is not None


def _passed_on(why: str, capability: str, parts: list[Part]) -> Iterator[str]:
    """The engine must return something, and the router must not drop it."""
    for part in parts:
        if part.kind == "engine" and not offers(part.has(capability), True):
            yield _lacks(why, part, capability, True)
        if part.kind == "router" and part.has(capability) is False:
            yield _lacks(why, part, capability, True)


def _algorithms(parts: list[Part]) -> list[Part]:
    """The algorithms of the training sources, in their order."""
    return [
        part
        for part in parts
        if isinstance(part.plugin, Algorithm) and ".source." in part.choice.path
    ]


def _sources(stage: RLConfig, parts: list[Part]) -> list[tuple[Part, TrainSourceConfig]]:
    """Every training source with its algorithm."""
    return list(zip(_algorithms(parts), stage.orchestrator.train.source, strict=True))


def _needs_of(part: Part) -> AlgorithmNeeds:
    assert isinstance(part.plugin, Algorithm)
    return part.plugin.requirements


def _aggregation(parts: list[Part]) -> Iterator[str]:
    """All rl tokens share one denominator; ce and ref_kl have their own."""
    ways = {
        _needs_of(part).loss_aggregation: part
        for part in _algorithms(parts)
        if "rl" in _needs_of(part).components
    }
    if len(ways) > 1:
        pairs = " and ".join(f"{p.choice.path} by {name}" for name, p in ways.items())
        yield (
            "the loss has one denominator for all sources, so all must aggregate alike; found "
            f"{pairs}."
        )


def _group_sizes(stage: RLConfig, parts: list[Part]) -> Iterator[str]:
    """An algorithm that compares the episodes of a group needs some to compare."""
    for part, source in _sources(stage, parts):
        fewest = _needs_of(part).min_group_size
        if source.group_size < fewest:
            yield (
                f"train source {source.label!r} has group_size {source.group_size}, but "
                f"{part.describe()} compares the episodes of a group and gives no credit to fewer "
                f"than {fewest}, so nothing would train. Set group_size to at least {fewest}, or "
                "choose another algorithm."
            )


def _staleness(stage: RLConfig, parts: list[Part]) -> Iterator[str]:
    """The last groups of a batch are target_lag versions old when it is trained on."""
    lag, bound = stage.orchestrator.target_lag, stage.orchestrator.max_off_policy_steps
    grows_stale = any(_needs_of(part).sampled_by != "frozen" for part in _algorithms(parts))
    if bound < lag and grows_stale:
        yield (
            f"orchestrator.max_off_policy_steps is {bound}, below orchestrator.target_lag {lag}: "
            "groups that wait for their batch would be dropped as stale. Raise the former to at "
            f"least {lag}, or lower the latter."
        )


def _frozen_sampling(parts: list[Part]) -> Iterator[str]:
    """Episodes of a frozen model need that model, and only ce can learn from them."""
    for part in _algorithms(parts):
        wants = _needs_of(part)
        if wants.sampled_by != "frozen":
            continue
        if _has_no_teacher(part):
            yield (
                f"{part.describe()} needs episodes sampled by a frozen model, but its settings "
                "name no teacher."
            )
        if wrong := sorted(wants.components - {"ce"}):
            yield (
                f"{part.describe()} uses {' and '.join(wrong)} on episodes of a frozen model; the "
                "importance ratio exists for the policy's own samples only, so there ce alone does."
            )


def _references(stage: RLConfig, parts: list[Part]) -> Iterator[str]:
    """A reference scores the model's whole distribution, at temperature 1."""
    for part, source in _sources(stage, parts):
        wants = _needs_of(part)
        if "ref_kl" in wants.components and wants.reference == "none":
            yield f"{part.describe()} uses ref_kl and asks for no reference."
        if wants.reference == "none":
            continue
        if wants.reference == "teacher" and _has_no_teacher(part):
            yield (
                f"{part.describe()} needs log-probabilities of a teacher, but its settings name "
                "none."
            )
        if wants.reference == "policy":
            yield from _passed_on(
                f"{part.describe()} scores tokens with the policy: it needs",
                "prompt_logprobs",
                parts,
            )
            yield from _room_for_context(stage, part)
        sampling = source.sampling
        for is_set, text in (
            (sampling.top_p < 1, f"top_p = {sampling.top_p}"),
            (sampling.top_k is not None, f"top_k = {sampling.top_k}"),
            (sampling.temperature != 1, f"temperature = {sampling.temperature}"),
        ):
            if is_set:
                yield (
                    f"train source {source.label!r} samples with {text}, but {part.describe()} "
                    "compares with a reference over the whole vocabulary at temperature 1. Leave "
                    "top_p and top_k out, and temperature at 1."
                )


def _room_for_context(stage: RLConfig, part: Part) -> Iterator[str]:
    """What the reference is shown stands before a branch of up to seq_len tokens."""
    limit = stage.inference.max_model_len or stage.seq_len
    assert isinstance(part.plugin, Algorithm)
    shows_more = type(part.plugin).reference_context is not Algorithm.reference_context
    if shows_more and limit <= stage.seq_len:
        yield (
            f"{part.describe()} lets the engines score a hint and the branch behind it, but "
            f"inference.max_model_len is {limit} (by default seq_len) and seq_len {stage.seq_len}, "
            "which leaves the hint no room. Set inference.max_model_len to seq_len plus the "
            "longest hint."
        )


def _has_no_teacher(part: Part) -> bool:
    assert isinstance(part.plugin, Algorithm)
    return part.plugin.teacher is None


def _lengths(stage: RLConfig) -> Iterator[str]:
    limit = stage.inference.max_model_len or stage.seq_len
    groups = [stage.orchestrator.train, stage.orchestrator.eval]
    for source in [source for group in groups if group is not None for source in group.source]:
        wanted = source.sampling.max_completion_tokens
        if wanted is not None and wanted >= limit:
            yield (
                f"source {source.label!r} may generate {wanted} tokens per turn "
                f"(sampling.max_completion_tokens), but prompt and completion together have "
                f"{limit} (inference.max_model_len, by default seq_len)."
            )
