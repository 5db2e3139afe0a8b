"""Which Megatron-Core this package works with, and the few places where its versions need help.

The only file with version-dependent code. The plug-in (all of ``mcore``) is tested with every
version from :data:`OLDEST` to :data:`NEWEST`; what stands on Megatron's training package (our entry
point, verification) needs :data:`TRAINING`, hybrid models :data:`HYBRID`, MLA, GLA and GTA
:data:`FAMILY`.
"""

import functools
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata, util
from pathlib import Path
from typing import Any

from kha_megatron.announcements import is_first_rank
from kha_megatron.errors import ConfigError, VersionError
from kha_megatron.mcore.symbols import PLUG_IN, TRAINING_PACKAGE, Symbols, missing_symbols

OLDEST, NEWEST, TRAINING, HYBRID, FAMILY = (0, 17), (0, 19), (0, 19), (0, 18), (0, 19)


def installed_version() -> str:
    """The version that ``import megatron.core`` would get, found without importing it.

    Raises:
        VersionError: there is none.
    """
    try:
        spec = util.find_spec("megatron.core")
        folders = spec.submodule_search_locations if spec else None
        return (folders and megatron_version(Path(folders[0]))) or metadata.version("megatron-core")
    except ImportError:
        raise VersionError(f"megatron-core is not installed: `{install()}`") from None


def megatron_version(core: Path) -> str | None:
    """The version in the ``package_info.py`` of a ``megatron/core`` folder, read as text."""
    try:
        text = (core / "package_info.py").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))
    return ".".join(numbers.values()) if len(numbers) == 3 else None


def release(version: str) -> tuple[int, int]:
    """``(0, 19)`` of ``0.19.2``."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def supported() -> str:
    """``0.17 to 0.19``."""
    return f"{_dotted(OLDEST)} to {_dotted(NEWEST)}"


def training_refusal(version: str) -> str | None:
    """Why what stands on Megatron's training package refuses this version; None if it does not."""
    if release(version) >= TRAINING:
        return None
    return (
        f"the entry point, recipes and verification need megatron-core {_dotted(TRAINING)}, and "
        f"this is {version}: its megatron.training has no GPT model builder and another pretrain()"
    )


@functools.cache
def check_version() -> str:
    """The installed version of Megatron-Core, after a look at all that the plug-in stands on.

    Imports Megatron. A newer version than was tested gets a warning, once per process on rank 0.

    Raises:
        VersionError: it is too old, or lacks something.
    """
    found = installed_version()
    if release(found) < OLDEST:
        raise VersionError(
            f"megatron-core {found} is not supported ({supported()} are): `{install()}`"
        )
    _refuse_missing(found, PLUG_IN, OLDEST)
    if release(found) > NEWEST and is_first_rank():
        warnings.warn(
            f"kha_megatron was tested with megatron-core {supported()}, and this is {found}: what "
            "it stands on is there (kha_megatron.mcore.symbols), but was not tested",
            RuntimeWarning,
            stacklevel=2,
        )
    return found


def check_family_version() -> None:
    """Refuse MLA, GLA, GTA and collaborative heads where the Megatron classes that they stand on
    were never tried.

    Raises:
        VersionError: the installed version is older than :data:`FAMILY`.
    """
    found = check_version()
    if release(found) < FAMILY:
        raise VersionError(
            "multi-latent, grouped-latent and grouped-tied attention with KHA, and collaborative "
            f"heads, need megatron-core {_dotted(FAMILY)}, and this is {found}: `{install(FAMILY)}`"
        )


def check_loss_scale(config: Any) -> None:
    """Refuse losses of attention layers where Megatron's schedules do not say how to scale them.

    Raises:
        VersionError: the installed version has no door for it.
    """
    if not hasattr(config, "experimental_attention_variant_loss_scale_func"):
        raise VersionError(
            f"a load-balance loss of heads needs megatron-core {_dotted(NEWEST)}, and this is "
            f"{installed_version()}: `{install(NEWEST)}`, or use moh.balance=0"
        )


def check_gate_rows(config: Any) -> None:
    """Refuse the gate of Megatron's development version whose rows of ``linear_qkv`` lie behind all
    others: this attention knows its own rows alone.

    Raises:
        ConfigError: the configuration has it.
    """
    if getattr(config, "head_wise_attn_gate", False):
        raise ConfigError(
            "head_wise_attn_gate=True: Megatron's gate of one number a head lies behind all other "
            "rows of linear_qkv: use --heads gate.output=head, or --attention-output-gate"
        )


def check_training_version() -> str:
    """The installed version, if it is new enough for our entry point. Does not import Megatron.

    Raises:
        VersionError: it is not; the plug-in may still work with it.
    """
    found = installed_version()
    if why := training_refusal(found):
        raise VersionError(
            f"{why}: `{install(TRAINING)}`, or train with your own script (--spec "
            "kha_megatron.mcore.specs NAME) and convert with --no-verify"
        )
    return found


def check_training_package() -> None:
    """Look at what our entry point and verification use of ``megatron.training``; imports it.

    Raises:
        VersionError: this version has it not, or differently.
    """
    check_training_version()
    _refuse_missing(check_version(), TRAINING_PACKAGE, TRAINING)


@contextmanager
def megatron_imports(oldest: tuple[int, int] = OLDEST) -> Iterator[None]:
    """Around imports from Megatron: what it lacks is a :class:`VersionError`.

    ``oldest`` is the first version that has them.

    Megatron answers an ``ImportError`` from the module of a ``--spec`` by training plain attention.

    Raises:
        VersionError: see :func:`check_version`, or an import failed.
    """
    found = check_version()
    try:
        yield
    except ImportError as error:
        raise _lacks(found, str(error), oldest) from error


def _refuse_missing(found: str, symbols: Symbols, oldest: tuple[int, int]) -> None:
    if missing := missing_symbols(symbols):
        raise _lacks(found, ", ".join(missing), oldest)


def _lacks(found: str, what: str, oldest: tuple[int, int]) -> VersionError:
    return VersionError(
        f"megatron-core {found} lacks what kha_megatron stands on ({what}): `{install(oldest)}`"
    )


def install(oldest: tuple[int, int] = OLDEST) -> str:
    """The command that installs a supported version, not older than this."""
    above = _dotted((NEWEST[0], NEWEST[1] + 1))
    return f"pip install 'megatron-core>={_dotted(oldest)},<{above}'"


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def use_shipped_dataset_helpers() -> None:
    """Use the compiled dataset helpers of the wheel instead of compiling them.

    The wheel ships ``helpers_cpp`` without its Makefile, and Megatron's start-up runs ``make`` and
    exits the process when that fails. A source tree that has no compiled helpers is left alone.
    """
    from megatron.core.datasets import utils

    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError:
        return
    utils.compile_helpers = lambda: None


def use_forked_checkpoint_writers() -> None:
    """Fork the processes that write checkpoint shards, where Megatron would spawn them.

    A spawned writer imports the main module and Megatron anew (about 4 s a checkpoint) and knows
    nothing of the CPU runtime: with ``--use-persistent-ckpt-worker`` it never answers. It would
    also get CPU tensors as shared memory, which the next iterations change while it writes; a
    process forked for each save keeps them as they were. Only without CUDA, which does not survive
    a fork.
    """
    from megatron.core.dist_checkpointing.strategies.async_utils import (
        AsyncCallsQueue,
        TemporalAsyncCaller,
    )
    from megatron.core.dist_checkpointing.strategies.filesystem_async import (
        get_write_results_queue,
    )

    get_write_results_queue("fork")
    AsyncCallsQueue.warmup_persistent_caller = lambda *args, **kwargs: None
    AsyncCallsQueue._get_async_caller = lambda self: TemporalAsyncCaller()


def has_nvrx() -> bool:
    """Whether Megatron's default way of saving asynchronously can run.

    Its checks look for a version of nvidia-resiliency-ext whose symbols it knows.
    """
    from megatron.core.dist_checkpointing.strategies.nvrx import has_nvrx_async_support

    try:
        return has_nvrx_async_support()
    except AssertionError:  # it is too old
        return False


def guard_checkpoints() -> None:
    """Make saving crash-safe and loading harmless where Megatron is not, and hashing fast.

    A save into a folder that already holds a complete checkpoint (a run that was rolled back
    reaches that iteration again) leaves its commit mark in place while shards are replaced: a kill
    would leave a mixture that looks complete. The marks are taken away first.

    PyTorch unpickles the non-tensor state of a checkpoint (random states, for one) with whatever
    it names, without regard to Megatron's list of safe classes: now the list counts.

    TensorBoard's values are flushed with each save: a run that is killed goes on from there, and
    what its writer still held would be a hole in every curve.

    Hashes are :mod:`kha_megatron.checkpoint.integrity`'s.
    """
    import torch.distributed as dist
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.training.global_vars import get_tensorboard_writer

    from kha_megatron.checkpoint.integrity import verify_hashes, write_hashes
    from kha_megatron.checkpoint.tracker import clear_for_overwriting

    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    serialization.save_integrity_manifest = write_hashes
    serialization.verify_integrity_manifest = verify_hashes
    async_save = TorchDistSaveShardedStrategy.async_save
    if getattr(async_save, "_kha_guarded", False):
        return

    @functools.wraps(async_save)
    def guarded(self: Any, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any):
        if dist.get_rank() == 0:
            clear_for_overwriting(checkpoint_dir)
        if writer := get_tensorboard_writer():
            writer.flush()
        dist.barrier()  # no rank writes before
        return async_save(self, sharded_state_dict, checkpoint_dir, *args, **kwargs)

    setattr(guarded, "_kha_guarded", True)  # noqa: B010 (a function's own attribute)
    TorchDistSaveShardedStrategy.async_save = guarded


def let_distributed_optimizer_resume() -> None:
    """Let the distributed optimizer load a checkpoint in float32, and when Adam is torch's own.

    Megatron-Core 0.19's DistributedOptimizer copies in place into parameters of float32, which
    autograd refuses. And it saves and loads the state of Transformer Engine's and apex's Adam.
    Torch's (used when neither is installed) keeps ``step`` in another place, which breaks loading
    in three: the state is asserted before the first step has made it, every parameter ends up
    sharing one ``step`` tensor, and ``step`` is looked up among tensors that do not hold it.
    """
    import torch
    from megatron.core.optimizer import distrib_optimizer

    optimizer_class = distrib_optimizer.DistributedOptimizer
    if getattr(optimizer_class, "_kha_resumes", False):
        return
    set_states = torch.no_grad()(optimizer_class._set_main_param_and_optimizer_states)
    optimizer_class._set_main_param_and_optimizer_states = set_states
    optimizer_class._kha_resumes = True
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    state_dict = optimizer_class.state_dict
    load_state_dict = optimizer_class.load_state_dict

    @functools.wraps(state_dict)
    def with_state(self: Any) -> Any:
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

    @functools.wraps(load_state_dict)
    def with_own_steps(self: Any, loaded: Any) -> None:
        load_state_dict(self, loaded)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].detach().clone()

    @functools.wraps(set_states)
    def without_step(self: Any, param: Any, tensors: dict[str, Any]) -> None:
        set_states(self, param, {**tensors, "step": None})

    optimizer_class.state_dict = with_state
    optimizer_class.load_state_dict = with_own_steps
    optimizer_class._set_main_param_and_optimizer_states = without_step


def let_adams_exchange_states() -> None:
    """Let Transformer Engine's and apex's Adam load what torch's has saved, and the other way.

    The number of steps is an entry of each parameter's state in torch's, and of each group in the
    others'; and a group that is loaded loses the settings that the other kind does not know.
    """
    import torch
    from megatron.core import optimizer

    native = optimizer.USING_PYTORCH_OPTIMIZER
    adam: Any = torch.optim.Adam if native else optimizer.Adam
    load = adam.load_state_dict
    if getattr(load, "_kha_any_adam", False):
        return

    @functools.wraps(load)
    def loading(self: Any, saved: Any) -> None:
        pairs = zip(self.param_groups, saved["param_groups"], strict=True)
        groups = [own | group for own, group in pairs]
        states = saved["state"].values()
        steps = [holder.pop("step") for holder in (*groups, *states) if "step" in holder]
        for holder in (states if native else groups) if steps else ():
            holder["step"] = torch.tensor(float(steps[0])) if native else int(steps[0])
        load(self, saved | {"param_groups": groups})

    setattr(loading, "_kha_any_adam", True)  # noqa: B010 (a function's own attribute)
    adam.load_state_dict = loading


def skip_fusion_warm_up() -> None:
    """Do not warm up fused CUDA kernels that a CPU does not have.

    The warm-up also draws random numbers, as many as its tensors of this layout need, before the
    model is initialised: without it the same seed gives the same weights under any layout.
    """
    from megatron.training import training

    training.set_jit_fusion_options = lambda *args, **kwargs: None


def let_fsdp2_resume() -> None:
    """Give Adam back the number of its steps when FSDP2 goes on from a checkpoint.

    Megatron-Core 0.19 reads the tensors of a sharded optimizer in place and drops the rest: torch's
    Adam then finds no ``step`` beside its moments, and Transformer Engine's starts from 0.
    """
    from megatron.training import checkpointing, training

    read, load = checkpointing._load_base_checkpoint, training.load_checkpoint
    found: dict[str, Any] = {}

    @functools.wraps(read)
    def reading(*args: Any, **kwargs: Any) -> Any:
        answer = read(*args, **kwargs)
        found.update(answer[0] or {})
        return answer

    @functools.wraps(load)
    def loading(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        found.clear()
        answer = load(model, optimizer, *args, **kwargs)
        if kwargs.get("skip_load_to_model_and_opt") and "optimizer" in found:
            saved = found["optimizer"].get("optimizer", found["optimizer"])
            adam = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
            for group, held in zip(adam.param_groups, saved["param_groups"], strict=True):
                group |= {"step": held["step"]} if "step" in held else {}
            if "common_step" in saved["state"]:
                for state in adam.state.values():
                    state["step"] = saved["state"]["common_step"].clone()
        found.clear()
        return answer

    checkpointing._load_base_checkpoint, training.load_checkpoint = reading, loading
