"""Choices that do not fit together are refused with the reason, from declarations alone."""

from __future__ import annotations

import pytest

from prime_rl.errors import ConfigError
from prime_rl.launch.capabilities import check, offers


@pytest.fixture
def conflicts(load, flat, registry):
    """conflicts(*words): the message of the resolver; "" when everything fits."""

    def run(*words, device="cpu"):
        loaded = load(flat, *words)
        try:
            check(loaded.run, 0, loaded.registry, device)
        except ConfigError as error:
            return str(error)
        return ""

    return run


BARE = ["--inference.engine.type", "probe_bare"]


@pytest.mark.parametrize("words, device, parts", [
    ([], "cpu", []),
    ([], "cuda", []),
    ([], "auto", []),
    (["--trainer.enable-router-replay"], "cpu", []),
    (["--trainer.enable-router-replay", *BARE], "cpu",
     ["trainer.enable_router_replay", "engine capability routed_experts = True",
      "engine 'probe_bare' (inference.engine, acme-probes 1.0) does not declare it"]),
    (["--trainer.enable-router-replay", "--router", "probe_deaf"], "cpu",
     ["router 'probe_deaf'", "routed_experts = False"]),
    (["--trainer.enable-router-replay", "--no-inference.return-routed-experts"], "cpu",
     ["nothing to replay"]),
    (["--inference.return-routed-experts", *BARE], "cpu", ["inference.return_routed_experts needs"]),
    (["--orchestrator.train.sampling.top-p", "0.9"], "cpu", []),
    (["--orchestrator.train.sampling.top-p", "0.9", *BARE], "cpu",
     ["train source 'words' samples with top_p = 0.9", "sampling_mask = True"]),
    (["--orchestrator.train.sampling.top-k", "4", "--router", "probe_deaf"], "cpu",
     ["top_k = 4", "router 'probe_deaf' (router, acme-probes 1.0)"]),
    (["--orchestrator.train.sampling.top-k", "513"], "cpu", ["at most 512"]),
    (["--trainer.loss", "probe_other"], "cpu", []),
    (["--trainer.loss", "probe_other", *BARE], "cpu",
     ["loss 'probe_other' (trainer.loss, acme-probes 1.0) needs engine capability routed_experts"]),
    (["--model.moe.backend", "probe_moe"], "cuda", []),
    (["--model.moe.backend", "probe_moe"], "auto", []),
    (["--model.moe.backend", "probe_moe"], "cpu",
     ["trainer.device is 'cpu'", "moe_backend 'probe_moe' (model.moe.backend", "runs on cuda only"]),
    (BARE, "cuda", ["inference.device is 'cuda'", "runs on cpu only"]),
    ([*BARE, "--inference.device", "cpu"], "cuda", []),
    (["--model.attention", "probe"], "cpu", []),
    (["--model.attention", "probe"], "cuda",
     ["model.compute_dtype is 'bfloat16'", "computes in float32 only"]),
    (["--model.attention", "probe", "--model.compute-dtype", "float32"], "cuda", []),
    (["--trainer.parallel.ranks", "9"], "cpu", ["orchestrator.batch_size is 8, fewer than the 9"]),
    (["--orchestrator.train.algo", "probe_reference"], "cpu", []),
    (["--orchestrator.train.algo", "probe_reference", *BARE], "cpu",
     ["algorithm 'probe_reference' (orchestrator.train.source.0.algo", "scores tokens with the policy",
      "engine capability prompt_logprobs = True"]),
    (["--orchestrator.train.algo", "probe_reference", "--orchestrator.train.sampling.top-p", "0.9"],
     "cpu", ["train source 'words' samples with top_p = 0.9", "whole vocabulary at temperature 1"]),
    (["--orchestrator.train.algo", "probe_reference", "--orchestrator.train.sampling.top-k", "4"],
     "cpu", ["top_k = 4", "Leave top_p and top_k out"]),
    (["--orchestrator.train.algo", "probe_reference",
      "--orchestrator.train.sampling.temperature", "0.7"],
     "cpu", ["temperature = 0.7", "compares with a reference"]),
    (["--orchestrator.train.algo", "probe_teacherless"], "cpu",
     ["algorithm 'probe_teacherless' (orchestrator.train.source.0.algo", "name none"]),
    (["--orchestrator.train.algo", "probe_frozen"], "cpu",
     ["sampled by a frozen model, but its settings name no teacher", "uses rl on episodes"]),
    (["--orchestrator.train.algo", "probe_aimless"], "cpu", ["uses ref_kl and asks for no reference"]),
    (["--orchestrator.train.algo", "probe_imitating", "--orchestrator.train.sampling.top-p", "0.9",
      *BARE], "cpu", []),
    (["--orchestrator.train.source.1.env.taskset.id", "b",
      "--orchestrator.train.source.1.algo.type", "probe_imitating"], "cpu", []),
    (["--orchestrator.train.source.1.env.taskset.id", "b",
      "--orchestrator.train.source.1.algo.type", "probe_prompt"], "cpu",
     ["one denominator", "by token", "by prompt"]),
    (["--orchestrator.train.sampling.max-completion-tokens", "2048"], "cpu",
     ["may generate 2048 tokens"]),
    (["--orchestrator.train.sampling.max-completion-tokens", "2047"], "cpu", []),
    (["--orchestrator.train.algo", "probe_hinting"], "cpu",
     ["score a hint", "inference.max_model_len is 2048", "seq_len 2048"]),
    (["--orchestrator.train.algo", "probe_hinting", "--inference.max-model-len", "2049"], "cpu", []),
    (["--orchestrator.train.algo", "probe_comparing"], "cpu", []),
    (["--orchestrator.train.algo", "probe_comparing", "--orchestrator.train.group-size", "1"], "cpu",
     ["train source 'words' has group_size 1", "algorithm 'probe_comparing'", "at least 2"]),
    (["--orchestrator.train.group-size", "1"], "cpu", ["algorithm 'grpo'", "at least 2"]),
    (["--orchestrator.train.group-size", "1", "--orchestrator.train.algo", "max_rl"], "cpu",
     ["algorithm 'max_rl'", "at least 2"]),
    *((["--orchestrator.train.group-size", "1", "--orchestrator.train.algo", name], "cpu", [])
      for name in ("echo", "rae", "hierarchical_grpo")),
    (["--orchestrator.target-lag", "3", "--orchestrator.max-off-policy-steps", "3"], "cpu", []),
    (["--orchestrator.target-lag", "3", "--orchestrator.max-off-policy-steps", "2"], "cpu",
     ["max_off_policy_steps is 2, below orchestrator.target_lag 3", "at least 3"]),
    (["--orchestrator.max-off-policy-steps", "0", "--orchestrator.train.algo", "probe_played"],
     "cpu", []),
])  # fmt: skip
def test_conflicts(conflicts, words, device, parts):
    message = conflicts(*words, device=device)
    assert bool(message) == bool(parts), message
    for part in parts:
        assert part in message


def test_layer_back_ends_are_checked_too(load, flat, registry):
    text = flat + '[[model.moe.layers]]\nlayers = [0]\nbackend = "probe_moe"\n'
    with pytest.raises(ConfigError, match=r"model.moe.layers.0.backend"):
        check(load(text).run, 0, registry, "cpu")


def test_sft_batch(load, staged, registry):
    run = load(staged, "--data.batch-size", "2", "--trainer.parallel.ranks", "3").run
    with pytest.raises(ConfigError, match="stage sft.*\n.*data.batch_size is 2, fewer than the 3"):
        check(run, 0, registry, "cpu")


def test_all_conflicts_are_listed(conflicts):
    message = conflicts("--trainer.enable-router-replay", "--trainer.parallel.ranks", "9", *BARE)
    assert len(message.splitlines()) == 3


@pytest.mark.parametrize("declared, wanted, result", [
    (True, True, True),
    (None, True, False),
    (False, True, False),
    (None, False, True),
    (("cpu", "cuda"), "cpu", True),
    (("cpu",), "cuda", False),
    (("cpu",), ("cpu", "cuda"), False),
    ({"a", "b"}, ["a"], True),
    (8, 4, True),
    (2, 4, False),
    ("fp8", "fp8", True),
    ("fp8", "bf16", False),
    (None, "fp8", False),
    (None, 3, False),
])  # fmt: skip
def test_what_a_declared_value_offers(declared, wanted, result):
    assert offers(declared, wanted) is result
