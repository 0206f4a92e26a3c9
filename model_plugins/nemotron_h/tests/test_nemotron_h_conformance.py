"""Nemotron-H passes the model kit."""

import nemotron_h_cases as cases

from prime_rl.testing.model import ModelConformance

ALL_KINDS = {
    "model_type": "nemotron_h",
    **cases.SIZES,
    # The documents of the kit are 51 tokens together: whole chunks, so that a counted forward has
    # no filling up; short ones, so that documents and states cross many borders.
    "chunk_size": 3,
}


class TestNemotronH(ModelConformance):
    plugin_name = "nemotron_h"
    configs = (
        ALL_KINDS,
        {**ALL_KINDS, "moe_latent_size": None, "n_group": 4, "topk_group": 2, "chunk_size": 17},
        {
            **ALL_KINDS,
            "hybrid_override_pattern": None,
            "layers_block_type": ["linear_attention", "mlp", "mamba"],
            "n_groups": 1,
            "use_conv_bias": False,
            "time_step_limit": [0.001, {"__float__": "Infinity"}],
        },
    )
    required_keys = (
        "vocab_size",
        "hidden_size",
        "hybrid_override_pattern",
        "num_attention_heads",
        "num_key_value_heads",
        "mamba_num_heads",
        "mamba_head_dim",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "intermediate_size",
    )
