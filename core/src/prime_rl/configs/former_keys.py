"""Keys that recipes of Prime Intellect's prime-rl, up to 0.10, have and ours do not: what to write.

Each table is the `former` of a class, see `BaseConfig`. Sections that hold copies of shared settings
there (`trainer.model`, `orchestrator.ckpt`) do not exist here; their keys are dotted.
"""

from __future__ import annotations


def _inside(section: str, keys: dict[str, str]) -> dict[str, str]:
    """The keys as they are called where their table stands below `section`."""
    return {f"{section}.{key}": text for key, text in keys.items()}


_NO_OFFLOAD = "not supported here: parameters and optimizer states stay on the device"
_NO_ROWS_DIVIDED = "not supported here: a row is computed by one rank"
_NO_PROFILES = "not supported here: the trainer writes no profiles"
_METRICS_FILES = "remove it: metrics are always written to monitors/file of the run directory"
_BATCHES = "write `orchestrator.batch_transport` instead"
_WORKERS = "write `trainer.background_batches` instead"
_LAUNCHER = "not supported here: `launcher.type` chooses who starts processes"
_HEARTBEAT = "not supported here: the launcher watches the processes"
_LIMIT = {"num_examples": "write `.select.limit` instead"}

_DEPLOYMENT = {
    "slurm": _LAUNCHER,
    "deployment": _LAUNCHER,
    "deployment.num_train_gpus": "write `trainer.parallel.ranks` instead",
    "deployment.num_infer_gpus": "write `inference.replicas` instead",
}

MODEL = {
    "seq_len": "write `seq_len` instead",
    "impl": "remove it: models come from plugins, `model.plugin` chooses one",
    "vlm": "not supported here: models read text only",
    "conversion_dir": "remove it: weights are converted while they are loaded",
    "attn": "write `model.attention` instead",
    "compile": "write `trainer.memory.compile` instead",
    "recompile_limit": "not supported here: `trainer.memory.compile` is a switch",
    "ac": "write `trainer.memory.activation_checkpointing` instead",
    "ac_offloading": "not supported here: activations stay on the device, or are recomputed with "
    "`trainer.memory.activation_checkpointing`",
    "offload": _NO_OFFLOAD,
    "fsdp_cpu_offload": _NO_OFFLOAD,
    "optim_cpu_offload": _NO_OFFLOAD,
    "full_offload": _NO_OFFLOAD,
    "reshard_after_forward": "write `trainer.parallel.reshard_after_forward` instead",
    "reduce_scatter_max_input_buffers": "not supported here",
    "dp_replicate": "write `trainer.parallel.dp_replicate` instead",
    "ep": "write `trainer.parallel.expert_parallel` instead",
    "cp": _NO_ROWS_DIVIDED,
    "cp_style": _NO_ROWS_DIVIDED,
    "freeze_moe_router": "write `model.moe.freeze_router` instead",
    "moe_router_dtype": "write `model.moe.router_dtype` instead",
    "moe_use_grouped_mm": "write `model.moe.backend` instead",
    "moe_fused_kernel": "write `model.moe.backend` instead",
    "ep_comm_backend": "not supported here: tokens travel with PyTorch's all-to-all",
    "fusions": "remove it: which weights are fused is up to the model plugin",
    "quantization": "not supported here: training computes in `model.compute_dtype`; some families "
    "repeat the roundings of an FP8 server, `model.options`",
    "index_cache": "remove it: config.json of the checkpoint says which layers choose keys",
    "optimization_dtype": "remove it: parameters and optimizer states are float32",
    "lora": "not supported here: all weights are trained",
    "debug": "not supported here: `model.fresh` makes a small model with random weights",
    "fused_lm_head_token_chunk_size": "write `trainer.memory.logprob_chunk_tokens` instead",
}

MOE = {
    "compute": "write `.backend` instead",
    "dispatch": "not supported here: tokens travel with PyTorch's all-to-all",
}

TOKENIZER = {
    "trust_remote_code": "write `model.trust_remote_code` instead",
    "chat_template": "not supported here: `.renderer` turns messages into tokens",
}

CHECKPOINT = {
    "output_dir": "remove it: checkpoints are in the run directory, below `output_dir`",
    "skip_progress": "remove it: a resumed run goes on after the step of its checkpoint",
    "skip_scheduler": "write `resume.skip_scheduler` instead",
    "skip_dataloader": "write `resume.skip_dataloader` instead",
    "skip_optimizer": "write `resume.skip_optimizer` instead",
}

LOG = {
    "interval": "write `.interval_s` instead",
    "vf_level": "write `.level` instead",
    "json_logging": "not supported here: logs are text",
    "log_data": "remove it: `orchestrator.save_episodes` keeps every episode",
    "ranks_filter": "remove it: each process has a log file of its own",
}

_COPIES = {
    "model": "write it in `model` instead",
    "model.name": "write `model.name` instead",
    "model.trust_remote_code": "write `model.trust_remote_code` instead",
    "model.reduce_dtype": "write `model.reduce_dtype` instead",
    "model.dsa_backend": "write `model.dsa_backend` instead",
    **_inside("model", MODEL),
    "model.moe": "write it in `model.moe` instead",
    "model.moe.compute": "write `model.moe.backend` instead",
    "model.moe.dispatch": MOE["dispatch"],
    "tokenizer": "write it in `tokenizer` instead",
    "tokenizer.name": "write `tokenizer.name` instead",
    "tokenizer.trust_remote_code": TOKENIZER["trust_remote_code"],
    "renderer": "write `tokenizer.renderer` instead",
    "ckpt": "write it in `ckpt` instead",
    "ckpt.interval": "write `ckpt.interval` instead",
    "ckpt.keep_last": "write `ckpt.keep_last` instead",
    "ckpt.keep_interval": "write `ckpt.keep_interval` instead",
    "ckpt.wait_for_weights_timeout": "write `weight_broadcast_timeout_s` instead",
    **_inside("ckpt", CHECKPOINT),
    "resume": "write it in `resume` instead",
    "weight_broadcast": "write it in `weight_broadcast` instead",
    "weight_broadcast.timeout": "write `weight_broadcast_timeout_s` instead",
    "rollout_transport": _BATCHES,
    "log": "write it in `log` instead",
    "log.level": "write `log.level` instead",
    "log.interval": "write `log.interval_s` instead",
    "monitors": _METRICS_FILES,
    "max_steps": "write `max_steps` instead",
    "seq_len": "write `seq_len` instead",
    "output_dir": "write `output_dir` instead",
    "env_vars": "write `env_vars` instead",
    "heartbeat": _HEARTBEAT,
}
"""What trainer, orchestrator and inference have of their own there; a stage has it once here."""

_TRAINING = {
    "scheduler": "write `trainer.schedule` instead",
    "gc": "write `trainer.gc_interval` instead",
    "dist_timeout_seconds": "write `trainer.parallel.timeout_s` instead",
    "memory_profiler_path": _NO_PROFILES,
    "trace_path": _NO_PROFILES,
}

TRAINER = {
    **_COPIES,
    **_TRAINING,
    "data": "not supported here: batches come from the orchestrator",
    "data.num_workers": _WORKERS,
    "metrics_server": _METRICS_FILES,
    "enable_token_export": "remove it: what the trainer computes is on the stored episodes",
}

_NO_FILTER = "remove it: tokens with advantage 0 never train"

ORCHESTRATOR = {
    **_COPIES,
    "filter_zero_advantages": _NO_FILTER,
    "model.client": "write `inference.base_url` instead",
    "group_size": "write `.train.group_size` instead",
    "algo": "write `.train.algo` instead",
    "token_batch_size": "write `.batch_size` instead, in episodes",
    "constant_trainer_batch_size": "write `.constant_batch_size` instead",
    "tasks_per_minute": "write `.dispatch_per_minute` instead",
    "num_train_workers": "write `trainer.parallel.ranks` instead",
    "pad_to_multiple_of": "remove it: rows need no padding",
    "collect_inference_metrics": "write `.concurrency.adaptive` instead",
    "inference_metrics_roles": "not supported here: every engine does prefill and decoding",
    "env_server_base_port": "remove it: environment servers choose their addresses",
}

GROUP = _LIMIT

TRAIN_GROUP = {
    **GROUP,
    "filter_zero_advantages": _NO_FILTER,
    "min_abs_advantage": 'write gates = [{type = "advantage_range", reject_min, reject_max}] in every '
    "source instead",
}

_NO_NAMES = "write `.include` instead, with the indices of the tasks"

SELECT = {
    "ids": _NO_NAMES,
    "keys": _NO_NAMES,
    "names": _NO_NAMES,
    "include.idx": "write the indices in `.include` itself instead",
    "include.ids": _NO_NAMES,
    "include.keys": _NO_NAMES,
    "include.names": _NO_NAMES,
    "exclude.idx": "write the indices in `.exclude` itself instead",
    "exclude.ids": "write `.exclude` instead, with the indices of the tasks",
    "exclude.keys": "write `.exclude` instead, with the indices of the tasks",
    "exclude.names": "write `.exclude` instead, with the indices of the tasks",
}
"""`include` and `exclude` are tables there and lists here."""

EVAL_GROUP = {
    **GROUP,
    "retrigger_on_resume": "not supported here",
    "cancel_on_new_checkpoint": "not supported here",
}

SOURCE = {
    **_LIMIT,
    "serve": "remove it: one server per source is started, with `orchestrator.env_workers` processes",
}

TRAIN_SOURCE = {
    **SOURCE,
    "curriculum": "write `.sampler` and `.gates` instead",
    "curriculum.sampler": "write `.sampler` instead",
    "curriculum.gates": "write `.gates` instead",
    "min_abs_advantage": "write `.gates` instead: type advantage_range, with reject_min and "
    "reject_max",
}

EVAL_SOURCE = {
    **SOURCE,
    "interval": "write `orchestrator.eval.interval` instead (`eval.interval` in fine-tuning): all "
    "sources are evaluated at the same steps",
}

SAMPLING = {
    "extra_body": "not supported here: these settings are all that engines are told",
    "min_p": "not supported here: `.top_p` and `.top_k` bound the choice",
    "reasoning_effort": "not supported here: these settings are all that engines are told",
}

INFERENCE = {
    **{key: _COPIES[key] for key in ("log", "log.level", "log.interval", "env_vars", "output_dir")},
    "weight_broadcast": "write `weight_broadcast` instead",
    **_DEPLOYMENT,
    "server": "write `.host` and `.port` instead",
    "server.host": "write `.host` instead",
    "server.port": "write `.port` instead",
    "backend_port": "write `.port` instead",
    "router": "write it in `router` instead",
    "vllm": "write the settings of the engine plugin in `.engine` instead",
    "vllm.model": "write `model.name` instead",
    "vllm.max_model_len": "write `.max_model_len` instead",
    "vllm.seed": "write `seed` instead",
    "vllm.trust_remote_code": "write `model.trust_remote_code` instead",
    "vllm.data_parallel_size": "write `.replicas` instead",
    "vllm.enable_return_routed_experts": "write `.return_routed_experts` instead",
    "vllm.tool_call_parser": "remove it: the model plugin names it",
    "vllm.reasoning_parser": "remove it: the model plugin names it",
    "vllm.quantization": "not supported here: engines are started in `model.compute_dtype`",
    "dry_run": "write --dry-run on the command line instead",
    "kv_cache_offload": "not supported here: caches stay on the device",
    "use_pd_kv_transfer": "not supported here: every engine does prefill and decoding",
    "use_deep_gemm": "write the settings of the engine plugin in `.engine` instead",
    "enable_fp32_lm_head": "remove it: log-probabilities are always computed in float32",
    "enable_fp32_router_logits": "write `model.moe.router_dtype` instead",
}

STAGE = {
    **_TRAINING,
    **_DEPLOYMENT,
    "optim": "write `trainer.optim` instead",
    "matmul_precision": "write `trainer.matmul_precision` instead",
    "renderer": "write `tokenizer.renderer` instead",
    "rollout_transport": _BATCHES,
    "monitors": _METRICS_FILES,
    "heartbeat": _HEARTBEAT,
    "clean": "write --clean on the command line instead",
    "dry_run": "write --dry-run on the command line instead",
}

SFT = {
    **STAGE,
    "val": "not supported here: `eval` evaluates on environments",
    "weight_broadcast": "remove it: fine-tuning sends no weights to running engines",
}

SFT_DATA = {
    "name": "write `.source` instead",
    "subsets": "write a function that yields the rows in `.source` instead",
    "splits": "write a function that yields the rows in `.source` instead",
    "probabilities": "write a function that yields the rows in `.source` instead",
    "stopping_strategy": "write a function that yields the rows in `.source` instead",
    "seed": "write `seed` instead",
    "seq_len": "write `seq_len` instead",
    "micro_batch_size": "remove it: samples are packed into rows of `seq_len` tokens",
    "num_workers": _WORKERS,
    "loss_mask": "not supported here: the tokens of assistant messages are trained",
}

_NO_ADDRESS = "remove it: trainer and engines find each other through the run directory"
_OWN_LOSS = "a loss of your own is a plugin, `prime plugins new loss NAME` begins one"

OF_KIND = {
    "loss": {
        "import_path": f"not supported here: {_OWN_LOSS}",
        "kwargs": f"not supported here: {_OWN_LOSS}, with settings of its own",
    },
    "weight_transport": {
        "host": _NO_ADDRESS,
        "port": _NO_ADDRESS,
        "inference_world_size": "remove it: `inference.replicas` says how many engines there are",
    },
}
"""Plugin kind -> keys that no section of the kind has, unless a plugin's own Config has one."""

ADAMW = {
    "mu": "remove it: it belongs to muon, which is not supported here",
    "momentum": "remove it: it belongs to sgd, which is gone; `.betas1` is AdamW's",
    "nesterov": "remove it: it belongs to sgd, which is gone",
}

CHOICES = {
    ("loss", "default"): "it is called ipo here",
    ("loss", "dppo"): "ipo replaced it: write ipo",
    ("loss", "custom"): _OWN_LOSS,
    ("optim", "sgd"): "sgd is gone: write sign_sgd or adamw",
    ("optim", "muon"): "muon is not supported here: write adamw or sign_sgd",
}
"""(section or plugin kind, its `type` there) -> what to do."""
