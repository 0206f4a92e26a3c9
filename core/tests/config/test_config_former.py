"""Keys of older recipes and of the reference's: the message says what to write instead."""

from __future__ import annotations

import pytest

from prime_rl.configs.base import BaseConfig, PluginConfig
from prime_rl.configs.fields import every_path, field_type_of
from prime_rl.configs.former import NAME
from prime_rl.configs.run import RLConfig, RunConfig, SFTConfig
from prime_rl.errors import ConfigError

SOURCE = "orchestrator.train.source.0"
REMOVED = "remove it: "
UNSUPPORTED = "not supported here"

BREAKING = {
    f"{SOURCE}.num_examples": f"write {SOURCE}.select.limit instead",
    "orchestrator.train.num_examples": "write orchestrator.train.select.limit instead",
    "orchestrator.group_size": "write orchestrator.train.group_size instead",
    "orchestrator.algo": "write orchestrator.train.algo instead",
    "trainer.model.fsdp_cpu_offload": UNSUPPORTED,
    "trainer.model.optim_cpu_offload": UNSUPPORTED,
    "trainer.model.full_offload": UNSUPPORTED,
    "trainer.model.offload": UNSUPPORTED,
    "trainer.model.impl": REMOVED,
    "orchestrator.token_batch_size": "write orchestrator.batch_size instead",
    "orchestrator.train.filter_zero_advantages": REMOVED,
    "inference.vllm.quantization": UNSUPPORTED,
    "orchestrator.ckpt.wait_for_weights_timeout": "write weight_broadcast_timeout_s instead",
    "trainer.metrics_server": REMOVED,
    "orchestrator.tasks_per_minute": "write orchestrator.dispatch_per_minute instead",
    "trainer.model.index_cache": REMOVED,
    "trainer.model.ac_offloading": UNSUPPORTED,
    "trainer.model.fusions": REMOVED,
    "ckpt.skip_progress": REMOVED,
    "trainer.ckpt.skip_progress": REMOVED,
    "orchestrator.model.lora": UNSUPPORTED,
    "orchestrator.ckpt.keep_last": "write ckpt.keep_last instead",
    "orchestrator.ckpt.keep_interval": "write ckpt.keep_interval instead",
    "inference.vllm.seed": "write seed instead",
    "inference.vllm.dtype": "in inference.engine instead",
    "inference.vllm.trust_remote_code": "write model.trust_remote_code instead",
}
"""What the release notes of 0.10.0 call breaking and removed, with what it is here."""

ELSEWHERE = {
    "orchestrator.constant_trainer_batch_size": "write orchestrator.constant_batch_size instead",
    "trainer.model.name": "write model.name instead",
    "trainer.model.freeze_moe_router": "write model.moe.freeze_router instead",
    "trainer.model.moe_router_dtype": "write model.moe.router_dtype instead",
    "trainer.model.moe.compute": "write model.moe.backend instead",
    "trainer.model.ac": "write trainer.memory.activation_checkpointing instead",
    "trainer.model.compile": "write trainer.memory.compile instead",
    "trainer.model.ep": "write trainer.parallel.expert_parallel instead",
    "trainer.model.dp_replicate": "write trainer.parallel.dp_replicate instead",
    "trainer.model.attn": "write model.attention instead",
    "trainer.model.cp": UNSUPPORTED,
    "trainer.model.unheard_of": "write it in model instead",
    "model.attn": "write model.attention instead",
    "model.freeze_moe_router": "write model.moe.freeze_router instead",
    "model.moe.compute": "write model.moe.backend instead",
    "trainer.scheduler": "write trainer.schedule instead",
    "trainer.gc.interval": "write trainer.gc_interval instead",
    "trainer.dist_timeout_seconds": "write trainer.parallel.timeout_s instead",
    "trainer.data.num_workers": "write trainer.background_batches instead",
    "trainer.weight_broadcast.timeout": "write weight_broadcast_timeout_s instead",
    "trainer.max_steps": "write max_steps instead",
    "orchestrator.renderer": "write tokenizer.renderer instead",
    "orchestrator.model.client.base_url": "write inference.base_url instead",
    "orchestrator.ckpt.interval": "write ckpt.interval instead",
    "orchestrator.num_train_workers": "write trainer.parallel.ranks instead",
    f"{SOURCE}.serve": REMOVED,
    f"{SOURCE}.curriculum.sampler": f"write {SOURCE}.sampler instead",
    f"{SOURCE}.sampling.extra_body": UNSUPPORTED,
    "inference.server.port": "write inference.port instead",
    "inference.router.policy": "write it in router instead",
    "inference.vllm": "in inference.engine instead",
    "inference.vllm.max_model_len": "write inference.max_model_len instead",
    "inference.weight_broadcast": "write weight_broadcast instead",
    "rollout_transport.type": "write orchestrator.batch_transport instead",
    "deployment.num_infer_gpus": "write inference.replicas instead",
    "slurm.partition": UNSUPPORTED,
    "tokenizer.trust_remote_code": "write model.trust_remote_code instead",
    "ckpt.skip_optimizer": "write resume.skip_optimizer instead",
    "log.interval": "write log.interval_s instead",
    "monitors.wandb.project": REMOVED,
    "optim.lr": "write trainer.optim instead",
}
"""What stands somewhere else in the reference."""

NOT_HERE = {
    "trainer.loss.import_path": "prime plugins new loss NAME",
    "trainer.loss.kwargs": "prime plugins new loss NAME",
    "trainer.optim.mu": REMOVED,
    "orchestrator.filter_zero_advantages": REMOVED,
    "orchestrator.train.min_abs_advantage": "advantage_range",
    f"{SOURCE}.min_abs_advantage": f"write {SOURCE}.gates instead: type advantage_range",
    f"{SOURCE}.select.ids": f"write {SOURCE}.select.include instead, with the indices",
    "orchestrator.train.select.keys": "write orchestrator.train.select.include instead",
    f"{SOURCE}.select.names": f"write {SOURCE}.select.include instead",
    f"{SOURCE}.select.include.idx": f"indices in {SOURCE}.select.include itself",
    f"{SOURCE}.select.exclude.names": f"write {SOURCE}.select.exclude instead",
    "inference.dry_run": "write --dry-run on the command line instead",
    "weight_broadcast.host": REMOVED,
    "weight_broadcast.inference_world_size": "inference.replicas says how many",
}
"""What has no place of its own here."""

OF_A_PLUGIN = {
    "trainer.loss.width": "write trainer.loss.eps instead",
    "trainer.loss.outer.depth": "write trainer.loss.inner.depth instead",
}
"""What the probe's own Config says."""


def refusal(load, text, *words) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *words)
    return str(caught.value)


@pytest.mark.parametrize(
    "key, answer", [*BREAKING.items(), *ELSEWHERE.items(), *NOT_HERE.items(), *OF_A_PLUGIN.items()]
)
def test_an_old_key_is_answered_in_a_file_and_on_the_command_line(
    load, flat, tmp_path, key, answer
):
    old = tmp_path / "old.toml"
    old.write_text(f"\n{key} = 1\n")
    in_file = refusal(load, flat, "@", str(old))
    on_command_line = refusal(load, flat, f"--{key.replace('_', '-')}", "1")
    for message, where in ((in_file, "old.toml:2"), (on_command_line, "command line")):
        found = next(line for line in message.splitlines() if f"{where}: " in line)
        path, _, text = found.partition(f"{where}: ")[2].partition(": unknown key; ")
        assert key == path or key.startswith(f"{path}."), message
        assert answer in text, message


def test_every_key_of_an_old_table_has_its_line(load, flat):
    text = f'{flat}\n[trainer.model]\nname = "x"\nep = 8\n[trainer.model.compile]\nmode = "x"\n'
    message = refusal(load, text)
    last = len(text.splitlines())
    assert f"recipe.toml:{last - 3}: trainer.model.name: unknown key; write model.name" in message
    assert f"recipe.toml:{last - 2}: trainer.model.ep: unknown key; write trainer.para" in message
    assert f"recipe.toml:{last - 1}: trainer.model.compile: unknown key; write tr" in message
    assert message.startswith("3 problems")


def test_old_keys_of_stages_and_of_all_stages(load, staged, tmp_path):
    text = staged.replace("[stages.trainer.optim]", "[stages.val]\n[stages.trainer.optim]")
    message = refusal(load, f'scheduler.type = "linear"\n{text}', "--rl.trainer.scheduler", "1")
    assert "recipe.toml:1: scheduler: unknown key; write trainer.schedule instead" in message
    assert ": stages.0.val: unknown key; not supported here: eval evaluates" in message
    assert "command line: trainer.scheduler: unknown key; write trainer.schedule" in message
    message = refusal(load, text, "--sft.data.name", "rows")
    assert "command line: data.name: unknown key; write data.source instead" in message


def test_old_key_that_sources_inherit_is_said_once(load, flat):
    message = refusal(load, flat, "--orchestrator.train.sampling.min-p", "0.1")
    expected = "command line: orchestrator.train.sampling.min_p: unknown key; not supported here: "
    assert message == f"{expected}orchestrator.train.sampling.top_p and " + (
        "orchestrator.train.sampling.top_k bound the choice"
    )


def test_old_keys_in_the_other_forms_of_the_command_line(load, flat, tmp_path):
    message = refusal(load, flat, "--no-orchestrator.train.filter-zero-advantages")
    assert "orchestrator.train.no_filter_zero_advantages: unknown key; remove it" in message
    (tmp_path / "part.toml").write_text("\nep = 8\n")
    message = refusal(load, flat, "--trainer.model", "@", str(tmp_path / "part.toml"))
    assert "part.toml:2: trainer.model.ep: unknown key; write trainer.parallel" in message


def test_the_optimizer_that_is_gone_is_answered_with_those_there_are(load, flat):
    message = refusal(load, flat, "--trainer.optim.type", "sgd")
    assert message == (
        "command line: trainer.optim.type: found the string 'sgd', expected 'adamw' or 'sign_sgd'; "
        "sgd is gone: write sign_sgd or adamw"
    )


@pytest.mark.parametrize(
    "name, answer",
    [("dppo", "write ipo"), ("default", "called ipo"), ("custom", "prime plugins new")],
)
def test_losses_of_the_reference(load, flat, name, answer):
    for words in (("--trainer.loss", name), ("--trainer.loss.type", name)):
        message = refusal(load, flat, *words)
        assert f"no loss plugin is called {name!r}: " in message and answer in message


def test_an_eval_source_has_no_interval_of_its_own(load, flat):
    text = f'{flat}\n[[orchestrator.eval.source]]\nenv.taskset.id = "x"\ninterval = 3\n'
    message = refusal(load, text)
    assert "orchestrator.eval.source.0.interval: unknown key; write orchestrator.eval" in message


def sections() -> list[tuple[str, type[BaseConfig]]]:
    """(dotted path, class) of every section of a stage, the stages themselves included."""
    found: list[tuple[str, type[BaseConfig]]] = [("", RLConfig), ("", SFTConfig)]
    for stage in (RLConfig, SFTConfig):
        for path, kind, _ in every_path(stage, config_of_any):
            place = (*path, "N") if kind.item else path
            section = (kind.item or kind).section_class(None, config_of_any)
            if section is not None and issubclass(section, BaseConfig):
                found.append((".".join(place), section))
    return found


def config_of_any(kind: str, name: str) -> type[PluginConfig]:
    return PluginConfig


FIELDS = {
    ".".join(path)
    for stage in (RunConfig, RLConfig, SFTConfig)
    for path, *_ in every_path(stage, config_of_any)
}


def test_every_name_in_an_answer_is_a_field():
    seen = set()
    for place, section in sections():
        for key, text in section.former.items():
            for dot, name in NAME.findall(text):
                full = f"{place}.{name}" if dot and place else name
                assert full in FIELDS, f"{section.__name__}.former[{key!r}]: {full}"
                seen.add(full)
    assert len(seen) > 40


def test_no_answer_for_a_key_that_exists():
    """Of a dotted key, the table does not exist either: else its own class answers. A
    list may have been a table."""
    for _, section in sections():
        for key in section.former:
            name, dot, _ = key.partition(".")
            field = section.model_fields.get(name)
            is_list = dot and field is not None and field_type_of(field).item
            assert field is None or is_list, (section.__name__, key)
