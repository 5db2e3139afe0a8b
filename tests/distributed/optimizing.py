"""Training runs that are saved and loaded as in ``megatron.training.checkpointing``."""

from argparse import Namespace
from pathlib import Path

import torch

from tests.distributed.parallelism import _Run, initialize
from tests.distributed.pieces import pieces

MICROBATCHES = 4
"""Microbatches of a step, divided over the data-parallel ranks."""


class Training(_Run):
    """A run of a case with one configuration; ``filled`` as for ``_Run``."""

    def __init__(self, case, *, filled=True):
        from kha_megatron.mcore import compat

        compat.let_distributed_optimizer_resume()
        initialize(case.layout)
        super().__init__(case, case.khas[0], filled=filled)
        self.args = Namespace(
            ckpt_format="torch_dist",
            no_save_optim=False,
            no_save_rng=True,
            use_distributed_optimizer=case.ddp.get("use_distributed_optimizer", False),
            dist_ckpt_optim_fully_reshardable=True,
            distrib_optim_fully_reshardable_mem_efficient=False,
        )

    def step(self):
        """Return the losses of this rank's microbatches and the gradient norm."""
        self.kept.clear()
        self._accumulate(MICROBATCHES)
        losses = {microbatch: loss.detach() for (_, microbatch), loss in self.kept.items()}
        return losses, float(self.optimizer.step()[1])

    def finish(self, folder):
        """Save, make a step, save again, and return the result of the step and the weights."""
        self.save(f"{folder}/state")
        losses, norm = self.step()
        self.save(f"{folder}/stepped")
        weights = list(pieces(self.chunks))
        vars(self.ddp[0]).clear()
        return losses, norm, weights

    def _state(self, **loading):
        from megatron.training import checkpointing

        metadata = checkpointing._build_sharded_state_dict_metadata(self.args)
        return checkpointing.generate_state_dict(
            self.args,
            self.chunks,
            self.optimizer,
            opt_param_scheduler=None,
            rng_state=None,
            iteration=0,
            optim_sd_kwargs={"metadata": metadata, **loading},
            model_sd_kwargs={"metadata": metadata},
        )

    def save(self, folder):
        import queue

        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.core.dist_checkpointing.strategies.fully_parallel import (
            FullyParallelSaveStrategyWrapper,
        )

        filesystem_async._results_queue = queue.Queue()  # a daemonic rank may start no manager
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy(),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        dist_checkpointing.save(self._state(), folder, strategy)

    def load(self, folder, *, optimizer=True):
        from megatron.core import dist_checkpointing

        self.args.no_save_optim = not optimizer  # as on the command line, for both directions
        state = self._state(is_loading=True)
        strict = "raise_all" if optimizer else "raise_unexpected"
        state = dist_checkpointing.load(state, folder, strict=strict)
        self.chunks[0].load_state_dict(state["model"])
        if optimizer:
            self.optimizer.load_state_dict(state["optimizer"])
