"""Decoders that are mixtures of experts.

The routing of a token depends on that token alone, but the loss that balances the experts is that of a micro-batch,
not of the mini-batch, in the plain model run micro-batch by micro-batch as well.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from benchmarks.campaigns.architectures.catalogue import add
from benchmarks.campaigns.architectures.data import shifted_labels, text
from benchmarks.campaigns.architectures.decoders import language_model

__all__: list[str] = []

EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
}
LATENT = {
    **EXPERTS,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
ROUTED = {**EXPERTS, "output_router_logits": True}

MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", EXPERTS),
    "mixtral (router logits)": ("MixtralForCausalLM", ROUTED),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**ROUTED, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", ROUTED),
    "olmoe": ("OlmoeForCausalLM", ROUTED),
    "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),
    "dbrx": (
        "DbrxForCausalLM",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        },
    ),
    "granitemoe": ("GraniteMoeForCausalLM", ROUTED),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", {**ROUTED, "shared_intermediate_size": 24}),
    "gpt_oss": ("GptOssForCausalLM", {**ROUTED, "sliding_window": 4}),
    "phimoe": ("PhimoeForCausalLM", EXPERTS),
    "jetmoe": ("JetMoeForCausalLM", {**ROUTED, "kv_channels": 8, "num_key_value_heads": 2}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {**ROUTED, "moe_num_experts": 4, "moe_k": 2}),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", {**EXPERTS, "moe_topk": 2}),
    "glm4_moe": ("Glm4MoeForCausalLM", LATENT),
    "dots1": ("Dots1ForCausalLM", LATENT),
    "llama4": (
        "Llama4ForCausalLM",
        {**EXPERTS, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2, "attention_chunk_size": 4},
    ),
    "flex_olmo": ("FlexOlmoForCausalLM", ROUTED),
    "minimax": ("MiniMaxForCausalLM", {**ROUTED, "block_size": 4}),
}


class FurtherTokens(nn.Module):
    """DeepSeek-V3 in training: a further block predicts the token after the next one, with the same words and head."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.modeling_layers import MtpLayer

        self.main = language_model("DeepseekV3ForCausalLM", **LATENT)()
        block = self.main.model.layers[-1]
        self.further = MtpLayer(self.main.config, type(block), type(block.input_layernorm), 0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        output = self.main(input_ids, attention_mask=attention_mask, labels=labels, output_hidden_states=True)
        hidden, words = output.hidden_states[-1][:, :-1], self.main.get_input_embeddings()(input_ids[:, 1:])
        places = attention_mask[:, 1:].cumsum(1)
        turns = self.main.model.rotary_emb(hidden, places)
        further = self.main.lm_head(self.further(words, hidden, turns, None, places, None))
        after = functional.cross_entropy(further[:, :-1].flatten(0, 1), labels[:, 2:].flatten(), reduction="sum")
        output.loss = output.loss + 0.3 * after / (labels[:, 1:] != -100).sum()
        return output


for name, (cls, settings) in MIXTURES.items():
    add(
        name,
        "mixture of experts",
        language_model(cls, **settings),
        text,
        weight=shifted_labels,
        coupled=("loss", "aux_loss") if settings.get("output_router_logits") else (),
        draws=name == "phimoe",  # Its router samples in training.
        ci=name == "mixtral (router logits)",
    )

add("deepseek_v3 (multi-token prediction)", "mixture of experts", FurtherTokens, text, weight=shifted_labels)
