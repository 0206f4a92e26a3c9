"""Fixtures of the configuration tests: a wheel with one small plugin of each kind, and recipes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prime_rl.configs.load import LoadedRun, load_run
from prime_rl.plugins import Registry, scan
from prime_rl.testing.distributions import write_distribution

PROBES = '''\
"""Plugins that only have settings."""

from typing import Any, Literal

from pydantic import Field, model_validator

from prime_rl.api import (
    Algorithm, AlgorithmNeeds, AttentionBackend, Engine, Launcher, Loss, Model, MoEBackend,
    PluginConfig, Router, WeightTransport,
)
from prime_rl.configs.base import BaseConfig, defaults


class Inner(BaseConfig):
    depth: int = Field(1, ge=1)
    """How deep."""


class ProbeLossConfig(PluginConfig):
    former = {
        "width": "write `.eps` instead",
        "outer.depth": "write `.inner.depth` instead",
    }

    type: Literal["probe"] = "probe"
    eps: float = Field(0.1, gt=0)
    """Half width of the probe, in nats."""
    count: int = 3
    flag: bool = True
    mode: Literal["soft", "hard"] | None = None
    names: list[str] = []
    table: dict[str, Any] = {}
    pair: tuple[int, int] = (1, 2)
    inner: Inner = defaults()


class ProbeLoss(Loss):
    Config = ProbeLossConfig

    def compute(self, inputs):
        raise NotImplementedError


class OtherLossConfig(PluginConfig):
    type: Literal["probe_other"] = "probe_other"
    power: float = 2.0


class OtherLoss(ProbeLoss):
    Config = OtherLossConfig
    needs = {"engine.routed_experts": True}


class AngryConfig(PluginConfig):
    type: Literal["probe_angry"] = "probe_angry"
    level: int = 0

    @model_validator(mode="after")
    def _explode(self):
        if self.level > 5:
            raise RuntimeError("boom")
        return self


class AngryLoss(ProbeLoss):
    Config = AngryConfig


class PortConfig(PluginConfig):
    type: Literal["probe"] = "probe"
    port: int = 29501


class OtherPortConfig(PluginConfig):
    type: Literal["probe_other"] = "probe_other"
    port: int = 29503


class ProbeTransport(WeightTransport):
    Config = PortConfig

    def sender(self, rank, world_size):
        raise NotImplementedError

    def receiver(self, engine_index, engine_count):
        raise NotImplementedError


class OtherTransport(ProbeTransport):
    Config = OtherPortConfig


class ProbeRouter(Router):
    def application(self, engine_urls):
        raise NotImplementedError


class DeafRouter(ProbeRouter):
    capabilities = {"sampling_mask": False, "routed_experts": False}


class ProbeEngine(Engine):
    capabilities = {
        "devices": ("cpu", "cuda"),
        "routed_experts": True,
        "sampling_mask": True,
        "prompt_logprobs": True,
    }

    def serve(self, spec):
        raise NotImplementedError


class BareEngine(ProbeEngine):
    capabilities = {"devices": ("cpu",)}


class ProbeAttention(AttentionBackend):
    capabilities = {"devices": ("cpu", "cuda"), "dtypes": ("float32",)}

    def attend(self, *arguments):
        raise NotImplementedError


class ProbeMoE(MoEBackend):
    capabilities = {"devices": ("cuda",)}

    def experts(self, *arguments):
        raise NotImplementedError


class ProbeAlgorithm(Algorithm):
    def score_group(self, group):
        raise NotImplementedError


class ReferenceAlgorithm(ProbeAlgorithm):
    requirements = AlgorithmNeeds(reference="policy", components=frozenset({"ref_kl"}))


class TeacherlessAlgorithm(ProbeAlgorithm):
    requirements = AlgorithmNeeds(reference="teacher", components=frozenset({"ref_kl"}))


class FrozenAlgorithm(ProbeAlgorithm):
    requirements = AlgorithmNeeds(sampled_by="frozen", components=frozenset({"rl"}))


class AimlessAlgorithm(ProbeAlgorithm):
    requirements = AlgorithmNeeds(components=frozenset({"ref_kl"}))


class ImitatingAlgorithm(ProbeAlgorithm):
    requirements = AlgorithmNeeds(loss_aggregation="prompt", components=frozenset({"ce"}))


class HintingAlgorithm(ReferenceAlgorithm):
    def reference_context(self, branch, task):
        return [{"role": "system", "content": task["hint"]}]


class ComparingAlgorithm(ProbeAlgorithm):
    requirements = AlgorithmNeeds(min_group_size=2)


class PlayedAlgorithm(ProbeAlgorithm):
    requirements = AlgorithmNeeds(sampled_by="frozen", components=frozenset({"ce"}))
    teacher = object()


class PromptAlgorithm(ProbeAlgorithm):
    requirements = AlgorithmNeeds(loss_aggregation="prompt")


class ProbeModelConfig(PluginConfig):
    type: Literal["probe_model"] = "probe_model"
    rope_base: float = Field(10000.0, gt=0)
    """Base of the rotary angles."""


class ProbeModel(Model):
    Config = ProbeModelConfig
    model_types = ("probe_model", "probe_model_moe")

    def architecture(self, config):
        raise NotImplementedError

    def build(self, architecture, kernels):
        raise NotImplementedError

    def initialise(self, module, generator):
        raise NotImplementedError

    def layout(self, architecture):
        raise NotImplementedError

    def flops(self, architecture, seq_lens):
        raise NotImplementedError
'''

ENTRY_POINTS = {
    "prime_rl.losses": {
        "probe": "probe_wheel.plugins:ProbeLoss",
        "probe_other": "probe_wheel.plugins:OtherLoss",
        "probe_angry": "probe_wheel.plugins:AngryLoss",
        "probe_broken": "probe_wheel.plugins:Missing",
    },
    "prime_rl.weight_transports": {
        "probe": "probe_wheel.plugins:ProbeTransport",
        "probe_other": "probe_wheel.plugins:OtherTransport",
    },
    "prime_rl.routers": {
        "probe": "probe_wheel.plugins:ProbeRouter",
        "probe_deaf": "probe_wheel.plugins:DeafRouter",
    },
    "prime_rl.engines": {
        "probe": "probe_wheel.plugins:ProbeEngine",
        "probe_bare": "probe_wheel.plugins:BareEngine",
    },
    "prime_rl.attention_backends": {"probe": "probe_wheel.plugins:ProbeAttention"},
    "prime_rl.moe_backends": {"probe_moe": "probe_wheel.plugins:ProbeMoE"},
    "prime_rl.algorithms": {
        "probe": "probe_wheel.plugins:ProbeAlgorithm",
        "probe_reference": "probe_wheel.plugins:ReferenceAlgorithm",
        "probe_prompt": "probe_wheel.plugins:PromptAlgorithm",
        "probe_teacherless": "probe_wheel.plugins:TeacherlessAlgorithm",
        "probe_frozen": "probe_wheel.plugins:FrozenAlgorithm",
        "probe_aimless": "probe_wheel.plugins:AimlessAlgorithm",
        "probe_hinting": "probe_wheel.plugins:HintingAlgorithm",
        "probe_comparing": "probe_wheel.plugins:ComparingAlgorithm",
        "probe_played": "probe_wheel.plugins:PlayedAlgorithm",
        "probe_imitating": "probe_wheel.plugins:ImitatingAlgorithm",
    },
    "prime_rl.models": {"probe_model": "probe_wheel.plugins:ProbeModel"},
}

PLUGINS = """
[trainer.loss]
type = "probe"
[weight_broadcast]
type = "probe"
[router]
type = "probe"
[inference.engine]
type = "probe"
"""

RL = f"""
max_steps = 5

[model.fresh.architecture]
model_type = "probe_model"

[orchestrator]
batch_size = 8

[orchestrator.train]
group_size = 4

[[orchestrator.train.source]]
env = {{taskset = {{id = "words"}}}}
{PLUGINS}
"""
"""A complete recipe of one stage, written flat."""

STAGED = """
seq_len = 512

[model.fresh.architecture]
model_type = "probe_model"

[trainer.loss]
type = "probe"
[trainer.optim]
lr = 0.5
betas1 = 0.7

[weight_broadcast]
type = "probe"
[router]
type = "probe"
[inference.engine]
type = "probe"

[[stages]]
type = "sft"
max_steps = 3
[stages.data]
source = "rows.jsonl"
[stages.trainer.optim]
lr = 0.25

[[stages]]
type = "rl"
max_steps = 7
[stages.orchestrator]
batch_size = 4
[[stages.orchestrator.train.source]]
env.taskset.id = "words"
group_size = 2
"""
"""A complete recipe of two stages."""


@pytest.fixture(scope="session")
def probe_wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on the path with the probe distribution; its package ships three recipes."""
    folder = tmp_path_factory.mktemp("probe_site")
    write_distribution(
        folder,
        "acme-probes",
        entry_points=ENTRY_POINTS,
        modules={"probe_wheel.plugins": PROBES, "probe_wheel.__init__": ""},
    )
    recipes = folder / "probe_wheel" / "recipes"
    recipes.mkdir()
    (recipes / "debug.toml").write_text(RL)
    (recipes / "probe_start.toml").write_text(RL.replace("max_steps = 5", "max_steps = 6"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.delenv("PRIME_PLUGINS", raising=False)
        yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "probe_wheel"]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def registry(probe_wheel: Path) -> Registry:
    """The plugins of this process, probes included."""
    return scan(refresh=True)


@pytest.fixture
def load(tmp_path: Path, registry: Registry) -> Callable[..., LoadedRun]:
    """load(text, *words): the run of a recipe's text and further words of the command line."""

    def run(text: str | None, *words: str) -> LoadedRun:
        if text is None:
            return load_run(list(words), registry)
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(text)
        return load_run([str(recipe), *words], registry)

    return run


@pytest.fixture
def flat() -> str:
    """A complete recipe of one stage."""
    return RL


@pytest.fixture
def staged() -> str:
    """A complete recipe of two stages."""
    return STAGED
