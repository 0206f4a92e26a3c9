"""config.json of Qwen3.8: spellings that are read, values that are refused; options; recipes."""

import json
from pathlib import Path
from typing import Any

import pytest
import qwen3_8_cases as cases
import qwen3_8_released as released
import torch
from prime_rl_model_qwen3_8.blocks import cut_blocks

from prime_rl.api import PackedBatch
from prime_rl.cli.main import main
from prime_rl.errors import ConfigError

TEXT = released.TEXT


def read(config: dict[str, Any]) -> Any:
    return cases.plugin().architecture(config)


def test_both_names_and_both_places() -> None:
    """The text part alone and inside a multimodal config.json, old and new model types."""
    expected = read(TEXT)
    for text in ("qwen4_exp_text", "qwen3_8_flash_next_text"):
        inner = {**TEXT, "model_type": text}
        assert read(inner) == expected
        for outer in ("qwen4_exp", "qwen3_8_flash_next"):
            assert read({**released.CONFIG, "model_type": outer, "text_config": inner}) == expected


def test_stale_outer_parts_are_not_read() -> None:
    assert released.CONFIG["split_ngram_parts"] == 512
    assert read(released.CONFIG).tables[0].parts == 128
    without = {key: value for key, value in TEXT.items() if key != "split_ngram_parts"}
    assert read(without).tables[0].parts == 512


def test_layer_types_have_three_spellings() -> None:
    expected = read(TEXT)
    for name in ("qwen_sparse_attention", "indexed_attention"):
        types = [name if kind == "full_attention" else kind for kind in TEXT["layer_types"]]
        assert read({**TEXT, "layer_types": types}) == expected
    assert read({**TEXT, "layer_types": None}) == expected
    assert read({**TEXT, "layer_types": None, "full_attention_interval": 3}) != expected


def test_what_a_list_of_ends_means() -> None:
    """The first one separates n-grams."""
    assert read({**TEXT, "eos_token_id": [248044, 7]}) == read(TEXT)
    assert read({**TEXT, "eos_token_id": [7, 248044]}) != read(TEXT)


def test_rotary() -> None:
    """64 of 256 numbers turn, theta 1e7."""
    frequencies = read(TEXT).sparse.rotary.inverse_frequencies
    assert len(frequencies) == 32 and read(TEXT).sparse.rotary_dim == 64
    assert frequencies[0] == 1.0 and frequencies[31] == pytest.approx(1e7 ** (-62 / 64))
    old = {key: value for key, value in TEXT.items() if key != "rope_parameters"}
    old |= {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
    assert read(old) == read(TEXT)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "qwen3"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("layer_types", ["sliding_attention"] * 48),
        ("layer_types", ["linear_attention"] * 47),
        ("linear_num_value_heads", 40),
        ("num_key_value_heads", 5),
        ("output_gate_type", "tanh"),
        ("indexer_kv_heads", 2),
        ("indexer_budget", 2047),
        ("indexer_budget", None),
        ("indexer_head_dim", 32),
        ("num_experts_per_tok", 513),
        ("hc_count", 1),
        ("ple_layer_ids", [4]),
        ("ple_layer_ids", [0]),
        ("ple_layer_ids", [49]),
        ("ple_embed_dim", 2561),
        ("eos_token_id", None),
        ("eos_token_id", []),
        ("num_hidden_layers", True),
        ("rms_norm_eps", float("nan")),
    ],
)
def test_what_is_refused_is_named(key: str, value: object) -> None:
    for config in ({**TEXT, key: value}, {**released.CONFIG, "text_config": {**TEXT, key: value}}):
        with pytest.raises(ConfigError, match=key):
            read(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [("partial_rotary_factor", 1.5), ("mrope_section", [11, 11, 11]), ("rope_type", "longrope")],
)
def test_wrong_rotary_keys_are_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        read({**TEXT, "rope_parameters": {**TEXT["rope_parameters"], key: value}})


def test_options() -> None:
    """A frozen table has no gradient; in host memory it stays there."""
    config, architecture, _, _ = cases.random_module()
    batch = PackedBatch.from_documents(cases.documents())
    for trainable in (True, False):
        plugin = cases.plugin(table_trainable=trainable, table_on_cpu=True)
        module = plugin.build(architecture, cases.kernels(5))
        plugin.initialise(module, torch.Generator().manual_seed(0))
        frozen = {id(parameter) for parameter in plugin.frozen_parameters(module)}
        named = {name for name, p in module.named_parameters() if id(p) in frozen}
        indexer = {f"layers.3.attention.indexer.{n}.weight" for n in ("proj", "q_norm", "k_norm")}
        assert named == (indexer if trainable else {*indexer, "ngrams.0.table.weight"})
        module(batch).square().sum().backward()
        assert (module.ngrams[0].table.weight.grad is not None) == trainable
        assert module.ngrams[0].table.on_cpu
    routers = cases.plugin().router_parameters(module)
    assert [tuple(router.shape) for router in routers] == [(8, 64)] * 5


def test_blocks_at_the_released_budget() -> None:
    """Token 2050 still reads everything, token 2051 is the first that does not; then 2048 to 2051
    tokens in turn, always the best blocks and the tokens after the last complete one."""
    config, architecture, module, _ = cases.random_module(
        layer_types=[cases.FULL], num_hidden_layers=1, ple_layer_ids=[], indexer_budget=2048
    )
    length = 2104
    tokens = torch.randint(128, (length + 40,), generator=torch.Generator().manual_seed(3))
    batch = PackedBatch.from_documents([tokens[:40].tolist(), tokens[40:].tolist()])
    indexer = module.layers[0].attention.indexer
    with torch.no_grad():
        x = torch.randn(length + 40, 64, generator=torch.Generator().manual_seed(4))
        rotation = module.rotary(batch.positions, x.dtype)
        blocks = cut_blocks(batch, 4)
        rows = blocks.rows_of(indexer(x, rotation, blocks))
    assert rows.shape == (length + 40, 2051)
    counts = (rows >= 0).sum(1)[40:].tolist()
    assert counts[:2051] == list(range(1, 2052))
    assert counts[2051:2056] == [2048, 2049, 2050, 2051, 2048]
    for token in (0, 2, 3, 2050, 2051, 2054, 2103):
        found = {row - 40 for row in rows[40 + token].tolist() if row >= 0}
        tail = set(range(4 * ((token + 1) // 4), token + 1))
        assert tail <= found and found <= set(range(token + 1))
        assert all({4 * (t // 4) + i for i in range(4)} <= found for t in found - tail)


def test_recipes_name_released_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full-size recipes pass every check when the released config.json is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(released.CONFIG))
    for name in ("rl", "sft"):
        words = ["run", "--plugin", "qwen3_8", name, "--model.name", str(tmp_path), "--dry-run"]
        assert main(words) == 0, name
