"""Models of sound: classes of it, text from it, sound as tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from benchmarks.campaigns.architectures.catalogue import ENCODER_DECODER, add, transformers_model
from benchmarks.campaigns.architectures.data import all_labels, classes, noise, text

__all__: list[str] = []

CLASSES = 5
SAMPLES = 1200

#: For every model of waves; each takes what its configuration knows.
WAVES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 4, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "num_labels": CLASSES,
    "classifier_proj_size": 16,
    "apply_spec_augment": False,
    "ctc_loss_reduction": "mean",
    "num_ctc_classes": 32,
    "pad_token_id": 0,
}


def spoken(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return waves of different lengths with the letters that they say."""
    lengths = torch.randint(SAMPLES // 2, SAMPLES + 1, (rows, 1), generator=generator)
    labels = torch.randint(1, 32, (rows, 4), generator=generator)
    labels[:, 3] = torch.where(torch.rand(rows, generator=generator) < 0.5, -100, labels[:, 3])
    return {
        "input_values": noise(rows, SAMPLES, generator=generator),
        "attention_mask": (torch.arange(SAMPLES) < lengths).long(),
        "labels": labels,
    }


def heard(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return waves with a class each."""
    return {"input_values": noise(rows, SAMPLES, generator=generator), "labels": classes(rows, generator, CLASSES)}


def framed(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return spectrograms of 16 frames with a class each."""
    return {"input_values": noise(rows, 16, 16, generator=generator), "labels": classes(rows, generator, CLASSES)}


def transcribed(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return spectrograms of 40 frames with their text."""
    return {"input_features": noise(rows, 8, 40, generator=generator), "labels": text(rows, generator)["labels"]}


def recorded(rows: int, generator: Generator) -> dict[str, Tensor]:
    """Return spectrograms of different lengths with their text."""
    mask = torch.arange(40) < torch.randint(20, 41, (rows, 1), generator=generator)
    features = noise(rows, 40, 8, generator=generator)
    return {"input_features": features, "attention_mask": mask.long(), "labels": text(rows, generator)["labels"]}


def rows_of(arguments: Mapping[str, Any]) -> float:
    """Count the rows: the loss of letters is the mean over rows, whatever their lengths."""
    return float(len(arguments["labels"]))


CTC = ("wav2vec2", "Wav2Vec2ForCTC"), ("hubert", "HubertForCTC"), ("wavlm", "WavLMForCTC"), ("sew", "SEWForCTC")
MORE: dict[str, dict[str, Any]] = {
    "sew": {"squeeze_factor": 2},
    "sew_d": {"squeeze_factor": 2, "position_buckets": 8, "max_position_embeddings": 64},
    "wav2vec2_conformer": {"conv_depthwise_kernel_size": 5},
}

for name, cls in (
    *CTC,
    ("sew_d", "SEWDForCTC"),
    ("unispeech", "UniSpeechForCTC"),
    ("unispeech_sat", "UniSpeechSatForCTC"),
    ("data2vec (audio)", "Data2VecAudioForCTC"),
    ("wav2vec2_conformer", "Wav2Vec2ConformerForCTC"),
):
    rows = 8 if name == "wav2vec2_conformer" else 5  # it has batch norms
    add(
        name,
        "speech",
        transformers_model(cls, **{**WAVES, **MORE.get(name, {})}),
        spoken,
        weight=rows_of,
        explicit=True,
        rows=rows,
    )

add("wav2vec2 (classes)", "speech", transformers_model("Wav2Vec2ForSequenceClassification", **WAVES), heard)
add(
    "wav2vec2 (stable norm)",
    "speech",
    transformers_model("Wav2Vec2ForCTC", do_stable_layer_norm=True, feat_extract_norm="layer", **WAVES),
    spoken,
    weight=rows_of,
    explicit=True,
)
add(
    "whisper",
    "speech",
    transformers_model(
        "WhisperForConditionalGeneration",
        vocab_size=99,
        **ENCODER_DECODER,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=32,
        pad_token_id=0,
        decoder_start_token_id=1,
        bos_token_id=1,
        eos_token_id=2,
    ),
    transcribed,
    weight=all_labels,
    ci=True,
)
add(
    "speech_to_text",
    "speech",
    transformers_model(
        "Speech2TextForConditionalGeneration",
        vocab_size=99,
        **ENCODER_DECODER,
        input_feat_per_channel=8,
        conv_channels=16,
        max_source_positions=40,
        max_target_positions=32,
        pad_token_id=0,
        decoder_start_token_id=1,
    ),
    recorded,
    weight=all_labels,
)
add(
    "audio_spectrogram_transformer",
    "speech",
    transformers_model(
        "ASTForAudioClassification",
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=40,
        patch_size=4,
        frequency_stride=4,
        time_stride=4,
        max_length=16,
        num_mel_bins=16,
        num_labels=CLASSES,
    ),
    framed,
)
add(
    "moonshine",
    "speech",
    transformers_model(
        "MoonshineForConditionalGeneration",
        vocab_size=99,
        hidden_size=32,
        intermediate_size=40,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        encoder_num_key_value_heads=4,
        decoder_num_key_value_heads=4,
        pad_token_id=0,
        decoder_start_token_id=1,
        bos_token_id=1,
        eos_token_id=2,
    ),
    lambda rows, generator: {
        "input_values": noise(rows, 2000, generator=generator),
        "labels": text(rows, generator)["labels"],
    },
    weight=all_labels,
)
