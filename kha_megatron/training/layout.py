"""Megatron's parsed arguments, before it validates them, as :mod:`kha_megatron.model.layout`.

Defaults that Megatron fills in later are filled in here the same way.
"""

import argparse

from kha_megatron.errors import ConfigError
from kha_megatron.model.layout import Batch, Layout, Model, latents, moe_pattern
from kha_megatron.model.rules import check_layout


def check_args_layout(args: argparse.Namespace) -> None:
    """Refuse parallel sizes that the model or the batch cannot be divided by.

    What comes from elsewhere (``--use-checkpoint-args``, a heterogeneous model's file), and sizes
    that Megatron demands and are missing, are left to Megatron.

    Raises:
        ConfigError: see :func:`kha_megatron.model.rules.check_layout`.
    """
    needed = (args.num_layers, args.hidden_size, args.num_attention_heads)
    elsewhere = args.use_checkpoint_args or args.heterogeneous_layers_config_path
    elsewhere = elsewhere or args.heterogeneous_layers_config_encoded_json
    if elsewhere or (not all(needed) and not args.hybrid_layer_pattern):
        return
    check_layout(
        _model(args),
        _layout(args),
        _batch(args),
        fp8=args.fp8_recipe if args.fp8 else None,
    )


def _model(args: argparse.Namespace) -> Model:
    hybrid = bool(args.hybrid_layer_pattern)
    ffn = args.ffn_hidden_size
    if ffn is None:
        ffn = int(args.hidden_size * 8 / 3 / 64) * 64 if args.swiglu else 4 * args.hidden_size
    head_dim = args.qk_head_dim if args.multi_latent_attention else args.kv_channels
    padded = args.padded_vocab_size
    return Model(
        num_layers=None if hybrid else args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=(
            args.num_query_groups if args.group_query_attention else args.num_attention_heads
        ),
        kv_channels=head_dim or args.hidden_size // args.num_attention_heads,
        ffn_hidden_size=None if hybrid else ffn,
        num_experts=args.num_experts or None,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size or ffn,
        moe_shared_expert_intermediate_size=args.moe_shared_expert_intermediate_size,
        moe_layers=() if hybrid else moe_pattern(args.moe_layer_freq, args.num_layers),
        vocab_size=padded,
        vocab_padding=0 if padded else args.make_vocab_size_divisible_by,
        attention_output_gate=args.attention_output_gate,
        tied_keys=args.kha_attention == "gta",
        latents=_latents(args) if args.multi_latent_attention else (),
        latent_width=args.kv_lora_rank if args.multi_latent_attention else None,
        latent_heads=args.kha_latent_heads if args.kha_attention == "gla" else 1,
    )


def _latents(args: argparse.Namespace) -> tuple[tuple[str, int], ...]:
    cut = args.transformer_impl != "transformer_engine" or args.mla_down_proj_fusion
    return latents(
        args.q_lora_rank, args.kv_lora_rank, args.qk_pos_emb_head_dim, down_projections_cut=cut
    )


def _layout(args: argparse.Namespace) -> Layout:
    pp = args.pipeline_model_parallel_size
    stages = _stages(args.pipeline_model_parallel_layout)
    vpp = args.num_virtual_stages_per_pipeline_rank
    if stages is not None:
        vpp = len(stages) // pp
    elif args.num_layers_per_virtual_pipeline_stage:
        vpp = _virtual_stages(args, pp)
    sharded = (
        args.tensor_parallel_num_weight_shards or args.expert_tensor_parallel_num_weight_shards
    )
    return Layout(
        # sharding weights further takes ranks of its own, which Megatron counts itself
        world_size=None if sharded else args.world_size,
        tp=args.tensor_model_parallel_size,
        pp=pp,
        vpp=vpp if vpp and vpp > 1 else None,
        cp=args.context_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size,
        sequence_parallel=args.sequence_parallel,
        overlap_p2p=args.overlap_p2p_comm,
        microbatch_group=args.microbatch_group_size_per_vp_stage,
        first_stage_layers=args.decoder_first_pipeline_num_layers,
        last_stage_layers=args.decoder_last_pipeline_num_layers,
        embedding_as_layer=args.account_for_embedding_in_pipeline_split,
        loss_as_layer=args.account_for_loss_in_pipeline_split,
        stages=stages,
    )


def _virtual_stages(args: argparse.Namespace, pp: int) -> int | None:
    """How many there are where ``--num-layers-per-virtual-pipeline-stage`` gives their size."""
    size = args.num_layers_per_virtual_pipeline_stage
    extra = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    layers, rest = divmod((args.num_layers or 0) + extra, pp)
    if rest:
        return None  # the layers do not even fill the ranks, which is said first
    if layers % size:
        legal = [n for n in range(1, layers + 1) if layers % n == 0]
        raise ConfigError(
            f"{layers} layers on a pipeline rank cannot be divided into virtual stages of {size}: "
            f"choose --num-layers-per-virtual-pipeline-stage from {legal}"
        )
    return layers // size


def _stages(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    try:
        stages = PipelineParallelLayerLayout.parse_str_to_list(text)
    except AssertionError as error:
        raise ConfigError(f"--pipeline-model-parallel-layout {text}: {error}") from None
    return tuple("".join(letters[layer.name] for layer in stage) for stage in stages)


def _batch(args: argparse.Namespace) -> Batch | None:
    length = args.seq_length or args.encoder_seq_length
    if not length or not args.micro_batch_size:
        return None
    # Megatron rounds a batch that may shrink, and says so
    whole = args.global_batch_size and not args.decrease_batch_size_if_needed
    return Batch(
        seq_length=length,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size if whole else None,
    )
