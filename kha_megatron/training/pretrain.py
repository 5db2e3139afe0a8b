"""Pre-training loop, based on ``megatron.training.pretrain``.

Note: call :func:`kha_megatron.training.arguments.choose_device` before importing this module.
"""

import argparse
import atexit
import json
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, set_startup_timestamps
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args, parse_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from torch import Tensor

from kha_megatron.announcements import announce, is_first_rank
from kha_megatron.checkpoint.ownership import Ownership, claim
from kha_megatron.checkpoint.reading import MAX_JSON_BYTES, read_regular
from kha_megatron.checkpoint.tracker import is_object_store
from kha_megatron.errors import ConfigError, DataError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.mcore import cpu, patches
from kha_megatron.mcore.attention import describe_model
from kha_megatron.mcore.balancing import balance_experts
from kha_megatron.mcore.building import model_config
from kha_megatron.mcore.finite import stop_before_non_finite_steps
from kha_megatron.mcore.instruments import watch_heads
from kha_megatron.mcore.knocking import MechanismWeight
from kha_megatron.mcore.step_folding import fold_once_per_step
from kha_megatron.training.arguments import (
    add_kha_arguments,
    check_args,
    check_middle_stages,
    check_restored_sizes,
    set_layer_pattern,
)
from kha_megatron.training.expert_load import report_expert_load
from kha_megatron.training.first_rank import compute_on_first_rank
from kha_megatron.training.perturbation import perturb_after_load, perturb_embedding
from kha_megatron.training.recovery import (
    explain_failures,
    protect_children,
    wait_for_repaired_tracker,
)
from kha_megatron.training.resume import (
    Start,
    check_model_class,
    check_same_state,
    choose_kha,
    choose_start,
    is_upcycled,
    loads_fp8_scales,
    object_store,
    vocabulary_size,
)
from kha_megatron.training.saving import (
    check_optimizer_of_experts,
    make_saves_safe,
    remove_partial_saves,
)
from kha_megatron.training.scalars import write_scalars
from kha_megatron.training.speed import log_speed
from kha_megatron.training.timed_saves import keep_release, save_by_time
from kha_megatron.training.weights import stop_on_non_finite_weights

_SPIKY_LOSS_FACTOR = 10
"""A loss is a spike if it exceeds the largest loss so far times this, as in pretrain_gpt.py."""

_BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def run(program_start: float) -> None:
    """Train a model with the arguments in ``sys.argv``.

    Megatron's arguments are parsed twice. The first time, they are not validated, so that rank 0
    can choose a checkpoint, whose arguments complete them.
    """
    set_startup_timestamps(program_start=program_start, main_entry=time.time())
    protect_children()
    _patch_megatron()
    parsed_args = parse_args(add_kha_arguments)
    check_args(parsed_args)
    patches.let_learning_rate_change(keep=parsed_args.use_checkpoint_opt_param_scheduler)

    start = _prepare_directories(parsed_args)
    kha = choose_kha(start, parsed_args)
    patches.load_from_either(scales=loads_fp8_scales(start, parsed_args))
    args = _validate(parsed_args, start, kha)
    _configure_saves(args)
    if args.log_throughput:
        log_speed()
    check_same_state(start, args)
    # the checkpoint's arguments record the resolved values
    args.vocab_size = vocabulary_size(start, parsed_args, get_tokenizer().vocab_size)
    vars(args).update(kha.to_entries(multi_latent=args.multi_latent_attention))

    upcycled_path = start.path if is_upcycled(start, parsed_args, kha) else None
    config = _model_config(
        args,
        kha,
        upcycled_path=upcycled_path,
        is_pretrained=start.is_pretrained,
    )
    with explain_failures(args):
        pretrain(
            pretrain_cfg_container_from_args(args, config),
            _build_datasets,
            ModelType.encoder_or_decoder,
            _forward_step,
        )
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _patch_megatron() -> None:
    """Apply the patches that do not depend on arguments. Each one explains itself."""
    patches.use_shipped_dataset_helpers()
    patches.let_distributed_optimizer_resume()
    patches.save_all_optimizer_states()
    patches.load_latent_gpt_checkpoints()
    patches.fix_saved_padding()
    patches.share_embedding_with_mtp()
    patches.let_adams_exchange_states()
    patches.share_saved_steps()
    patches.let_fsdp2_resume()
    patches.match_fsdp2_parameters()
    patches.ignore_saved_strides()
    patches.log_first_iteration_once()
    patches.build_output_layer_without_apex()
    if cpu.is_installed():
        patches.use_forked_writers()
        patches.skip_fusion_warm_up()


def _prepare_directories(args: argparse.Namespace) -> Start:
    """Claim ``--save`` and choose the checkpoint to start from. Errors of rank 0 end all ranks."""
    ownership: Ownership | None = None

    def claim_and_choose() -> dict[str, Any]:
        nonlocal ownership
        ownership = _claim_save(args)
        return choose_start(args).to_dict()

    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    start = Start.from_dict(compute_on_first_rank(claim_and_choose, timeout))
    if start.is_tracker_repaired and not is_first_rank():
        wait_for_repaired_tracker(args)
    make_saves_safe(ownership)
    return start


def _claim_save(args: argparse.Namespace) -> Ownership | None:
    """On rank 0, claim ``--save``, so that no other run writes to it until this run exits."""
    if not args.save or is_object_store(args.save) or not is_first_rank():
        return None
    ownership = claim(Path(args.save))
    atexit.register(ownership.release)
    remove_partial_saves(Path(args.save))
    return ownership


def _validate(
    parsed_args: argparse.Namespace, start: Start, kha: HeadsConfig
) -> argparse.Namespace:
    """Let Megatron complete and validate the arguments, with ours in between."""
    pattern_is_saved = not parsed_args.hybrid_layer_pattern

    def complete(args: argparse.Namespace) -> None:
        set_layer_pattern(args, pattern_is_saved=pattern_is_saved)
        check_model_class(start, args)
        check_restored_sizes(args, kha)

    patches.change_arguments(complete)
    defaults = {"tokenizer_type": "NullTokenizer"} if parsed_args.mock_data else {}
    args = parse_and_validate_args(add_kha_arguments, args_defaults=defaults)
    check_middle_stages(args)
    # masks that are just causal are not part of the data
    args.create_attention_mask_in_dataloader = args.reset_attention_mask
    if start.is_pretrained:  # Megatron would continue with the optimizer of a GPTModel
        args.no_load_optim = True
    return args


def _configure_saves(args: argparse.Namespace) -> None:
    if args.ckpt_format != "torch_dist":  # other formats have no hashes
        args.verify_integrity = False
    remote = object_store(args)
    if args.verify_integrity and remote:
        announce(f"Writing and checking no hashes in the object store of {remote}.")
        args.verify_integrity = False
    if args.save and args.save_interval_in_mins:
        save_by_time(args.save_interval_in_mins)
    keep_release(args)


def _model_config(
    args: argparse.Namespace,
    kha: HeadsConfig,
    *,
    upcycled_path: str | None,
    is_pretrained: bool,
) -> Any:
    """Build Megatron's model config and register our hooks on the unwrapped model."""
    config = model_config(args, kha)

    def prepare(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
        announce(describe_model(models, kha))
        if args.kha_fold_linear:
            fold_once_per_step(models, kha)
        if upcycled_path:
            announce(
                f"Starting a new run with the weights of {upcycled_path}. The shared matrices "
                "start at the identity."
            )
            _keep_initial_mechanisms(models)
        if args.kha_perturb_embedding:
            _perturb_embedding(models, args, is_pretrained=is_pretrained)
        if args.moe_router_enable_expert_bias:
            _balance_experts(models, args)
        check_optimizer_of_experts(models, args)
        stop_on_non_finite_weights(models, args)
        if args.check_for_nan_in_loss_and_grad:  # must wrap the update of expert biases
            stop_before_non_finite_steps(models)
        if args.kha_log_interval:
            _watch_heads(models, args, kha)
        return models

    config.pre_wrap_hooks.append(prepare)
    return config


def _keep_initial_mechanisms(models: list[torch.nn.Module]) -> None:
    for model in models:
        for module in model.modules():
            if isinstance(module, MechanismWeight):
                module.keep_at_next_load()


def _perturb_embedding(
    models: list[torch.nn.Module],
    args: argparse.Namespace,
    *,
    is_pretrained: bool,
) -> None:
    if not is_pretrained:
        perturb_embedding(models, args.kha_perturb_embedding, args.seed)
        return
    if args.use_torch_fsdp2 or args.use_megatron_fsdp:
        raise ConfigError(
            "--kha-perturb-embedding (compare --null) does not support --pretrained-checkpoint and "
            "FSDP together. Use --use-distributed-optimizer instead."
        )
    perturb_after_load(models, args.kha_perturb_embedding, args.seed)


def _balance_experts(models: list[torch.nn.Module], args: argparse.Namespace) -> None:
    # a replayed graph of a full iteration calls no Python code
    can_report = args.cuda_graph_impl != "full_iteration"
    balance_experts(
        models,
        update="rms" if args.moe_router_bias_update_rms else "sign",
        report=report_expert_load if can_report else None,
    )


def _watch_heads(models: list[torch.nn.Module], args: argparse.Namespace, kha: HeadsConfig) -> None:
    watch_heads(
        models,
        kha,
        interval=args.kha_log_interval,
        iteration=lambda: get_args().curr_iteration + 1,
        write=write_scalars,
    )
    if args.cuda_graph_impl != "none":
        announce("--kha-log-interval logs only the matrices with CUDA graphs.")


def _build_datasets(num_samples: list[int], vp_stage: int | None = None) -> Any:
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path:
        file = Path(args.per_dataset_sequences_path)
        sequences_per_dataset = json.loads(read_regular(file, MAX_JSON_BYTES))
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequences_per_dataset=sequences_per_dataset,
    )

    def is_built_on_rank() -> bool:
        if mpu.get_tensor_model_parallel_rank() != 0:
            return False
        return is_first_or_last_pipeline_stage(vp_stage)

    dataset_class = MockGPTDataset if args.mock_data else GPTDataset
    builder = BlendedMegatronDatasetBuilder(dataset_class, num_samples, is_built_on_rank, config)
    return builder.build()


_build_datasets.is_distributed = True  # type: ignore[attr-defined]  # all ranks call it


def _get_batch(data_iterator: Any, vp_stage: int | None, micro_batch_size: int) -> list[Any]:
    """Get this rank's tokens, labels, loss mask, attention mask and position ids."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return [None] * len(_BATCH_KEYS)
    args = get_args()
    batch: dict[str, Tensor | None] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        sample = next(data_iterator)
        _check_token_ids(sample)
        for key in _BATCH_KEYS:
            tensor = sample.get(key)
            batch[key] = None if tensor is None else tensor.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=bool(args.mtp_num_layers) and mpu.is_pipeline_last_stage(),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch.setdefault("cu_seqlens", None)  # None for plain sequences
    batch = get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )
    return [batch.get(key) for key in _BATCH_KEYS]


def _check_token_ids(sample: dict[str, Tensor]) -> None:
    """Raise DataError for ids that would silently train the padding rows of the embedding."""
    args = get_args()
    vocab_size = max(get_tokenizer().vocab_size, args.vocab_size or 0)
    largest_id = max(int(sample[key].max()) for key in ("tokens", "labels"))
    if largest_id >= vocab_size:
        raise DataError(
            f"The data contains token id {largest_id}, but the vocabulary has {vocab_size} tokens. "
            "Train with the tokenizer that the data was prepared with."
        )


def _loss(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum the loss over this rank's tokens. Returns the sum, token count, and both for logging."""
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * loss_mask)
    num_tokens = loss_mask.sum().detach().to(torch.int)
    _check_loss(loss)
    report = torch.cat([loss.detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def _check_loss(loss: Tensor) -> None:
    """Let Megatron's rerun state machine check for NaN, Inf (both fatal) and spikes."""
    args = get_args()
    rerun = get_rerun_state_machine()

    def check(problem: str, is_rejected: Callable[[Any], Any], *, is_fatal: bool) -> None:
        rerun.validate_result(
            result=loss,
            rejection_func=is_rejected,
            message=f"found {problem} in the loss of this rank",
            tolerance=0.0,
            fatal=is_fatal,
        )

    if args.check_for_nan_in_loss_and_grad:
        check("NaN", torch.isnan, is_fatal=True)
        check("Inf", torch.isinf, is_fatal=True)
    if args.check_for_spiky_loss:
        is_spike = partial(
            rerun.is_unexpectedly_large,
            threshold=_SPIKY_LOSS_FACTOR,
            context="loss",
        )
        check("a spike", is_spike, is_fatal=False)


def _forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    args = get_args()
    micro_batch_size = args.micro_batch_size if model.training else args.eval_micro_batch_size
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    batch = _get_batch(data_iterator, vp_stage, micro_batch_size)
    tokens, labels, loss_mask, attention_mask, position_ids = batch
    timers("batch-generator").stop()
    # with --overlap-moe-expert-parallel-comm, Megatron runs the forward pass itself
    forward = model.build_schedule_plan if return_schedule_plan else model
    output = forward(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, partial(_loss, loss_mask)
