"""All functions of Megatron that we replace.

Each docstring says why, what upstream knows about it, and when the function here can be removed.
Nothing is replaced before the function here is called.

The CPU runtime (:mod:`kha_megatron.mcore.cpu`) replaces functions of PyTorch instead, because they
must be replaced before Megatron is imported.

Upstream pull request 5610 adds callbacks to Megatron's training loop, e.g. ``on_train_step_end``
and ``on_log``. Neither 0.19.2 nor the main branch of 22 August 2026 contains it.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from kha_megatron.mcore.patching import patch

LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Parameters of Llama 3 RoPE scaling without a Megatron argument, and their defaults there."""

Wrapper = Callable[..., Any]
"""Called in place of a function, with the function itself as an additional first argument."""

# Building models


def support_sequence_parallel_final_norm() -> None:
    """Build a final norm that supports sequence parallelism if a GPTModel has local modules.

    A layer spec cannot select the final norm, so this is needed for ``--spec``.

    Upstream: no issue known.
    Remove: with GPTModel.
    """
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from kha_megatron.mcore.local_modules import TorchNorm

    if transformer_block.LayerNormImpl is WrappedTorchNorm:
        transformer_block.LayerNormImpl = TorchNorm


def build_mtp_without_te() -> None:
    """Fix building multi-token prediction in Megatron 0.20 if Transformer Engine is missing.

    Megatron passes two subclasses of Transformer Engine's layers to ``isinstance``. They are mocks
    instead of classes if Transformer Engine is missing.

    Upstream: no issue known. The check is in the main branch of 22 August 2026, but not in 0.19.
    Remove: when upstream's check passes without Transformer Engine.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.transformer import multi_token_prediction

    check = "is_inference_column_parallel_linear"
    if not HAVE_TE and hasattr(multi_token_prediction, check):
        setattr(multi_token_prediction, check, lambda module: False)


@functools.cache  # once per process
def build_output_layer_without_apex() -> None:
    """Disable gradient accumulation fusion in Megatron's own linear layers if apex is missing.

    With Transformer Engine, the output layer is the only one of them. All others are Transformer
    Engine's, which does not need apex for the fusion, but Megatron has one setting for both.

    Upstream: no issue known.
    Remove: when Megatron's linear layers no longer need apex for the fusion.
    """
    from megatron.core.tensor_parallel import layers

    if layers._grad_accum_fusion_available:
        return

    @patch(layers.ColumnParallelLinear, "__init__")
    def build_unfused(build: Any, self: Any, *args: Any, config: Any, **kwargs: Any) -> None:
        unfused = copy.copy(config)
        unfused.gradient_accumulation_fusion = False
        build(self, *args, config=unfused, **kwargs)
        self.config = config


def share_embedding_with_mtp() -> None:
    """Build no output weight next to multi-token prediction (MTP) if embeddings are tied.

    The last pipeline stage then has a copy of the embedding, which is also its output weight.
    Megatron builds another output weight, which is never used, and refuses to save it.

    Upstream: no issue known. The main branch of 22 August 2026 is not fixed.
    Remove: when a model with tied embeddings, MTP and pipeline parallelism can be saved without it.
    """
    from megatron.core.models.common.language_module.language_module import LanguageModule

    @patch(LanguageModule, "setup_embeddings_and_output_layer")
    def remove_unused_weight(set_up: Any, self: Any) -> None:
        if self.share_embeddings_and_output_weights and getattr(self, "mtp_process", False):
            self.output_layer.weight = None
        set_up(self)


_TOKEN_COUNTERS = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")
"""Buffers of Megatron's router. ``ga_steps`` counts microbatches for ``global_aux_loss``."""


@functools.cache  # once per process
def count_tokens_in_integers() -> None:
    """Count the tokens of each expert in int64.

    Megatron registers these counters as float32 buffers, so ``Float16Module`` casts them to
    bfloat16 or float16. Bfloat16 cannot hold all integers above 256, and float16 overflows at
    65,520.

    Upstream: pull request 7081 fixes this for expert biases.
    Remove: when ``compat.OLDEST`` contains the fix, also for the counters of ``global_aux_loss``.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    @patch(TopKRouter, "__init__")
    def build_with_integers(build: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        for name in _TOKEN_COUNTERS:
            counter = getattr(self, name, None)
            if counter is not None:
                setattr(self, name, counter.long())


def scale_rope(args: Any) -> None:
    """Set all parameters of Llama 3 RoPE scaling.

    Megatron uses defaults for most of them. HybridModel does not pass any, and would ignore
    ``--use-rope-scaling``.

    Upstream: issue 6305 is about the factor in a GPTModel.
    Remove: when HybridModel passes all parameters from arguments.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    parameters = {}
    for name, default in LLAMA3_ROPE.items():
        value = getattr(args, f"rope_{name}", None)
        parameters[name] = value or default
    _replace_defaults(
        RotaryEmbedding._apply_scaling,
        factor=args.rope_scaling_factor,
        **parameters,
    )
    _replace_defaults(
        RotaryEmbedding.__init__,
        # latent attention builds its own RoPE, for which Megatron ignores --use-rope-scaling
        rope_scaling=args.use_rope_scaling and not args.multi_latent_attention,
        rope_scaling_factor=args.rope_scaling_factor,
    )


def _replace_defaults(function: Any, **new_defaults: Any) -> None:
    """Change the default values of some parameters of a function."""
    defaults = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is not parameter.empty:
            defaults[parameter.name] = parameter.default
    defaults |= new_defaults
    function.__defaults__ = tuple(defaults.values())


# Loading checkpoints


def load_latent_gpt_checkpoints() -> None:
    """Load GPTModel checkpoints with latent attention (``+``) into a HybridModel.

    Megatron only knows ``*`` there, although both have the attention's tensors under the same
    names.

    Upstream: no issue known. The main branch of 22 August 2026 is not fixed.
    Remove: when ``gpt_compatible_layer_maps`` accepts ``+``.
    """
    from megatron.core.dist_checkpointing import gpt_checkpoint_interop

    @patch(gpt_checkpoint_interop, "gpt_compatible_layer_maps")
    def map_latent_layers(get_maps: Any, pattern: str) -> Any:
        return get_maps(pattern.replace("+", "*"))


def load_from_either(*, scales: bool) -> None:
    """Load local checkpoints with Transformer Engine, and vice versa.

    Norms have another name if they are fused. ``scales`` also loads the FP8 state
    (``_extra_state``), which only delayed scaling needs.

    Upstream: no issue known. Layer specs only rename the norms of a few modules.
    Remove: when local modules and Transformer Engine save norms under the same names.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
    from megatron.core.dist_checkpointing.mapping import (
        LocalNonpersistentObject,
        ShardedObject,
        ShardedTensor,
    )

    from kha_megatron.checkpoint.megatron import other_names

    @patch(dist_checkpointing, "load")
    def load_renamed(load: Any, state: Any, directory: Any, *args: Any, **kwargs: Any) -> Any:
        stored_names = _stored_names(str(directory))

        def rename(entry: Any) -> Any:
            if isinstance(entry, ShardedObject) and entry.key.endswith("_extra_state"):
                return entry if scales else LocalNonpersistentObject(None)
            if isinstance(entry, ShardedTensor) and entry.key not in stored_names:
                for name in other_names(entry.key):
                    if name in stored_names:
                        entry.key = name
                        break
            return entry

        renamed_state = dict_list_map_outplace(rename, state)
        return load(renamed_state, directory, *args, **kwargs)


def _stored_names(directory: str) -> set[str]:
    """Return the names of all tensors and objects in a checkpoint. Must be called on all ranks.

    Only rank 0 reads ``.metadata``, which takes seconds for a large model.
    """
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

    names: set[str] = set()
    read_error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            names = set(load_sharded_metadata(directory))
        except Exception as error:  # otherwise, the other ranks would wait
            read_error = error
    broadcast: list[Any] = [names, read_error]
    dist.broadcast_object_list(broadcast, src=0)
    names, read_error = broadcast
    if read_error is not None:
        raise read_error
    return names


@functools.cache  # once per process
def ignore_saved_strides() -> None:
    """Load checkpoints strictly that torch 2.15 has written.

    Since torch 2.15, a checkpoint's metadata contains the strides of each tensor. Megatron passes
    all properties to ``torch.empty``, which has no such argument.

    Upstream: no issue known. The main branch of 22 August 2026 is not fixed.
    Remove: when Megatron ignores ``strides``.
    """
    from megatron.core.dist_checkpointing.strategies.torch import (
        TorchDistLoadShardedStrategy,
        _get_filesystem_reader,
    )

    @patch(TorchDistLoadShardedStrategy, "load_tensors_metadata")
    def load_without_strides(
        load: Any,
        self: Any,
        checkpoint_dir: Any,
        metadata: Any = None,
    ) -> Any:
        if metadata is None:
            metadata = _get_filesystem_reader(checkpoint_dir).read_metadata()
        for stored in metadata.state_dict_metadata.values():
            properties = getattr(stored, "properties", None)
            if properties:
                vars(properties).pop("strides", None)
        return load(self, checkpoint_dir, metadata)


# Saving and loading optimizers


@functools.cache  # once per process
def let_distributed_optimizer_resume() -> None:
    """Fix resuming with DistributedOptimizer in float32 or with ``torch.optim.Adam``.

    In float32, Megatron copies into parameters in place, which autograd does not allow. The other
    fixes are needed because Megatron assumes the Adam of Transformer Engine or apex: its state must
    exist before the first step, all parameters share one ``step`` tensor, and ``step`` is looked up
    in a dict that does not have it.

    Upstream: no issue known.
    Remove: when a float32 run with ``torch.optim.Adam`` resumes without it.
    """
    import torch
    from megatron.core.optimizer import distrib_optimizer

    optimizer_class = distrib_optimizer.DistributedOptimizer
    uses_torch_adam = not distrib_optimizer.HAVE_APEX_OR_TE

    @patch(optimizer_class, "_set_main_param_and_optimizer_states")
    @torch.no_grad()
    def set_in_place(set_states: Any, self: Any, param: Any, tensors: dict[str, Any]) -> None:
        if uses_torch_adam:
            tensors = tensors | {"step": None}  # Megatron looks it up, but does not copy None
        set_states(self, param, tensors)

    if not uses_torch_adam:
        return

    @patch(optimizer_class, "state_dict")
    def create_and_get_state(state_dict: Any, self: Any) -> Any:
        if self.optimizer is not None:
            _create_adam_state(self.optimizer)
        return state_dict(self)

    @patch(optimizer_class, "load_state_dict")
    def load_with_own_steps(load_state_dict: Any, self: Any, loaded: Any) -> None:
        load_state_dict(self, loaded)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].detach().clone()


@functools.cache  # once per process
def save_all_optimizer_states() -> None:
    """Save optimizer state before the first step as well, and let SGD resume.

    Megatron creates missing state when loading, but not when saving. If all steps so far were
    skipped, e.g. because of a large loss scale, the checkpoint has no state, and loading ends in a
    KeyError. For SGD, Megatron does not create any state, and loading ends in a TypeError.
    DistributedOptimizer is not affected, see :func:`let_distributed_optimizer_resume`.

    Upstream: no issue known.
    Remove: when Megatron creates missing state in both cases, also for SGD.
    """
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    for optimizer_class in (FP32Optimizer, Float16OptimizerWithFloat16Params):

        @patch(optimizer_class, "sharded_state_dict")
        def create_and_build(
            build: Any, self: Any, model_state: Any, is_loading: bool = False, **kwargs: Any
        ) -> Any:
            if self.init_state_fn is None:
                self.init_state_fn = _create_momentum
            is_missing = self.optimizer is not None and not self.optimizer.state
            if is_missing and not is_loading:
                _create_state(self)
            return build(self, model_state, is_loading, **kwargs)


def _create_state(optimizer: Any) -> None:
    """Create the state of all parameters that have none. ``optimizer`` is one of Megatron's."""
    import torch

    if isinstance(optimizer.optimizer, torch.optim.Adam):
        _create_adam_state(optimizer.optimizer)  # Megatron's function creates no step
    else:
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)


def _create_momentum(sgd: Any, config: Any = None) -> None:
    """Create the momentum of all parameters that have none."""
    import torch

    for group in sgd.param_groups:
        if not group["momentum"]:
            continue
        for param in group["params"]:
            sgd.state[param].setdefault("momentum_buffer", torch.zeros_like(param))


def _create_adam_state(adam: Any) -> None:
    """Create the state of all parameters that have none, as the first step would do."""
    import torch

    for group in adam.param_groups:
        for param in group["params"]:
            if not adam.state[param]:
                adam.state[param].update(
                    step=torch.tensor(0.0),
                    exp_avg=torch.zeros_like(param),
                    exp_avg_sq=torch.zeros_like(param),
                )


def fix_saved_padding() -> None:
    """Zero the padding of optimizer buckets before saving them, and cut it off at their end.

    Megatron saves uninitialized memory there, so checkpoints of identical runs would differ. If a
    bucket's padding reaches beyond the end that is saved, e.g. with multi-token prediction and
    pipeline parallelism, saving ends in "out of bounds chunk".

    Upstream: pull requests 5898 and 6191 (open) are about padding at the end of buckets.
    Remove: when saved padding is always zero and within bounds.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    @patch(DistributedOptimizer, "sharded_param_state_dp_reshardable")
    def build_with_zeros(build: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        state = build(self, *args, **kwargs)
        for buffer in range(len(self.gbuf_ranges)):
            for padding_part in _find_padding(state[buffer]):
                for value in padding_part.values():
                    if isinstance(value, ShardedTensor):
                        _zero_padding(value)
        return state


def _find_padding(buffer_state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Iterate over those parts of all buckets that belong to no parameter."""
    for buckets in buffer_state.values():  # one list for each dtype
        for bucket in buckets:
            for part in bucket:
                if part["padding"].unwrap():
                    yield part


def _zero_padding(padding: Any) -> None:
    """Zero a tensor of padding, and cut it off at the end of the saved bucket."""
    (size,) = padding.global_shape
    (start,) = padding.global_offset
    padding.data = padding.data[: size - start].zero_()
    padding.local_shape = tuple(padding.data.shape)


def let_adams_exchange_states() -> None:
    """Make Adam states of torch and Transformer Engine (or apex) interchangeable.

    Torch stores ``step`` per parameter, the other two store it per parameter group. If a setting
    is missing in a saved parameter group, the current value is used.

    Upstream: no issue known.
    Remove: when Megatron converts ``step`` itself.
    """
    import torch
    from megatron.core import optimizer

    uses_torch_adam = optimizer.USING_PYTORCH_OPTIMIZER

    @patch(_adam_class(), "load_state_dict")
    def load_from_either_adam(load: Any, self: Any, saved: Any) -> None:
        groups = []
        pairs = zip(self.param_groups, saved["param_groups"], strict=True)
        for current_group, saved_group in pairs:
            groups.append(current_group | saved_group)
        states = list(saved["state"].values())
        steps = []
        for group_or_state in groups + states:
            if "step" in group_or_state:
                steps.append(group_or_state.pop("step"))
        if states and not steps:
            steps.append(0)  # Megatron does not save a step of 0
        if steps:
            step = float(steps[0])
            if uses_torch_adam:
                for state in states:
                    state["step"] = torch.tensor(step)
            else:
                for group in groups:
                    group["step"] = int(step)
        load(self, saved | {"param_groups": groups})


def _adam_class() -> Any:
    import torch
    from megatron.core import optimizer

    return torch.optim.Adam if optimizer.USING_PYTORCH_OPTIMIZER else optimizer.Adam


def share_saved_steps() -> None:
    """Restore Adam's ``step`` for experts if the first pipeline stage has none.

    With expert parallelism, Megatron has a separate optimizer for experts. Rank 0 saves the steps
    of all optimizers, and its optimizer for experts has no step if it has no parameters. Resuming
    ends in a KeyError, or restarts the bias correction with the Adam of Transformer Engine.

    Upstream: no issue known. The main branch of 22 August 2026 is not fixed.
    Remove: when each optimizer's step is saved by a rank that has its parameters.
    """
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    @patch(ChainedOptimizer, "load_state_dict")
    def load_with_shared_step(load: Any, self: Any, state_dict: Any) -> None:
        if len(self.chained_optimizers) == len(state_dict) > 1:
            _share_step(self.chained_optimizers, state_dict)
        load(self, state_dict)


def _share_step(optimizers: list[Any], state_dict: Any) -> None:
    """Copy the step that some optimizers have to the parameter groups of the others."""
    shared_step = None
    groups_without_step: list[dict[str, Any]] = []
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer.optimizer, _adam_class()):
            continue
        saved = state_dict[index].get("optimizer", state_dict[index])
        groups = saved["param_groups"]
        saved_steps = [group["step"] for group in groups if "step" in group]
        if "common_step" in saved.get("state", {}):
            saved_steps.append(saved["state"]["common_step"])
        if saved_steps:
            shared_step = saved_steps[0]
        else:
            groups_without_step += groups
    if shared_step is not None:
        for group in groups_without_step:
            group["step"] = shared_step


def let_learning_rate_change(keep: bool) -> None:
    """Allow a run to resume with a different ``--lr`` or ``--min-lr``.

    Megatron looks up parameter groups in the checkpoint by values that include their learning
    rates, and does not find them if you change these. This patch ignores the learning rates of
    groups with the default schedule.

    Upstream: pull request 4705 has added the learning rates to these values.
    Remove: when Megatron ignores the learning rates of the default schedule.

    Args:
        keep (bool): Keep the checkpoint's learning rates instead of using the new ones
            (``--use-checkpoint-opt-param-scheduler``).
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    match_groups = MegatronOptimizer._filter_and_reorder_param_groups

    def align(current: Any, saved: Any) -> None:
        """Make the learning rates of current and saved parameter groups equal."""
        if keep:
            _copy_learning_rates(saved, current)
        else:
            _copy_learning_rates(current, saved)

    def aligned_match(current_groups: Any, state_dict_groups: Any) -> Any:
        align(current_groups, state_dict_groups)
        return match_groups(current_groups, state_dict_groups)

    @patch(DistributedOptimizer, "load_state_dict")
    def aligned_load(load: Any, self: Any, state_dict: Any) -> None:
        align(self.optimizer.param_groups, state_dict["optimizer"]["param_groups"])
        load(self, state_dict)

    MegatronOptimizer._filter_and_reorder_param_groups = staticmethod(aligned_match)


def _copy_learning_rates(source: Any, target: Any) -> None:
    """Copy the learning rates of the default schedule from some parameter groups to others."""
    source_groups = [group for group in source if group.get("default_config")]
    if not source_groups:
        return
    learning_rates = {}
    for name in ("max_lr", "min_lr"):
        if name in source_groups[0]:
            learning_rates[name] = source_groups[0][name]
    for group in target:
        if group.get("default_config"):
            group.update(learning_rates)


def let_fsdp2_resume() -> None:
    """Restore Adam's ``step`` when resuming with FSDP2 (Megatron drops it).

    Upstream: no issue known.
    Remove: when ``load_checkpoint`` restores ``step`` with FSDP2.
    """
    from megatron.training import checkpointing, training

    loaded_state: dict[str, Any] = {}  # the last checkpoint that was read

    @patch(checkpointing, "_load_base_checkpoint")
    def read_and_remember(read: Any, *args: Any, **kwargs: Any) -> Any:
        result = read(*args, **kwargs)
        state_dict = result[0]
        loaded_state.update(state_dict or {})
        return result

    @patch(training, "load_checkpoint")
    def load_with_step(load: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        loaded_state.clear()
        result = load(model, optimizer, *args, **kwargs)
        is_loaded_in_place = kwargs.get("skip_load_to_model_and_opt")  # set with FSDP2 only
        if is_loaded_in_place and "optimizer" in loaded_state:
            saved_optimizer = loaded_state["optimizer"]
            saved_adam = saved_optimizer.get("optimizer", saved_optimizer)
            first_optimizer = getattr(optimizer, "chained_optimizers", [optimizer])[0]
            _restore_step(first_optimizer.optimizer, saved_adam)
        loaded_state.clear()
        return result


def _restore_step(adam: Any, saved: dict[str, Any]) -> None:
    """Restore ``step`` of parameter groups or, for torch's Adam, of parameters."""
    pairs = zip(adam.param_groups, saved["param_groups"], strict=True)
    for group, saved_group in pairs:
        if "step" in saved_group:
            group["step"] = saved_group["step"]
    if "common_step" in saved["state"]:
        for state in adam.state.values():
            state["step"] = saved["state"]["common_step"].clone()


def match_fsdp2_parameters() -> None:
    """Match FSDP2's shards with the optimizer's parameters.

    Megatron compares the ``id()`` of local tensors. Since torch 2.14, ``DTensor.to_local()``
    returns a new object for a parameter, and saving ends in a KeyError.

    Upstream: no issue known. The main branch of 22 August 2026 is not fixed.
    Remove: when Megatron no longer compares local tensors by ``id()``.
    """
    from megatron.core.dist_checkpointing import optimizer
    from torch.distributed.tensor import DTensor

    @patch(optimizer, "to_local_if_dtensor")
    def get_local_tensor(to_local: Any, tensor: Any) -> Any:
        return tensor._local_tensor if isinstance(tensor, DTensor) else to_local(tensor)


# The training loop


def change_arguments(change: Callable[[Any], None]) -> None:
    """Call ``change(args)`` after reading ``--use-checkpoint-args``, before Megatron's checks.

    Upstream: no issue known. ``parse_and_validate_args`` has no hook between the two.
    Remove: when Megatron calls a hook there.
    """
    from megatron.training import arguments

    @patch(arguments, "validate_args")
    def change_and_validate(validate: Any, args: Any, *defaults: Any) -> Any:
        change(args)
        return validate(args, *defaults)


def log_first_iteration_once() -> None:
    """Do not count the first iteration of a run twice in Megatron's log.

    Megatron logs the first iteration in addition to every ``--log-interval`` iterations, and keeps
    its loss and time for the next line. If the first iteration is also the last of its interval,
    the next line would be a mean of two intervals.

    Upstream: issue 6237. Pull request 7092 prints the right loss. The callbacks of 5610 cannot
    replace this patch, because they do not change what Megatron prints.
    Remove: when ``compat.OLDEST`` contains 7092.
    """
    from megatron.training import get_args, training

    @patch(training, "training_log")
    def log_and_reset(log: Any, *args: Any, **kwargs: Any) -> Any:
        iteration = args[3]  # Megatron passes it by position
        if "is_first_iteration" in kwargs and iteration % get_args().log_interval == 0:
            kwargs["is_first_iteration"] = False
        return log(*args, **kwargs)


@functools.cache  # once per process
def unfold_before_gradient_reduction() -> None:
    """Call ``finish`` of a parameter's ``step_fold`` before DDP reduces its gradient.

    With ``overlap_grad_reduce``, DDP reduces a bucket as soon as it has the gradients of all its
    parameters. The matrices are not part of autograd's graph, so they are reported together with
    the weight into which they are folded.

    Upstream: no issue known. DDP has no callback between accumulation and reduction.
    Remove: when it has one.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    @patch(_ParamAndGradBucketGroup, "start_grad_sync")
    def finish_and_reduce(reduce: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        for bucket in self.buckets:
            for parameter in bucket.params_list:  # in the same order on all TP ranks
                if hasattr(parameter, "step_fold"):
                    parameter.step_fold.finish()
        reduce(self, *args, **kwargs)

    @patch(DistributedDataParallel, "_make_backward_post_hook")
    def make_hook(make: Any, self: Any, parameter: Any) -> Any:
        accumulate = make(self, parameter)
        fold = getattr(parameter, "step_fold", None)
        if fold is None or parameter is not fold.weight:
            return accumulate
        fold.uses_ddp = True
        if not self.ddp_config.overlap_grad_reduce:
            return accumulate

        def accumulate_and_report(*gradients: Any) -> None:
            accumulate(*gradients)
            for matrix in fold.matrices:
                bucket_group = self.param_to_bucket_group[matrix]
                bucket_group.register_grad_ready(matrix, self.force_all_reduce)

        return accumulate_and_report


def wrap_training_step(step: Wrapper) -> None:
    """Wrap ``train_step``, to stop a run that skips every step.

    See :mod:`kha_megatron.training.weights`.

    Upstream: pull request 5610 adds ``on_train_step_end``.
    Remove: when ``compat.OLDEST`` contains 5610, if the callback knows whether a step was skipped.
    """
    from megatron.training import training

    patch(training, "train_step")(step)


def wrap_throughput_report(report: Wrapper) -> None:
    """Wrap ``track_e2e_metrics``, to log speed and MFU.

    It is the only function that Megatron calls with the throughput. See
    :mod:`kha_megatron.training.speed`.

    Upstream: pull request 5610 adds ``on_log``.
    Remove: when ``compat.OLDEST`` contains 5610, if the callback knows the throughput.
    """
    from megatron.training import one_logger_utils

    patch(one_logger_utils, "track_e2e_metrics")(report)


def wrap_checkpoints(*, save: Wrapper, load: Wrapper) -> None:
    """Wrap ``save_checkpoint`` and ``load_checkpoint``, to keep NaN out of checkpoints.

    See :mod:`kha_megatron.training.weights`.

    Upstream: no issue known. Pull request 5610 adds no callbacks for saving and loading.
    Remove: when Megatron calls a hook before it saves and after it has loaded.
    """
    from megatron.training import training

    patch(training, "save_checkpoint")(save)
    patch(training, "load_checkpoint")(load)


def wrap_save_intervals(*, save: Wrapper, decide: Wrapper) -> None:
    """Wrap ``save_checkpoint_and_time`` and ``checkpoint_and_decide_exit``, to save by time.

    See :mod:`kha_megatron.training.timed_saves`.

    Upstream: no issue known. Megatron saves by time only to exit (``--exit-duration-in-mins``).
    Remove: when Megatron has an option to save by time.
    """
    from megatron.training import training

    patch(training, "save_checkpoint_and_time")(save)
    patch(training, "checkpoint_and_decide_exit")(decide)


# Writing checkpoints


def wrap_checkpoint_files(
    *,
    open_tracker: Wrapper,
    save: Wrapper,
    commit: Wrapper,
    write: Wrapper,
) -> None:
    """Wrap what writes the files of a checkpoint, so that a crash cannot damage any.

    See :func:`kha_megatron.training.saving.make_saves_safe`.

    Upstream: no issue known. Megatron writes to the final directory, and the tracker file in place.
    Remove: when Megatron renames complete checkpoints.

    Args:
        open_tracker: Wraps ``maybe_msc.open``, which opens the tracker file among others.
        save: Wraps ``dist_checkpointing.save``.
        commit: Wraps ``save_config``, which marks a checkpoint as complete.
        write: Wraps ``TorchDistSaveShardedStrategy.async_save``, which each rank calls.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.training import checkpointing

    patch(checkpointing.maybe_msc, "open")(open_tracker)
    patch(dist_checkpointing, "save")(save)
    patch(serialization, "save_config")(commit)
    patch(TorchDistSaveShardedStrategy, "async_save")(write)


def replace_integrity_manifest(write: Callable[..., Any], verify: Callable[..., Any]) -> None:
    """Replace how ``--verify-integrity`` writes and verifies hashes.

    Megatron lets rank 0 read all files of a checkpoint again and hash them. With
    :mod:`kha_megatron.checkpoint.integrity`, each rank hashes its own shards while writing them.

    Upstream: no issue known.
    Remove: when Megatron hashes shards where they are written.
    """
    from megatron.core.dist_checkpointing import serialization

    serialization.save_integrity_manifest = write
    serialization.verify_integrity_manifest = verify


def use_shipped_dataset_helpers() -> None:
    """Do not compile the dataset helpers if they were installed with Megatron's wheel.

    The wheel contains ``helpers_cpp``, but not its Makefile. Megatron would call ``make`` anyway
    and exit with an error.

    Upstream: no issue known.
    Remove: when Megatron only compiles helpers that are missing.
    """
    from megatron.core.datasets import utils

    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError:
        return
    utils.compile_helpers = lambda: None


# CPU only


def use_forked_writers() -> None:
    """Fork checkpoint writers instead of spawning them (CPU only).

    There are several problems with spawned writers on CPU: they import Megatron again (about 4 s),
    the CPU runtime is not installed in them, and they share memory with the CPU tensors, which
    training modifies while they are being saved.

    Upstream: not an issue there, because Megatron requires CUDA.
    Remove: with the CPU runtime.
    """
    from megatron.core.dist_checkpointing.strategies.async_utils import (
        AsyncCallsQueue,
        TemporalAsyncCaller,
    )
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    get_write_results_queue("fork")
    AsyncCallsQueue.warmup_persistent_caller = lambda *args, **kwargs: None
    AsyncCallsQueue._get_async_caller = lambda self: TemporalAsyncCaller()


def skip_fusion_warm_up() -> None:
    """Skip the warm-up of fused CUDA kernels (CPU only).

    It advances the RNG by an amount that depends on the parallel layout. Without the warm-up, the
    initial weights only depend on the seed.

    Upstream: not an issue there, because Megatron requires CUDA.
    Remove: with the CPU runtime.
    """
    from megatron.training import training

    training.set_jit_fusion_options = lambda *args, **kwargs: None
