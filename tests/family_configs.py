"""What is particular about the tiny configuration of each model type of transformers' AutoModelForCausalLM."""

from __future__ import annotations

from typing import Any

LAYERS = 4
FULL, SLIDING = "full_attention", "sliding_attention"
# The odd layer stands between converted ones and a kept one: the order in which mask and cache mix-ups show.
WITH_SLIDING = [FULL, SLIDING, FULL, FULL]
WITH_LINEAR = [FULL, "linear_attention", FULL, FULL]

# A config class gets an entry only if it has a field (or an alias) of that name, so one dict serves all.
COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    # every bias, norm and window that is optional
    "attention_bias": True,
    "mlp_bias": True,
    "use_bias": True,
    "use_qkv_bias": True,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "use_sliding_window": True,
    # mixture of experts
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "zero_expert_num": 2,
    "router_hidden_size": 32,
    # multi-head latent attention: 16 + 8 dims for q and k, 20 for v
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    # sparse attention that selects more tokens than the tests have, so that it is exact
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 128,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 128,
    "indexer_compress_ratio": 2,
    # recurrent layers of hybrids
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_d_state": 8,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_chunk_size": 16,
    "mamba_dt_rank": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "n_groups": 2,
    # what one or two families have alone
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "d_rel": 4,
    "rel_extent": 16,
    "unpadded_vocab_size": 128,
    "n_layers_per_attn_res_block": 2,
    "hc_lowrank": 8,
    "o_groups": 2,
    "o_lora_rank": 16,
    "laurel_rank": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
    "shape_vocab_size": 16,
    "shape_embed_dim": 8,
    "pronunciation_vocab_size": 16,
    "pronunciation_embed_dim": 8,
    "attention_heads": 4,
    "rotary_dim": 8,
    "dim_head": 16,
    **dict.fromkeys(("ffn_dim", "dim_ff", "dff", "d_inner", "feed_forward_size"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"), LAYERS),
}

ODD = {"head_dim": 48, "num_key_value_heads": 1}  # head_dim * heads isn't hidden_size; one key head for four
WIDE = {"head_dim": 48}
LATENT = {"head_dim": 8, "num_key_value_heads": 4}  # head_dim is qk_rope_head_dim there
NO_WINDOW = {"sliding_window": None}
MIXED = {"layer_types": WITH_SLIDING}
HYBRID = {"layer_types": WITH_LINEAR}
CONVOLVED = {"layer_types": [FULL, "conv", FULL, FULL]}
CONVOLVED_ATTENTION = {"layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid"]}

GROUPS: list[tuple[str, dict[str, Any]]] = [
    (
        "apertus1p5_text aria_text bart bert bert-generation big_bird bigbird_pegasus biogpt bitnet "
        "blenderbot blenderbot-small bloom blt camembert codegen cpmant ctrl data2vec-text diffllama doge "
        "dots3_note electra emu3 ernie ernie4_5_moe exaone falcon falcon_h1 falcon_mamba flex_olmo fuyu "
        "gemma3 gemma3n gemma4 gemma4_unified gemma4_unified_assistant git glm4 glm4_moe got_ocr2 gpt-sw3 "
        "gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gptj granite granitemoe granitemoeshared helium "
        "hrm_text hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder jais2 jetmoe llama4 mamba "
        "marian mbart megatron-bert minimax_m2 minimax_m3_vl_text mllama moss_transcribe_diarize mpt "
        "musicgen musicgen_melody mvp nanochat olmo olmo2 olmoe openai-gpt opt pegasus persimmon phi phimoe "
        "plbart prophetnet qwen3_5 qwen3_5_moe qwen4_exp recurrent_gemma rembert roberta "
        "roberta-prelayernorm roc_bert roformer rwkv sarvam_moe solar_open stablelm trocr whisper xglm xlm "
        "xlm-roberta xlm-roberta-xl xlnet",
        {},
    ),
    ("apertus gemma glm hunyuan_v1_dense llama", ODD),
    ("arcee ernie4_5 mistral nemotron seed_oss", WIDE),
    ("mixtral ministral3 phi3 starcoder2", NO_WINDOW),
    (
        "afmoe beam cohere2_moe cwm dots1 exaone4 exaone_moe flint gemma3_text gpt_oss granite_swa "
        "granitemoe_swa kolibri1 laguna lfm3 mellum mimo_v2_flash ministral olmo3 qwen2 qwen2_moe smollm3 "
        "vaultgemma",
        MIXED,
    ),
    ("cohere2 gemma2 qwen3", MIXED | ODD),
    (
        "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa minicpm3 sarvam_mla youtu",
        LATENT,
    ),
    ("olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next", HYBRID),
    ("bailing_hybrid kimi_linear", HYBRID | LATENT),
    ("lfm2 lfm2_moe", CONVOLVED),
    ("inkling_text inkling2_text", CONVOLVED_ATTENTION),
    ("zamba zamba2", {"layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"]}),
]

FAMILIES: dict[str, dict[str, Any]] = {name: values for names, values in GROUPS for name in names.split()} | {
    "bamba": {"attn_layer_indices": [0, 2, 3]},
    "cohere": {"num_key_value_heads": 1},
    "cohere_compass_text": {
        **MIXED,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in (FULL, SLIDING)},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "layer_types": [SLIDING, "compressed_sparse_attention", "heavily_compressed_attention", SLIDING],
        "num_key_value_heads": 1,
    },
    "dory": {**MIXED, "n_input_layers": 1, "n_output_layers": 1},
    "dots3_note_text": {
        **MIXED,
        **LATENT,
        "head_dim": 24,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 20,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
    },
    "gemma3n_text": {**MIXED, "num_kv_shared_layers": 0},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "gemma4_text": {**MIXED, "num_kv_shared_layers": 1, "global_head_dim": 48},
    "gemma4_unified_text": {**MIXED, "global_head_dim": 48},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["attention", "mamba", "attention", "attention"]},
    "inkling2_loop_text": {
        **CONVOLVED_ATTENTION,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_num_passes": 2,
        "loop_gate_rank": 4,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 0},
    "lara_mini": HYBRID,
    "llama4_text": {"no_rope_layers": [0, 1, 0, 0], "attention_chunk_size": 8, "intermediate_size_mlp": 96},
    "longcat_flash": {**LATENT, "num_layers": 2},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "minimax": {**HYBRID, **NO_WINDOW},
    "modernbert-decoder": {**MIXED, "local_attention": 16},
    "moshi": {"sliding_window": 128},
    "nemotron_h": {"layers_block_type": WITH_LINEAR, "num_hidden_layers": LAYERS},
    "phi4_multimodal": {
        **NO_WINDOW,
        "vision_config": {
            **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
            **dict.fromkeys(("image_size", "crop_size"), 28),
            **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2),
        },
        "audio_config": {
            **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
            **dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel"), 32),
            **dict.fromkeys(("num_blocks", "num_attention_heads"), 2),
            **dict.fromkeys(("nemo_conv_channels", "input_size"), 8),
        },
    },
    "qwen3_moe": {"use_sliding_window": False},
    "qwen4_exp_text": {
        "layer_types": ["indexed_attention", "linear_attention", "indexed_attention", "indexed_attention"]
    },
    "reformer": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (8, 16)},
    "xlstm": {"num_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
