"""Encoder-decoders of text, which make the decoder's inputs from the labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.campaigns.architectures.catalogue import ENCODER_DECODER, add
from benchmarks.campaigns.architectures.data import all_labels, text
from benchmarks.campaigns.architectures.decoders import language_model

__all__: list[str] = []


def translated(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return text, its mask, and labels of another length."""
    drawn = text(rows, generator)
    labels = text(rows, generator, length=8)["labels"]
    return {**drawn, "labels": labels}


T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
BART = {**ENCODER_DECODER, "decoder_start_token_id": 2}
GEMMA = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 4,
    "pad_token_id": 0,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", T5),
    "t5 (gated)": (
        "T5ForConditionalGeneration",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mt5": ("MT5ForConditionalGeneration", T5),
    "umt5": ("UMT5ForConditionalGeneration", T5),
    "longt5": ("LongT5ForConditionalGeneration", {**T5, "encoder_attention_type": "local", "local_radius": 3}),
    "switch_transformers": (
        "SwitchTransformersForConditionalGeneration",
        {
            **T5,
            "num_experts": 4,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "router_jitter_noise": 0.0,
        },
    ),
    "bart": ("BartForConditionalGeneration", BART),
    "mbart": ("MBartForConditionalGeneration", BART),
    "mvp": ("MvpForConditionalGeneration", BART),
    "plbart": ("PLBartForConditionalGeneration", BART),
    "pegasus": ("PegasusForConditionalGeneration", BART),
    "pegasus_x": ("PegasusXForConditionalGeneration", {**BART, "num_global_tokens": 4, "block_size": 4}),
    "bigbird_pegasus": ("BigBirdPegasusForConditionalGeneration", {**BART, "attention_type": "original_full"}),
    "blenderbot": ("BlenderbotForConditionalGeneration", BART),
    "blenderbot_small": ("BlenderbotSmallForConditionalGeneration", BART),
    "led": (
        "LEDForConditionalGeneration",
        {
            **BART,
            "attention_window": 4,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
    ),
    "marian": ("MarianMTModel", BART),
    "m2m_100": ("M2M100ForConditionalGeneration", BART),
    "nllb_moe": (
        "NllbMoeForConditionalGeneration",
        {
            **BART,
            "num_experts": 4,
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
            "expert_capacity": 64,
        },
    ),
    "prophetnet": (
        "ProphetNetForConditionalGeneration",
        {
            "without": ("num_hidden_layers",),
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 40,
            "ngram": 2,
            "relative_max_distance": 8,
            "num_buckets": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "fsmt": (
        "FSMTForConditionalGeneration",
        {**BART, "langs": ["en", "de"], "src_vocab_size": 99, "tgt_vocab_size": 99},
    ),
    "t5gemma": ("T5GemmaForConditionalGeneration", {"encoder": GEMMA, "decoder": GEMMA}),
}


def _routed(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Let routers stay in float64: their configuration names no type so precise, and they move their weights to it."""

    def made() -> nn.Module:
        model = make()
        for module in model.modules():
            if type(module).__name__.endswith("Router"):
                module.dtype = torch.float64
        return model

    return made


def _both() -> nn.Module:
    from transformers import BertConfig, BertLMHeadModel, BertModel, EncoderDecoderModel

    small: dict[str, Any] = {
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 0,
    }
    encoder = BertModel(BertConfig(**small))
    decoder = BertLMHeadModel(BertConfig(**small, is_decoder=True, add_cross_attention=True))
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder)
    model.config.decoder_start_token_id = 1
    model.config.pad_token_id = 0
    return model


for name, (cls, settings) in MODELS.items():
    add(
        name,
        "encoder-decoder",
        _routed(language_model(cls, **settings)),
        text if name == "fsmt" else translated,  # makes the decoder's inputs from the source
        weight=all_labels,
    )
add("encoder_decoder (bert to bert)", "encoder-decoder", _both, translated, weight=all_labels)
add(
    "t5 (dropout)",
    "encoder-decoder",
    language_model("T5ForConditionalGeneration", dropout=True, **T5),
    translated,
    weight=all_labels,
    draws=True,
)
