"""Tiny models of many families, with random weights.

``build(name)`` gives a model in evaluation mode and the arguments of its forward call; ``padding`` is "none", "right" or
"left" and matters only to families in ``PADDED``. Text has 2 x 24 tokens, of which padding takes 7 from the second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BATCH, TOKENS, SHORT = 2, 24, 17
SIZE = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SIZE, "intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.3}
ROTARY = {**WIDE, "num_key_value_heads": 2, "head_dim": 8}
SEQUENCE = {"vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
SEQUENCE |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
SEQUENCE |= {"max_position_embeddings": 64, "init_std": 0.3, "decoder_start_token_id": 1}
SEQUENCE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
IMAGE |= {"image_size": 16, "patch_size": 4, "initializer_range": 0.3}

# name: (model class, configuration class, options, kind of input)
TABLE: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "bert": ("BertModel", "BertConfig", WIDE, "text"),
    "roberta": ("RobertaModel", "RobertaConfig", {**WIDE, "pad_token_id": 0}, "text"),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "initializer_range": 0.3},
        "text",
    ),
    "albert": ("AlbertModel", "AlbertConfig", {**WIDE, "embedding_size": 16}, "text"),
    "modernbert": (
        "ModernBertModel",
        "ModernBertConfig",
        {**WIDE, "local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0, "reference_compile": False},
        "text",
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3},
        "text",
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", WIDE, "text"),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**SIZE, "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32, "init_std": 0.3},
        "text",
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", ROTARY, "text"),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**ROTARY, "sliding_window": 8}, "text"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", ROTARY, "text"),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**ROTARY, "sliding_window": 8, "attn_logit_softcapping": 2.0, "pad_token_id": 0},
        "text",
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**ROTARY, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0},
        "text",
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**ROTARY, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
        "text",
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **WIDE,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
        },
        "text",
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 60,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        "pairs",
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", SEQUENCE, "pairs"),
    "marian": ("MarianMTModel", "MarianConfig", SEQUENCE, "pairs"),
    "vit": ("ViTModel", "ViTConfig", IMAGE, "image"),
    "dinov2": ("Dinov2Model", "Dinov2Config", IMAGE, "image"),
    "clip_text": ("CLIPTextModel", "CLIPTextConfig", {**WIDE, "bos_token_id": 1, "eos_token_id": 2}, "text"),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**SEQUENCE, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32},
        "sound",
    ),
    # These bypass the attention interface.
    "mpnet": ("MPNetModel", "MPNetConfig", {**WIDE, "pad_token_id": 1}, "text"),
    "deberta_v2": (
        "DebertaV2Model",
        "DebertaV2Config",
        {**WIDE, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16},
        "text",
    ),
    "gptj": (
        "GPTJForCausalLM",
        "GPTJConfig",
        {
            "vocab_size": 60,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "rotary_dim": 4,
            "initializer_range": 0.3,
        },
        "text",
    ),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": 60,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "max_position_embeddings": 64,
        },
        "text",
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 60, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},
        "text",
    ),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**SIZE, "initializer_range": 0.3, "alibi": False}, "text"),
    "falcon_alibi": ("FalconForCausalLM", "FalconConfig", {**SIZE, "initializer_range": 0.3, "alibi": True}, "text"),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": 60, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "initializer_range": 0.3},
        "text",
    ),
    "swinv2": (
        "Swinv2Model",
        "Swinv2Config",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2], "num_heads": [4], "window_size": 4},
        "image",
    ),
}
PLAIN = ("massieu", "massieu_shared", "multihead", "torch_encoder", "torch_transformer")
BYPASSING = ("mpnet", "deberta_v2", "gptj", "gpt_neo", "bloom", "falcon", "falcon_alibi", "mpt", "swinv2")
NAMES = (*TABLE, *PLAIN)
PADDED = tuple(name for name, row in TABLE.items() if row[3] in ("text", "pairs"))


def build(name: str, *, padding: str = "none", seed: int = 0, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A model of the family and what to call it with; options go into its configuration."""
    torch.manual_seed(seed)
    if name in PLAIN:
        return _plain(name)
    import transformers

    model_class, config_class, own, kind = TABLE[name]
    config = getattr(transformers, config_class)(**{**own, **options})
    model = getattr(transformers, model_class)(config).eval()
    inputs = INPUTS[kind](model) if kind in ("image", "sound") else INPUTS[kind](padding)
    return model, inputs


def words(count: int = TOKENS, *, seed: int = 1) -> Tensor:
    """Word numbers without special ones, ``(batch, count)``."""
    return torch.randint(4, 60, (BATCH, count), generator=torch.Generator().manual_seed(seed))


def mask(padding: str, count: int = TOKENS, short: int = SHORT) -> Tensor:
    """One where there is a token, ``(batch, count)``; the second sequence is shorter."""
    present = torch.ones(BATCH, count, dtype=torch.long)
    if padding == "right":
        present[1, short:] = 0
    elif padding == "left":
        present[1, : count - short] = 0
    return present


def _text(padding: str) -> dict[str, Any]:
    inputs = {"input_ids": words()}
    return inputs if padding == "none" else {**inputs, "attention_mask": mask(padding)}


def _pairs(padding: str) -> dict[str, Any]:
    inputs = {"input_ids": words(), "decoder_input_ids": words(7, seed=2)}
    if padding == "none":
        return inputs
    return {**inputs, "attention_mask": mask(padding), "decoder_attention_mask": mask("right", 7, 5)}


def _image(model: nn.Module) -> dict[str, Any]:
    size = model.config.image_size
    return {"pixel_values": torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(1))}


def _sound(model: nn.Module) -> dict[str, Any]:
    sound = torch.randn(BATCH, 8, 40, generator=torch.Generator().manual_seed(1))
    return {"input_features": sound, "decoder_input_ids": words(7, seed=2)}


INPUTS: dict[str, Any] = {"text": _text, "pairs": _pairs, "image": _image, "sound": _sound}


def _plain(name: str) -> tuple[nn.Module, dict[str, Any]]:
    from massieu.nn import Transformer

    vectors = torch.randn(BATCH, TOKENS, 32, generator=torch.Generator().manual_seed(1))
    if name.startswith("massieu"):
        shared = name == "massieu_shared"
        model = Transformer(32, 2, 4, vocabulary=60, num_key_heads=2, window=8, shared_layers=shared)
        return model.eval(), {"inputs": words()}
    if name == "multihead":
        return nn.MultiheadAttention(32, 4, batch_first=True).eval(), dict.fromkeys(("query", "key", "value"), vectors)
    if name == "torch_transformer":
        model = nn.Transformer(32, 4, 2, 2, 48, batch_first=True)
        causal = torch.ones(7, 7, dtype=torch.bool).triu(1)
        return model.eval(), {"src": vectors, "tgt": vectors[:, :7], "tgt_mask": causal}
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval(), {"src": vectors}
