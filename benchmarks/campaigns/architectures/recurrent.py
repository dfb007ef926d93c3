"""Decoders with a state: state-space models, recurrent ones, and hybrids with attention."""

from __future__ import annotations

from typing import Any

from benchmarks.campaigns.architectures.catalogue import add
from benchmarks.campaigns.architectures.data import shifted_labels, text
from benchmarks.campaigns.architectures.decoders import language_model

__all__: list[str] = []

MAMBA = {"state_size": 4, "conv_kernel": 3, "time_step_rank": 4, "expand": 2}
MAMBA2 = {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4, "expand": 2}
HYBRID = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}

RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("MambaForCausalLM", MAMBA),
    "mamba2": ("Mamba2ForCausalLM", MAMBA2),
    "falcon_mamba": ("FalconMambaForCausalLM", MAMBA),
    "jamba": (
        "JambaForCausalLM",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 4,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": ("BambaForCausalLM", {**HYBRID, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            **HYBRID,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
        },
    ),
    "zamba": (
        "ZambaForCausalLM",
        {
            "num_hidden_layers": 4,
            "mamba_d_state": 4,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 4,
            "n_mamba_heads": 2,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "use_mamba_kernels": False,
            "attention_head_dim": 16,
            "num_key_value_heads": 4,
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 8,
            "mamba_d_conv": 3,
            "mamba_ngroups": 1,
            "mamba_headdim": 8,
            "n_mamba_heads": 8,
            "chunk_size": 4,
            "num_mem_blocks": 1,
            "attention_head_dim": 16,
            "num_key_value_heads": 4,
            "use_mamba_kernels": False,
            "adapter_rank": 4,
        },
    ),
    "falcon_h1": ("FalconH1ForCausalLM", {**HYBRID, "mamba_d_ssm": 64}),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "conv_kernel": 3,
            "chunk_size": 4,
        },
    ),
    "rwkv": ("RwkvForCausalLM", {"attention_hidden_size": 32, "context_length": 64}),
    # With a cache it keeps the state of a forward in its layers, where the next micro-batch finds it.
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        {"lru_width": 32, "attention_window_size": 8, "use_cache": False},
    ),
    "xlstm": (
        "xLSTMForCausalLM",
        {
            "num_heads": 4,
            "num_blocks": 3,
            "chunk_size": 5,
            "qk_dim_factor": 2.0,
            "v_dim_factor": 2.0,
            "use_cache": False,
        },
    ),
    "lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            **DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "olmo_hybrid": ("OlmoHybridForCausalLM", DELTA),
}

for name, (cls, settings) in RECURRENT.items():
    add(
        name,
        "state space or recurrent",
        language_model(cls, **settings),
        text,
        weight=shifted_labels,
        ci=name == "mamba",
    )
