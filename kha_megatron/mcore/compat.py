"""Version checks and workarounds for Megatron-Core 0.19 and 0.20.

All code that depends on the version of Megatron-Core is in this file. We support the versions from
:data:`OLDEST` to :data:`NEWEST`, and test the releases up to :data:`NEWEST_TESTED`.
"""

import copy
import ctypes
import functools
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata, util
from pathlib import Path
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.errors import MissingDependencyError, VersionError, install_command
from kha_megatron.mcore.patching import patch

OLDEST, NEWEST = (0, 19), (0, 20)
NEWEST_TESTED = (0, 19)
TESTED = "0.19.2 and the main branch of 22 August 2026 (0.20.0), with and without pull request 6313"
"""What the tests ran with. 0.20 has not been released."""
INSTALL = f"pip install 'megatron-core>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
"""Command that installs a supported version."""
BRIDGE = "0.6"
"""The supported version of Megatron-Bridge."""


def installed_version() -> str:
    """Get the version of Megatron-Core without importing it.

    Raises:
        VersionError: If Megatron-Core is not installed.
    """
    try:
        spec = util.find_spec("megatron.core")
        if spec and spec.submodule_search_locations:  # may be a checkout without metadata
            info = Path(spec.submodule_search_locations[0], "package_info.py")
            text = info.read_text() if info.is_file() else ""
            numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE)
            if len(numbers) == 3:
                return ".".join(numbers)
        return metadata.version("megatron-core")
    except ImportError:
        raise VersionError(f"megatron-core is not installed. Run `{INSTALL}`.") from None


@functools.cache
def check_version() -> str:
    """Check that the installed Megatron-Core version is supported, and return it.

    If no release of this version was tested, log a warning.

    Raises:
        VersionError: If Megatron-Core is missing or too old.
    """
    found = installed_version()
    major, minor, *_ = re.findall(r"\d+", found)
    release = int(major), int(minor)
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise VersionError(
            f"megatron-core>={oldest} is required, but {found} is installed. Run `{INSTALL}`."
        )
    if release > NEWEST_TESTED:
        announce(
            f"WARNING: megatron-core {found} is installed. kha_megatron was tested with {TESTED}.",
            once="megatron-core",
        )
    return found


@contextmanager
def megatron_imports() -> Iterator[None]:
    """Context manager for ``import megatron`` that raises VersionError instead of ImportError.

    This is needed because Megatron swallows an ImportError from the ``--spec`` module and then
    trains without the spec.
    """
    found = check_version()
    try:
        yield
    except ImportError as error:
        raise VersionError(
            f"megatron-core {found} is not compatible with kha_megatron ({error}). Run `{INSTALL}`."
        ) from error


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def bridge_imports() -> Iterator[None]:
    """Context manager for imports of ``megatron.bridge``. Checks the version first."""
    found = version_of("megatron-bridge")
    if found is None:
        raise MissingDependencyError("megatron-bridge", "kha_megatron.bridge", "bridge")
    if not f"{found}.".startswith(f"{BRIDGE}."):
        raise VersionError(
            f"megatron-bridge {found} is not supported. Run {install_command('bridge')} to install "
            f"version {BRIDGE}."
        )
    try:
        yield
    # Transformer Engine raises FileNotFoundError if its torch extension is not installed.
    except (ImportError, FileNotFoundError) as error:
        raise MissingDependencyError(
            f"Transformer Engine with its torch extension (import error: {error})",
            "Megatron-Bridge",
            "bridge,te",
        ) from error


def cuda_versions() -> str:
    """Describe the CUDA versions of torch and of NVIDIA's driver, for errors about devices."""
    import torch

    version, driver = ctypes.c_int(), "no driver (libcuda.so.1) is installed"
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        driver = f"the driver supports up to {version.value // 1000}.{version.value % 1000 // 10}"
    except OSError:
        pass
    built = f"needs CUDA {torch.version.cuda}" if torch.version.cuda else "was built without CUDA"
    return f"torch {torch.__version__} {built}, and {driver}"


@functools.cache  # find_spec cannot find the package once hide_incomplete_te has hidden it
def lacks_te_extension() -> bool:
    """Detect a Transformer Engine installation without the compiled PyTorch extension."""
    spec = util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        return False
    file = "transformer_engine_torch*.so"  # same locations as in Transformer Engine
    patterns = (file, f"transformer_engine/{file}", f"transformer_engine/wheel_lib/{file}")
    parents = Path(spec.origin).parents[1], Path(sysconfig.get_paths()["purelib"])
    return not any(any(parent.glob(pattern)) for parent in parents for pattern in patterns)


def hide_incomplete_te() -> None:
    """Hide Transformer Engine if its compiled extension is missing.

    Importing such an installation raises FileNotFoundError. Megatron only falls back to its local
    modules on an ImportError.
    """
    modules: dict[str, Any] = sys.modules
    if "transformer_engine" not in modules and lacks_te_extension():
        modules["transformer_engine"] = None  # makes `import` raise ImportError


def layer_symbol(config: Any) -> str | None:
    """Return the symbol of a hybrid layer (``*``, ``-``, ``E``, ...) from the layer's own config.

    Since upstream pull request 6313, ``HybridModel`` gives each layer a copy of the model's config,
    with a class for each symbol. For other configs, including a model's, return None.
    """
    from megatron.core.models.hybrid import hybrid_layer_allocation

    classes = vars(hybrid_layer_allocation).get("LAYER_SYMBOL_TO_CONFIG_CLASS", {})
    for symbol, layer_config_class in classes.items():
        if isinstance(config, layer_config_class):
            return symbol
    return None


def layer_symbols(
    layer_type_list: Sequence[str] | None, layer_config_list: Sequence[Any] | None
) -> list[str]:
    """Return the symbols of a pipeline stage's layers from the arguments of ``HybridStack``.

    ``HybridModel`` passes ``layer_config_list`` since upstream pull request 6313, and
    ``layer_type_list`` before.

    Raises:
        VersionError: If the layers are unknown, and therefore cannot be checked.
    """
    if layer_type_list is not None:
        return list(layer_type_list)
    symbols = [layer_symbol(config) for config in layer_config_list or ()]
    known_symbols = [symbol for symbol in symbols if symbol is not None]
    if layer_config_list is None or known_symbols != symbols:
        raise VersionError(
            f"kha_megatron cannot read the hybrid layers of megatron-core {installed_version()}. "
            f"Run `{INSTALL}`."
        )
    return known_symbols


def change_arguments(change: Callable[[Any], None]) -> None:
    """Call ``change(args)`` after reading ``--use-checkpoint-args``, before Megatron's checks."""
    from megatron.training import arguments

    @patch(arguments, "validate_args")
    def change_and_validate(validate: Any, args: Any, *defaults: Any) -> Any:
        change(args)
        return validate(args, *defaults)


def check_loads_gpt_checkpoint(pattern: str) -> None:
    """Raise ValueError if Megatron cannot load a GPTModel's checkpoint into these hybrid layers."""
    from megatron.core.dist_checkpointing import gpt_checkpoint_interop

    gpt_checkpoint_interop.gpt_compatible_layer_maps(pattern)


def load_latent_gpt_checkpoints() -> None:
    """Load GPTModel checkpoints with latent attention (``+``) into a HybridModel.

    Megatron only knows ``*`` there, although both have the attention's tensors under the same
    names (upstream's main is not fixed).
    """
    from megatron.core.dist_checkpointing import gpt_checkpoint_interop

    @patch(gpt_checkpoint_interop, "gpt_compatible_layer_maps")
    def map_latent_layers(get_maps: Any, pattern: str) -> Any:
        return get_maps(pattern.replace("+", "*"))


def use_shipped_dataset_helpers() -> None:
    """Do not compile the dataset helpers if they were installed with Megatron's wheel.

    The wheel contains ``helpers_cpp``, but not its Makefile. Megatron would call ``make`` anyway
    and exit with an error.
    """
    from megatron.core.datasets import utils

    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError:
        return
    utils.compile_helpers = lambda: None


def use_forked_writers() -> None:
    """Fork checkpoint writers instead of spawning them (CPU only).

    There are several problems with spawned writers on CPU: they import Megatron again (about 4 s),
    the CPU runtime is not installed in them, and they share memory with the CPU tensors, which
    training modifies while they are being saved.
    """
    from megatron.core.dist_checkpointing.strategies.async_utils import (
        AsyncCallsQueue,
        TemporalAsyncCaller,
    )
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    get_write_results_queue("fork")
    AsyncCallsQueue.warmup_persistent_caller = lambda *args, **kwargs: None
    AsyncCallsQueue._get_async_caller = lambda self: TemporalAsyncCaller()


@functools.cache  # once per process
def let_distributed_optimizer_resume() -> None:
    """Fix resuming with DistributedOptimizer in float32 or with ``torch.optim.Adam``.

    In float32, Megatron copies into parameters in place, which autograd does not allow. The other
    fixes are needed because Megatron assumes the Adam of Transformer Engine or apex: its state must
    exist before the first step, all parameters share one ``step`` tensor, and ``step`` is looked up
    in a dict that does not have it.
    """
    import torch
    from megatron.core.optimizer import distrib_optimizer

    optimizer_class = distrib_optimizer.DistributedOptimizer
    is_native = not distrib_optimizer.HAVE_APEX_OR_TE

    @patch(optimizer_class, "_set_main_param_and_optimizer_states")
    @torch.no_grad()
    def without_step(set_states: Any, self: Any, param: Any, tensors: dict[str, Any]) -> None:
        set_states(self, param, tensors | ({"step": None} if is_native else {}))

    if not is_native:
        return

    @patch(optimizer_class, "state_dict")
    def with_state(state_dict: Any, self: Any) -> Any:
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    if not self.optimizer.state[param]:
                        self.optimizer.state[param].update(
                            step=torch.tensor(0.0),
                            exp_avg=torch.zeros_like(param),
                            exp_avg_sq=torch.zeros_like(param),
                        )
        return state_dict(self)

    @patch(optimizer_class, "load_state_dict")
    def with_own_steps(load_state_dict: Any, self: Any, loaded: Any) -> None:
        load_state_dict(self, loaded)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].detach().clone()


def fix_saved_padding() -> None:
    """Zero the padding of optimizer buckets before saving them, and cut it off at their end.

    Megatron saves uninitialized memory there, so checkpoints of identical runs would differ. If a
    bucket's padding reaches beyond the end that is saved, e.g. with multi-token prediction and
    pipeline parallelism, saving ends in "out of bounds chunk" (upstream's main is not fixed).
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def fix(padding: Any) -> None:
        (size,), (start,) = padding.global_shape, padding.global_offset
        padding.data = padding.data[: size - start].zero_()
        padding.local_shape = tuple(padding.data.shape)

    @patch(DistributedOptimizer, "sharded_param_state_dp_reshardable")
    def build_with_zeros(build: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        state = build(self, *args, **kwargs)
        buffers = (state[index] for index in range(len(self.gbuf_ranges)))
        buckets = (bucket for buffer in buffers for dtype in buffer.values() for bucket in dtype)
        for entry in (entry for bucket in buckets for entry in bucket):
            for value in entry.values() if entry["padding"].unwrap() else ():
                if isinstance(value, ShardedTensor):
                    fix(value)
        return state


def share_embedding_with_mtp() -> None:
    """Build no output weight next to multi-token prediction (MTP) if embeddings are tied.

    The last pipeline stage then has a copy of the embedding, which is also its output weight.
    Megatron builds another output weight, which is never used, and refuses to save it (upstream's
    main is not fixed).
    """
    from megatron.core.models.common.language_module.language_module import LanguageModule

    @patch(LanguageModule, "setup_embeddings_and_output_layer")
    def remove_unused_weight(set_up: Any, self: Any) -> None:
        if self.share_embeddings_and_output_weights and getattr(self, "mtp_process", False):
            self.output_layer.weight = None
        set_up(self)


def let_adams_exchange_states() -> None:
    """Make Adam states of torch and Transformer Engine (or apex) interchangeable.

    Torch stores ``step`` per parameter, the other two store it per parameter group. If a setting
    is missing in a saved parameter group, the current value is used.
    """
    import torch
    from megatron.core import optimizer

    native = optimizer.USING_PYTORCH_OPTIMIZER

    @patch(_adam_class(), "load_state_dict")
    def load_from_either(load: Any, self: Any, saved: Any) -> None:
        pairs = zip(self.param_groups, saved["param_groups"], strict=True)
        groups = [own | group for own, group in pairs]
        states = saved["state"].values()
        steps = [holder.pop("step") for holder in (*groups, *states) if "step" in holder]
        for holder in (states if native else groups) if steps else ():
            holder["step"] = torch.tensor(float(steps[0])) if native else int(steps[0])
        load(self, saved | {"param_groups": groups})


def share_saved_steps() -> None:
    """Restore Adam's ``step`` for experts if the first pipeline stage has none.

    With expert parallelism, Megatron has a separate optimizer for experts. Rank 0 saves the steps
    of all optimizers, and its optimizer for experts has no step if it has no parameters. Resuming
    ends in a KeyError, or restarts the bias correction with the Adam of Transformer Engine
    (upstream's main is not fixed).
    """
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    @patch(ChainedOptimizer, "load_state_dict")
    def load_with_shared_step(load: Any, self: Any, state_dict: Any) -> None:
        if len(self.chained_optimizers) == len(state_dict) > 1:
            _share_step(self.chained_optimizers, state_dict)
        load(self, state_dict)


def _share_step(optimizers: list[Any], state_dict: Any) -> None:
    shared_step = None
    groups_without_step: list[dict[str, Any]] = []
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer.optimizer, _adam_class()):
            continue
        saved = state_dict[index].get("optimizer", state_dict[index])
        groups = saved["param_groups"]
        steps = [group["step"] for group in groups if "step" in group]
        if "common_step" in saved.get("state", {}):
            steps.append(saved["state"]["common_step"])
        if steps:
            shared_step = steps[0]
        else:
            groups_without_step += groups
    if shared_step is not None:
        for group in groups_without_step:
            group["step"] = shared_step


def _adam_class() -> Any:
    import torch
    from megatron.core import optimizer

    return torch.optim.Adam if optimizer.USING_PYTORCH_OPTIMIZER else optimizer.Adam


def let_learning_rate_change(keep: bool) -> None:
    """Allow a run to resume with a different ``--lr`` or ``--min-lr``.

    Megatron looks up parameter groups in the checkpoint by values that include their learning
    rates, and does not find them if you change these. This patch ignores the learning rates of
    groups with the default schedule.

    Args:
        keep (bool): Keep the checkpoint's learning rates instead of using the new ones
            (``--use-checkpoint-opt-param-scheduler``).
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    match_groups = MegatronOptimizer._filter_and_reorder_param_groups

    def align(current: Any, saved: Any) -> None:
        source, target = (saved, current) if keep else (current, saved)
        default: Any = next((group for group in source if group.get("default_config")), {})
        for group in target:
            if group.get("default_config"):
                group |= {name: default[name] for name in ("max_lr", "min_lr") if name in default}

    def aligned_match(current_groups: Any, state_dict_groups: Any) -> Any:
        align(current_groups, state_dict_groups)
        return match_groups(current_groups, state_dict_groups)

    @patch(DistributedOptimizer, "load_state_dict")
    def aligned_load(load: Any, self: Any, state_dict: Any) -> None:
        align(self.optimizer.param_groups, state_dict["optimizer"]["param_groups"])
        load(self, state_dict)

    MegatronOptimizer._filter_and_reorder_param_groups = staticmethod(aligned_match)


def log_first_iteration_once() -> None:
    """Do not count the first iteration of a run twice in Megatron's log.

    Megatron logs the first iteration in addition to every ``--log-interval`` iterations, and keeps
    its loss and time for the next line. If the first iteration is also the last of its interval,
    the next line would be a mean of two intervals (upstream issue 6237).
    """
    from megatron.training import get_args, training

    @patch(training, "training_log")
    def log_and_reset(log: Any, *args: Any, **kwargs: Any) -> Any:
        iteration = args[3]
        if "is_first_iteration" in kwargs and iteration % get_args().log_interval == 0:
            kwargs["is_first_iteration"] = False
        return log(*args, **kwargs)


def skip_fusion_warm_up() -> None:
    """Skip the warm-up of fused CUDA kernels (CPU only).

    It advances the RNG by an amount that depends on the parallel layout. Without the warm-up, the
    initial weights only depend on the seed.
    """
    from megatron.training import training

    training.set_jit_fusion_options = lambda *args, **kwargs: None


def let_fsdp2_resume() -> None:
    """Restore Adam's ``step`` when resuming with FSDP2 (Megatron drops it)."""
    from megatron.training import checkpointing, training

    state_dict: dict[str, Any] = {}

    @patch(checkpointing, "_load_base_checkpoint")
    def read_and_keep(read: Any, *args: Any, **kwargs: Any) -> Any:
        result = read(*args, **kwargs)
        state_dict.update(result[0] or {})
        return result

    @patch(training, "load_checkpoint")
    def load_with_step(load: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        state_dict.clear()
        result = load(model, optimizer, *args, **kwargs)
        if kwargs.get("skip_load_to_model_and_opt") and "optimizer" in state_dict:
            saved = state_dict["optimizer"].get("optimizer", state_dict["optimizer"])
            adam = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
            for group, loaded in zip(adam.param_groups, saved["param_groups"], strict=True):
                group |= {"step": loaded["step"]} if "step" in loaded else {}
            if "common_step" in saved["state"]:
                for state in adam.state.values():
                    state["step"] = saved["state"]["common_step"].clone()
        state_dict.clear()
        return result


_COUNTERS = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")


@functools.cache  # once per process
def count_tokens_in_integers() -> None:
    """Count the tokens of each expert in int64.

    Megatron registers these counters as float32 buffers, so ``Float16Module`` casts them to
    bfloat16 or float16. Bfloat16 cannot hold all integers above 256, and float16 overflows at
    65,520. Upstream pull request 7081 fixes this for expert biases. Remove this function when
    :data:`OLDEST` contains the fix, also for the counters of ``global_aux_loss``.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    @patch(TopKRouter, "__init__")
    def build_with_integers(build: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        for name in _COUNTERS:
            counter = getattr(self, name, None)
            if counter is not None:
                setattr(self, name, counter.long())


def match_fsdp2_parameters() -> None:
    """Match FSDP2's shards with the optimizer's parameters (upstream's main is not fixed).

    Megatron compares the ``id()`` of local tensors. Since torch 2.14, ``DTensor.to_local()``
    returns a new object for a parameter, and saving ends in a KeyError.
    """
    from megatron.core.dist_checkpointing import optimizer
    from torch.distributed.tensor import DTensor

    @patch(optimizer, "to_local_if_dtensor")
    def get_local_tensor(to_local: Any, tensor: Any) -> Any:
        return tensor._local_tensor if isinstance(tensor, DTensor) else to_local(tensor)


@functools.cache  # once per process
def ignore_saved_strides() -> None:
    """Load checkpoints strictly that torch 2.15 has written (upstream's main is not fixed).

    Since torch 2.15, a checkpoint's metadata contains the strides of each tensor. Megatron passes
    all properties to ``torch.empty``, which has no such argument.
    """
    from megatron.core.dist_checkpointing.strategies.torch import (
        TorchDistLoadShardedStrategy,
        _get_filesystem_reader,
    )

    @patch(TorchDistLoadShardedStrategy, "load_tensors_metadata")
    def load_without_strides(
        load: Any, self: Any, checkpoint_dir: Any, metadata: Any = None
    ) -> Any:
        if metadata is None:
            metadata = _get_filesystem_reader(checkpoint_dir).read_metadata()
        for stored in metadata.state_dict_metadata.values():
            if properties := getattr(stored, "properties", None):
                vars(properties).pop("strides", None)
        return load(self, checkpoint_dir, metadata)


@functools.cache  # once per process
def build_output_layer_without_apex() -> None:
    """Disable gradient accumulation fusion in Megatron's own linear layers if apex is missing.

    With Transformer Engine, the output layer is the only one of them. All others are Transformer
    Engine's, which does not need apex for the fusion, but Megatron has one setting for both.
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


def build_mtp_without_te() -> None:
    """Fix building multi-token prediction in Megatron 0.20 if Transformer Engine is missing.

    Megatron passes two subclasses of Transformer Engine's layers to ``isinstance``. They are mocks
    instead of classes if Transformer Engine is missing.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.transformer import multi_token_prediction

    check = "is_inference_column_parallel_linear"
    if not HAVE_TE and hasattr(multi_token_prediction, check):
        setattr(multi_token_prediction, check, lambda module: False)


LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Parameters of Llama 3 RoPE scaling without a Megatron argument, and their defaults there."""


def scale_rope(args: Any) -> None:
    """Set all parameters of Llama 3 RoPE scaling.

    Megatron uses defaults for most of them. HybridModel does not pass any, and would ignore
    ``--use-rope-scaling``.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    given = (vars(args).get(f"rope_{name}") or value for name, value in LLAMA3_ROPE.items())
    RotaryEmbedding._apply_scaling.__defaults__ = (args.rope_scaling_factor, *given)
    build: Any = RotaryEmbedding.__init__
    parameters = inspect.signature(build).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    # latent attention builds its own RoPE, for which Megatron ignores --use-rope-scaling
    defaults["rope_scaling"] = args.use_rope_scaling and not args.multi_latent_attention
    defaults["rope_scaling_factor"] = args.rope_scaling_factor
    build.__defaults__ = tuple(defaults.values())
