"""A recipe of your own: KHA-MLP in a model with the sizes of Qwen3-235B-A22B.

    kha-megatron params examples/qwen3_235b.py:KHA_MLP
    kha-megatron plan examples/qwen3_235b.py:KHA_MLP --gpus 256
    kha-megatron launch examples/qwen3_235b.py:KHA_MLP --executor slurm --nodes 32 \
      --time 04:00:00 --dry-run -- --mock-data

We have not trained this model.
"""

from dataclasses import replace

from kha_megatron.recipes import get_recipe

# 128 experts, top 8, and the vocabulary of Qwen3, trained as in Table 3 of the KHA paper
BASELINE = replace(
    get_recipe("gated/15b-baseline"),
    name="qwen3-235b/baseline",
    description="235B MoE, 22B active",
    note="",
    paper={"total": "235B", "active": "22B"},
    ranks=256,
).updated(
    num_layers=94,
    hidden_size=4096,
    ffn_hidden_size=1536,
    moe_ffn_hidden_size=1536,
    num_attention_heads=64,
    layernorm_epsilon=1e-6,
    rotary_base=1_000_000,
    tensor_model_parallel_size=4,
    sequence_parallel=True,
    pipeline_model_parallel_size=8,
    # 12 layers on each pipeline stage except for the first and the last
    decoder_first_pipeline_num_layers=11,
    decoder_last_pipeline_num_layers=11,
    expert_model_parallel_size=32,
    expert_tensor_parallel_size=1,
)

KHA_MLP = replace(BASELINE, name="qwen3-235b/kha-mlp").updated(kha_preset="kha_mlp")
