"""What tests of all families share: a model of each with all that the family can have."""

from cpjax.models import gemma4, qwen3_5, qwen3_5_moe, step3p7

SLIDING, FULL = "sliding_attention", "full_attention"
CONFIGS = {
    "qwen3_5": qwen3_5.Config(
        qwen3_5.TextConfig(
            num_attention_heads=4, num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=4,
            num_hidden_layers=2, layer_types=("linear_attention", FULL), mtp_num_hidden_layers=1,
        ),
        qwen3_5.VisionConfig(num_heads=2, out_hidden_size=4096),
    ),
    "qwen3_5_moe": qwen3_5_moe.Config(
        qwen3_5_moe.TextConfig(
            num_attention_heads=4, num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=4,
            num_hidden_layers=2, layer_types=("linear_attention", FULL), num_experts=4, num_experts_per_tok=2,
            mtp_num_hidden_layers=1,
        ),
        qwen3_5_moe.VisionConfig(num_heads=2, out_hidden_size=2048),
    ),
    "gemma4": gemma4.Config(
        gemma4.TextConfig(
            num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, layer_types=(SLIDING, FULL, FULL),
            num_kv_shared_layers=1, use_bidirectional_attention="vision", final_logit_softcapping=5.0,
            enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32,
        ),
        gemma4.VisionConfig(num_attention_heads=2, num_key_value_heads=2, use_clipped_linears=True),
        gemma4.AudioConfig(num_attention_heads=2),
    ),
    "step3p7": step3p7.Config(
        step3p7.TextConfig(
            num_attention_heads=4, num_sliding_attention_heads=8, num_key_value_heads=2, num_hidden_layers=2,
            layer_types=(FULL, SLIDING), mlp_layer_types=("dense", "sparse"), sliding_window=512, n_routed_experts=4,
            num_experts_per_tok=2, num_nextn_predict_layers=1,
        ),
        step3p7.VisionConfig(num_attention_heads=2),
        image_token_id=1,
    ),
}  # fmt: skip
"""All that a family can have, in one model; `reduced` makes it narrow."""
