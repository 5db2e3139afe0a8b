"""The first run of a new user: a small mixture of experts that learns on a laptop's CPU."""

from kha_megatron.model.run import Run
from kha_megatron.recipes.recipe import Recipe

QUICKSTART = Recipe(
    name="quickstart",
    description="small MoE with KHA-MLP on v, tensor parallel over two CPU ranks",
    ranks=2,
    run=Run.of(
        vocab_size=512,  # few tokens to choose from: minutes on a CPU are enough to learn them
        # model: the paper's shape (section 4.1) in small
        num_layers=4,
        hidden_size=128,
        ffn_hidden_size=128,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        kv_channels=32,
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        swiglu=True,
        add_bias_linear=False,
        position_embedding_type="rope",
        rotary_base=10000,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.05,  # half of 1/sqrt(hidden): short runs learn faster from it
        # experts, balanced by a bias instead of an auxiliary loss
        num_experts=8,
        moe_ffn_hidden_size=128,
        moe_router_topk=2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type=("none",),
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        # layout
        tensor_model_parallel_size=2,
        sequence_parallel=True,  # Megatron asks for it with experts and tensor parallelism
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        # optimisation: the paper's, but for the lengths and the learning rate, which is 2.7 times
        # that of its small models; at ten times it, roundings decide where experts' losses end
        seq_length=256,
        max_position_embeddings=256,
        micro_batch_size=16,
        global_batch_size=16,
        train_iters=350,
        lr=2e-3,
        min_lr=2e-4,
        lr_decay_style="cosine",
        lr_warmup_fraction=0.05,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.1,
        clip_grad=1.0,
        seed=1234,
        # data, reports, checkpoints
        split="99,1,0",
        num_workers=0,
        eval_interval=1000,
        eval_iters=0,
        log_interval=10,
        tensorboard_log_interval=1,
        save_interval=1000,
        ckpt_format="torch_dist",
        device="cpu",
        kha_preset="kha_mlp",
    ),
    environment={
        "OMP_NUM_THREADS": "1",  # two ranks share the cores; more threads would fight over them
    },
)
