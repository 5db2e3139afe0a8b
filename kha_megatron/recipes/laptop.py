"""Small recipes that train in a few minutes on two CPU cores.

These are scaled-down versions of the paper's models (section 4.1). The ``laptop/*`` recipes use a
single rank, so that ``kha-megatron compare`` can train one run per core in parallel. See
``benchmarks/reproduction.md`` for how we chose the learning rate.
"""

from typing import Any

from kha_megatron.model.run import Run
from kha_megatron.recipes.paper import ATTENTION, ROUTING, TRAINING
from kha_megatron.recipes.recipe import Recipe

_EXPERTS = ROUTING | {"num_experts": 8, "moe_router_topk": 2}
_GROUPED = {"group_query_attention": True, "num_query_groups": 4}


def _recipe(
    name: str,
    description: str,
    *,
    ranks: int,
    length: int,
    **values: Any,
) -> Recipe:
    defaults = {
        **ATTENTION,
        **TRAINING,
        "rotary_base": 10000,
        "seq_length": length,
        "max_position_embeddings": length,
        "train_iters": 350,
        "lr_warmup_fraction": 0.05,
        "seed": 1234,
        "num_workers": 0,
        "device": "cpu",
        "kha_preset": "kha_mlp",
    }
    return Recipe(
        name=name,
        description=description,
        ranks=ranks,
        run=Run.from_values(vocab_size=512, **(defaults | values)),
        environment={"OMP_NUM_THREADS": "1"},  # avoid oversubscribing the cores
    )


def _laptop(name: str, description: str, **values: Any) -> Recipe:
    return _recipe(
        f"laptop/{name}",
        f"{description}, 2 layers, one CPU core",
        ranks=1,
        length=128,
        num_layers=2,
        hidden_size=64,
        num_attention_heads=8,
        kv_channels=16,
        # 0.5 / sqrt(hidden_size). With 0.02, the loss plateaus for hundreds of steps and runs
        # differ ten times as much.
        init_method_std=0.06,
        tensor_model_parallel_size=1,
        micro_batch_size=8,
        global_batch_size=8,
        lr=4e-3,
        min_lr=4e-4,
        split="95,5,0",
        **values,
    )


QUICKSTART = _recipe(
    "quickstart",
    "small MoE with KHA-MLP on v, tensor parallel over two CPU ranks",
    ranks=2,
    length=256,
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=128,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=2,
    kv_channels=32,
    layernorm_epsilon=1e-6,
    init_method_std=0.05,  # 0.5 / sqrt(hidden_size)
    moe_ffn_hidden_size=128,
    **_EXPERTS,
    tensor_model_parallel_size=2,
    sequence_parallel=True,  # required by Megatron for MoE with tensor parallelism
    expert_model_parallel_size=2,
    expert_tensor_parallel_size=1,
    micro_batch_size=16,
    global_batch_size=16,
    lr=2e-3,  # with 2e-2, rounding errors change the loss
    min_lr=2e-4,
    split="99,1,0",
)

LAPTOP = (
    _laptop(
        "moe",
        "MoE of 8 experts, top 2, 8 query and 4 KV heads",
        ffn_hidden_size=64,
        moe_ffn_hidden_size=64,
        **_GROUPED,
        **_EXPERTS,
    ),
    _laptop("dense", "dense model, 8 query and 4 KV heads", ffn_hidden_size=192, **_GROUPED),
    _laptop(
        "mla",
        "dense model with KHA-Linear on gated MLA of 8 heads",
        ffn_hidden_size=192,
        multi_latent_attention=True,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
        kha_preset="kha_linear",
        kha_heads=("gate.output=element",),
    ),
)
"""The MoE and the dense model with grouped queries have the same number of active parameters."""
