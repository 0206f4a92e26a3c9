"""From a checkpoint directory to a module: plugin, back ends, dtypes, fresh weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_rl.configs.base import PluginConfig, ValidationContext
from prime_rl.configs.model import FreshModelConfig, ModelConfig
from prime_rl.errors import CheckpointError, ConfigError, PluginError
from prime_rl.models.choose import make_plugin, plugin_name_for, read_config_json
from prime_rl.models.fresh import fresh_config, make_fresh_model
from prime_rl.models.setup import build, make_kernels, prepare
from prime_rl.plugins import Registry, scan
from prime_rl.plugins.records import PluginRecord
from prime_rl.testing.toy_model import ToyModel


def registry(target: str = "ToyModel") -> Registry:
    """What a scan finds here, and the toy model as if a wheel had brought it."""
    found = scan()
    toy = PluginRecord(
        kind="model",
        name="toy",
        target=f"prime_rl.testing.toy_model:{target}",
        distribution="prime-rl-model-toy",
        version="1",
        location="",
        requires_core="",
        state="ok",
        reason="",
    )
    return Registry((*found.records, toy), found.problems, found.scripts, found.switches)


def model_config(**values: Any) -> ModelConfig:
    return ModelConfig.model_validate(values, context=ValidationContext(scan().config_class))


def test_plugin_by_model_type() -> None:
    assert plugin_name_for("toy", registry()) == "toy"
    with pytest.raises(PluginError, match="nonesuch"):
        plugin_name_for("nonesuch", registry())


def test_named_plugin_and_options() -> None:
    config = {"model_type": "unheard of", "vocab_size": 8}
    plugin = make_plugin(model_config(plugin="toy"), config, registry())
    assert isinstance(plugin, ToyModel) and plugin.config.type == "toy"
    with pytest.raises(ConfigError, match="model.options of toy(.|\n)*speed"):
        make_plugin(model_config(plugin="toy", options={"speed": 3}), config, registry())
    with pytest.raises(ConfigError, match="model_type"):
        make_plugin(model_config(), {"vocab_size": 8}, registry())


def test_config_json_is_checked(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_config_json(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_config_json(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="holds a list"):
        read_config_json(tmp_path)


def test_build_in_dtype_and_device(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "toy", "vocab_size": 8}')
    setup = prepare(model_config(), tmp_path, registry())
    module = build(setup, "meta", torch.bfloat16)
    assert {(p.dtype, p.device.type) for p in module.parameters()} == {(torch.bfloat16, "meta")}
    assert torch.get_default_dtype() == torch.float32
    assert setup.export_config() == {"model_type": "toy", "vocab_size": 8}


def test_router_dtype(tmp_path: Path) -> None:
    class WithRouter(ToyModel):
        def router_parameters(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
            return [p for name, p in module.named_parameters() if "router" in name]

    (tmp_path / "config.json").write_text('{"model_type": "toy", "vocab_size": 8}')
    setup = prepare(model_config(), tmp_path, registry())
    setup = replace(setup, plugin=WithRouter(PluginConfig(type="toy")))
    module = build(setup, "cpu", torch.bfloat16, router_dtype=torch.float32)
    for name, parameter in module.named_parameters():
        expected = torch.float32 if "router" in name else torch.bfloat16
        assert parameter.dtype == expected, name


def test_moe_backends_by_layer() -> None:
    chosen = model_config(moe={"layers": [{"layers": [1, 3]}]})
    kernels = make_kernels(chosen, 4, registry())
    assert kernels.moe[0] is kernels.moe[2] and kernels.moe[1] is kernels.moe[3]
    assert kernels.moe[0] is not kernels.moe[1]
    with pytest.raises(ConfigError, match="layer 4: the model has 4 layers"):
        make_kernels(model_config(moe={"layers": [{"layers": [4]}]}), 4, registry())
    twice = {"layers": [{"layers": [1]}, {"layers": [0, 1]}]}
    with pytest.raises(ConfigError, match="layer 1: named twice"):
        make_kernels(model_config(moe=twice), 4, registry())


@pytest.mark.parametrize("architecture", [{}, {"model_type": 3}, {"model_type": None}])
def test_a_fresh_architecture_is_named_where_it_was_written(
    tmp_path: Path, architecture: dict[str, Any]
) -> None:
    """No config.json exists yet, so none is blamed; nothing is left behind."""
    fresh = FreshModelConfig(architecture=architecture)
    with pytest.raises(ConfigError, match=r"^model\.fresh\.architecture\.model_type: found"):
        make_fresh_model(fresh, model_config(), tmp_path / "made", registry())
    assert list(tmp_path.iterdir()) == []


def test_fresh_vocabulary() -> None:
    fresh = FreshModelConfig(architecture={"model_type": "toy"})
    assert fresh_config(fresh, 70)["vocab_size"] == 70
    fresh = FreshModelConfig(architecture={"model_type": "toy", "vocab_size": 96})
    assert fresh_config(fresh, 70)["vocab_size"] == 96
    with pytest.raises(ConfigError, match="has 97 tokens"):
        fresh_config(fresh, 97)


def test_importing_the_choice_loads_no_torch() -> None:
    import subprocess
    import sys

    code = "import prime_rl.models.choose, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
