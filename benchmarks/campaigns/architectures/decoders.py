"""Decoders: causal language models of transformers, dense ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.campaigns.architectures.catalogue import add, transformers_model
from benchmarks.campaigns.architectures.data import VOCABULARY, all_labels, shifted_labels, text

__all__ = ["language_model"]

#: For every model of this file and its neighbours; each takes what its configuration knows.
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def language_model(
    name: str, *, without: tuple[str, ...] = (), dropout: bool = False, **settings: Any
) -> Callable[[], nn.Module]:
    """Return what makes a small model of transformers, by its class and what is particular in its configuration.

    Args:
        name: of the class
        without: those of ``SMALL`` that its configuration refuses
        settings: of its configuration
    """

    small = {key: value for key, value in SMALL.items() if key not in without}
    return transformers_model(name, dropout=dropout, **{**small, **settings})


GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}

#: The class of each, and what is particular in its configuration.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama (tied embeddings)": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "gpt": ("OpenAIGPTLMHeadModel", GPT),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT),
    "gpt_neo": ("GPTNeoForCausalLM", {"num_layers": 3, "attention_types": [[["global", "local", "global"], 1]]}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "gpt_neox_japanese": ("GPTNeoXJapaneseForCausalLM", {"intermediate_multiple_size": 2}),
    "gptj": ("GPTJForCausalLM", {**GPT, "rotary_dim": 4}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 40, "word_embed_proj_dim": 32}),
    "opt (projected embeddings)": ("OPTForCausalLM", {"ffn_dim": 40, "word_embed_proj_dim": 16}),
    "bloom": ("BloomForCausalLM", {"n_layer": 3, "n_head": 4}),
    "falcon": ("FalconForCausalLM", {"without": ("head_dim",)}),
    "falcon (alibi)": (
        "FalconForCausalLM",
        {"without": ("head_dim",), "alibi": True, "parallel_attn": False, "multi_query": False},
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": 4}),
    "ministral": ("MinistralForCausalLM", {"sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 4}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "gemma3n": (
        "Gemma3nForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
        },
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCABULARY,
            "global_head_dim": 8,
        },
    ),
    "vaultgemma": ("VaultGemmaForCausalLM", {"sliding_window": 4}),
    "phi": ("PhiForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {"rope_parameters": None}),
    "olmo": ("OlmoForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {"sliding_window": 4}),
    "stablelm": ("StableLmForCausalLM", {}),
    "starcoder2": ("Starcoder2ForCausalLM", {}),
    "cohere": ("CohereForCausalLM", {}),
    "cohere2": ("Cohere2ForCausalLM", {"sliding_window": 4}),
    "granite": ("GraniteForCausalLM", {}),
    "xglm": ("XGLMForCausalLM", {"d_model": 32, "ffn_dim": 40, "num_layers": 3, "attention_heads": 4}),
    "biogpt": ("BioGptForCausalLM", {}),
    "codegen": ("CodeGenForCausalLM", {**GPT, "rotary_dim": 4}),
    "ctrl": ("CTRLLMHeadModel", {**GPT, "dff": 40}),
    "persimmon": ("PersimmonForCausalLM", {}),
    "mpt": ("MptForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64}),
    "glm": ("GlmForCausalLM", {}),
    "glm4": ("Glm4ForCausalLM", {}),
    "helium": ("HeliumForCausalLM", {}),
    "nemotron": ("NemotronForCausalLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "arcee": ("ArceeForCausalLM", {}),
    "apertus": ("ApertusForCausalLM", {}),
    "bitnet": ("BitNetForCausalLM", {}),
    "diffllama": ("DiffLlamaForCausalLM", {}),
    "exaone4": ("Exaone4ForCausalLM", {"sliding_window": 4}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {}),
    "seed_oss": ("SeedOssForCausalLM", {}),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", {}),
    "minicpm3": (
        "MiniCPM3ForCausalLM",
        {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 16, "num_key_value_heads": 4},
    ),
    "modernbert_decoder": ("ModernBertDecoderForCausalLM", {}),
    "nanochat": ("NanoChatForCausalLM", {}),
    "trocr": (
        "TrOCRForCausalLM",
        {"d_model": 32, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 40},
    ),
}

for name, (cls, settings) in DECODERS.items():
    add(
        name,
        "decoder",
        language_model(cls, **settings),
        text,
        weight=all_labels if name == "trocr" else shifted_labels,  # which leaves the shift to its caller
        ci=name == "gemma3n",
    )

add(
    "gpt2 (dropout)",
    "decoder",
    language_model("GPT2LMHeadModel", dropout=True, **GPT),
    text,
    weight=shifted_labels,
    draws=True,
)
