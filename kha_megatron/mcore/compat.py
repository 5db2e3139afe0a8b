"""Which Megatron-Core this package works with, and the few places where its versions need help.

The only file with version-dependent code.
"""

import functools
from importlib.metadata import version
from typing import Any

from kha_megatron.errors import ConfigError

SUPPORTED = "megatron-core 0.19"


def check_version() -> str:
    """The installed version of Megatron-Core.

    Raises:
        ConfigError: it is not one that this package was tested with.
    """
    installed = version("megatron-core")
    if installed.split(".")[:2] != ["0", "19"]:
        raise ConfigError(
            f"megatron-core {installed} is not supported: install {SUPPORTED} "
            "(`pip install 'megatron-core>=0.19,<0.20'`)"
        )
    return installed


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
    nothing of the CPU runtime. Only without CUDA, which does not survive a fork.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import (
        get_write_results_queue,
    )

    get_write_results_queue("fork")


def let_torch_adam_resume() -> None:
    """Let the distributed optimizer load a checkpoint when Adam is torch's own.

    Megatron-Core 0.19's DistributedOptimizer saves and loads the state of Transformer Engine's and
    apex's Adam. Torch's (used when neither is installed) keeps ``step`` in another place, which
    breaks loading in three: the state is asserted before the first step has made it, every
    parameter ends up sharing one ``step`` tensor, and ``step`` is looked up among tensors that do
    not hold it. Does nothing where one of the two is installed.
    """
    import torch
    from megatron.core.optimizer import distrib_optimizer

    optimizer_class = distrib_optimizer.DistributedOptimizer
    if distrib_optimizer.HAVE_APEX_OR_TE or getattr(optimizer_class, "_kha_torch_adam", False):
        return
    state_dict = optimizer_class.state_dict
    load_state_dict = optimizer_class.load_state_dict
    set_states = optimizer_class._set_main_param_and_optimizer_states

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
        with torch.no_grad():  # copies into float32 leaves in place
            set_states(self, param, {**tensors, "step": None})

    optimizer_class.state_dict = with_state
    optimizer_class.load_state_dict = with_own_steps
    optimizer_class._set_main_param_and_optimizer_states = without_step
    optimizer_class._kha_torch_adam = True


def skip_fusion_warm_up() -> None:
    """Do not warm up fused CUDA kernels that a CPU does not have.

    The warm-up also draws random numbers, as many as its tensors of this layout need, before the
    model is initialised: without it the same seed gives the same weights under any layout.
    """
    from megatron.training import training

    training.set_jit_fusion_options = lambda *args, **kwargs: None
