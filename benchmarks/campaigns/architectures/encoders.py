"""Encoders of text: models of masked language, and heads that classify rows, tokens, and spans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from benchmarks.campaigns.architectures.catalogue import add
from benchmarks.campaigns.architectures.data import all_labels, classes, shifted_labels, text
from benchmarks.campaigns.architectures.decoders import language_model

__all__: list[str] = []

CLASSES = 5
TYPES = {"type_vocab_size": 2, "num_labels": CLASSES}
XLM = {"emb_dim": 32, "n_layers": 3, "n_heads": 4, "n_words": 99, "pad_index": 0}


def classified(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return text with a class for each row."""
    return {**text(rows, generator), "labels": classes(rows, generator, CLASSES)}


def tagged(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return text with a class for each token, some of them -100."""
    drawn = text(rows, generator)
    labels = drawn["labels"]
    return {**drawn, "labels": torch.where(labels == -100, labels, labels % CLASSES)}


def answered(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return text with the first and the last token of an answer."""
    drawn = text(rows, generator)
    start = torch.randint(3, (rows,), generator=generator)
    return {
        "input_ids": drawn["input_ids"],
        "attention_mask": drawn["attention_mask"],
        "start_positions": start,
        "end_positions": start + 2,
    }


def detected(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return text with a bit for each token: whether it was replaced."""
    drawn = text(rows, generator)
    return {**drawn, "labels": torch.randint(2, drawn["labels"].shape, generator=generator)}


def chosen(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return three texts a row, one of them the right one."""
    drawn = text(3 * rows, generator)
    shape = (rows, 3, -1)
    labels = classes(rows, generator, 3)
    return {
        "input_ids": drawn["input_ids"].view(shape),
        "attention_mask": drawn["attention_mask"].view(shape),
        "labels": labels,
    }


def placed(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return text with the box of each token on a page."""
    drawn = text(rows, generator)
    corner = torch.randint(30, (*drawn["labels"].shape, 2), generator=generator)
    return {**drawn, "bbox": torch.cat([corner, corner + 9], -1)}


def characters(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return longer text, of characters, with a class for each row."""
    return {**text(rows, generator, length=32, padded=False), "labels": classes(rows, generator, CLASSES)}


def active(arguments: Mapping[str, Any]) -> float:
    """Count the tokens that are not padding."""
    return float(arguments["attention_mask"].sum())


#: The class of each, and what is particular in its configuration.
MASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", TYPES),
    "roberta": ("RobertaForMaskedLM", TYPES),
    "roberta_prelayernorm": ("RobertaPreLayerNormForMaskedLM", TYPES),
    "xlm_roberta": ("XLMRobertaForMaskedLM", TYPES),
    "camembert": ("CamembertForMaskedLM", TYPES),
    "electra": ("ElectraForMaskedLM", {**TYPES, "embedding_size": 16}),
    "deberta": ("DebertaForMaskedLM", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "deberta_v2": ("DebertaV2ForMaskedLM", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "albert": ("AlbertForMaskedLM", {**TYPES, "embedding_size": 16}),
    "albert (two groups)": ("AlbertForMaskedLM", {**TYPES, "embedding_size": 16, "num_hidden_groups": 2}),
    "distilbert": ("DistilBertForMaskedLM", {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 40}),
    "mpnet": ("MPNetForMaskedLM", {}),
    "modernbert": ("ModernBertForMaskedLM", {"local_attention": 4, "global_attn_every_n_layers": 2}),
    "longformer": ("LongformerForMaskedLM", {**TYPES, "attention_window": 4}),
    "big_bird": ("BigBirdForMaskedLM", {**TYPES, "attention_type": "original_full"}),
    "nystromformer": ("NystromformerForMaskedLM", {"num_landmarks": 10, "segment_means_seq_len": 10}),
    "convbert": ("ConvBertForMaskedLM", {**TYPES, "embedding_size": 32, "head_ratio": 2}),
    "ernie": ("ErnieForMaskedLM", TYPES),
    "esm": ("EsmForMaskedLM", {"mask_token_id": 4, "position_embedding_type": "rotary"}),
    "fnet": ("FNetForMaskedLM", TYPES),
    "data2vec (text)": ("Data2VecTextForMaskedLM", TYPES),
    "megatron_bert": ("MegatronBertForMaskedLM", TYPES),
    "rembert": ("RemBertForMaskedLM", {"input_embedding_size": 16, "output_embedding_size": 24}),
    "roformer": ("RoFormerForMaskedLM", {**TYPES, "embedding_size": 32}),
    "mobilebert": (
        "MobileBertForMaskedLM",
        {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16, "num_feedforward_networks": 2},
    ),
    "squeezebert": ("SqueezeBertForMaskedLM", {"embedding_size": 32}),
    "xmod": ("XmodForMaskedLM", {**TYPES, "languages": ["en", "de"], "default_language": "de"}),
    "yoso": ("YosoForMaskedLM", {**TYPES, "use_expectation": True}),
    "reformer": (
        "ReformerForMaskedLM",
        {
            "is_decoder": False,
            "attn_layers": ["local", "local"],
            "attention_head_size": 8,
            "feed_forward_size": 40,
            "axial_pos_embds": False,
            "local_attn_chunk_length": 5,
        },
    ),
    "eurobert": ("EuroBertForMaskedLM", {}),
    "nomic_bert": ("NomicBertForMaskedLM", TYPES),
    "roc_bert": (
        "RoCBertForMaskedLM",
        {**TYPES, "pronunciation_vocab_size": 99, "shape_vocab_size": 99, "enable_shape": False},
    ),
}

for name, (cls, settings) in MASKED.items():
    add(name, "encoder", language_model(cls, **settings), text, weight=all_labels, ci=name == "albert")

add("layoutlm", "encoder", language_model("LayoutLMForMaskedLM", **TYPES), placed, weight=all_labels)
add(
    "lilt (tokens)",
    "encoder",
    language_model("LiltForTokenClassification", hidden_size=48, **TYPES),
    lambda rows, generator: {**placed(rows, generator), **tagged(rows, generator)},
    weight=all_labels,
)
add("bert (classes)", "encoder", language_model("BertForSequenceClassification", **TYPES), classified)
add("bert (tokens)", "encoder", language_model("BertForTokenClassification", **TYPES), tagged, weight=all_labels)
add("bert (answers)", "encoder", language_model("BertForQuestionAnswering", type_vocab_size=2), answered)
add("bert (choices)", "encoder", language_model("BertForMultipleChoice", **TYPES), chosen)
add(
    "bert (decoder)",
    "encoder",
    language_model("BertLMHeadModel", is_decoder=True, **TYPES),
    text,
    weight=shifted_labels,
)
add(
    "electra (replaced tokens)",
    "encoder",
    language_model("ElectraForPreTraining", **TYPES),
    detected,
    weight=active,
    explicit=True,
)
add(
    "xlnet",
    "encoder",
    language_model(
        "XLNetLMHeadModel", without=("max_position_embeddings",), d_model=32, d_inner=40, n_layer=3, n_head=4
    ),
    text,
    weight=all_labels,
)
add("xlm", "encoder", language_model("XLMWithLMHeadModel", **XLM), text, weight=all_labels)
add("flaubert", "encoder", language_model("FlaubertWithLMHeadModel", **XLM), text, weight=all_labels)
add(
    "funnel",
    "encoder",
    language_model(
        "FunnelForMaskedLM",
        without=("num_hidden_layers", "max_position_embeddings"),
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=40,
        block_sizes=[1, 2],
        num_decoder_layers=1,
    ),
    text,
    weight=all_labels,
)
add(
    "squeezebert (classes)",
    "encoder",
    language_model("SqueezeBertForSequenceClassification", embedding_size=32, **TYPES),
    classified,
)
add("ibert (classes)", "encoder", language_model("IBertForSequenceClassification", **TYPES), classified)
add(
    "canine (classes)",
    "encoder",
    language_model(
        "CanineForSequenceClassification",
        num_labels=CLASSES,
        local_transformer_stride=8,
        downsampling_rate=4,
        num_hash_buckets=50,
        num_hash_functions=2,
    ),
    characters,
)
add("splinter (answers)", "encoder", language_model("SplinterForQuestionAnswering", type_vocab_size=2), answered)
add(
    "gpt2 (classes)",
    "encoder",
    language_model("GPT2ForSequenceClassification", n_embd=32, n_layer=3, n_head=4, num_labels=CLASSES),
    classified,
)
add("llama (classes)", "encoder", language_model("LlamaForSequenceClassification", num_labels=CLASSES), classified)
