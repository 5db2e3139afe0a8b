"""Training with Adam on the ranks of a case, saved as ``megatron.training.checkpointing`` does."""

from argparse import Namespace
from pathlib import Path

import torch

BATCH = 4
"""Sequences of the whole batch, divided over the data-parallel ranks."""


class Training:
    """A model and Adam on these ranks, ``seed`` apart from any other."""

    def __init__(self, layout, model, zero, kha, seed, **changes):
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.training.training import wrap_model_chunks_with_ddp

        from kha_megatron.mcore import compat
        from tests.distributed import models

        compat.let_distributed_optimizer_resume()
        models.initialize(seed, **layout)
        self.config = models.transformer_config(**layout, **model)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.model = models.gpt_model(
            self.config,
            kha,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            **changes,
        )
        (self.ddp,) = wrap_model_chunks_with_ddp(
            [self.model],
            self.config,
            DistributedDataParallelConfig(use_distributed_optimizer=zero),
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=0.01,
                weight_decay=0.1,
                clip_grad=1.0,
                use_distributed_optimizer=zero,
            ),
            [self.ddp],
        )
        self.args = Namespace(
            ckpt_format="torch_dist",
            no_save_optim=False,
            no_save_rng=True,
            use_distributed_optimizer=zero,
            dist_ckpt_optim_fully_reshardable=True,
            distrib_optim_fully_reshardable_mem_efficient=False,
        )
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.rank = parallel_state.get_data_parallel_rank()
        self.replicas = parallel_state.get_data_parallel_world_size()

    def run(self, iteration, *, forward_only=False):
        """Losses ``[b, s]`` of this replica's part of the batch; None but on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from tests.distributed import models

        generator = torch.Generator().manual_seed(iteration)
        tokens = torch.randint(0, models.VOCAB, (BATCH, models.SEQUENCE), generator=generator)
        tokens = tokens.chunk(self.replicas)[self.rank]
        _, positions, mask = models.batch()
        positions = positions[:1].expand(len(tokens), -1)
        losses = []

        def forward_step(data, model):
            output = model(tokens, positions, mask, labels=tokens)

            def loss(output):
                losses.append(output.detach())
                return output.mean(), {}

            return output, loss

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=[self.ddp],
            num_microbatches=1,
            seq_length=models.SEQUENCE,
            micro_batch_size=len(tokens),
            forward_only=forward_only,
        )
        return losses[0] if losses else None

    def step(self, iteration):
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.run(iteration)
        return self.optimizer.step()[1]

    def _state(self, **loading):
        from megatron.training import checkpointing

        self.metadata = checkpointing._build_sharded_state_dict_metadata(self.args)
        return checkpointing.generate_state_dict(
            self.args,
            [self.model],
            self.optimizer,
            opt_param_scheduler=None,
            rng_state=None,
            iteration=0,
            optim_sd_kwargs={"metadata": self.metadata, **loading},
            model_sd_kwargs={"metadata": self.metadata},
        )

    def save(self, folder):
        import queue

        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.serialization import (
            get_default_save_sharded_strategy,
        )
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.core.dist_checkpointing.strategies.fully_parallel import (
            FullyParallelSaveStrategyWrapper,
        )

        filesystem_async._results_queue = queue.Queue()  # a daemonic rank may start no manager
        if torch.distributed.get_rank() == 0:
            Path(folder).mkdir()
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
        self.model.load_state_dict(state["model"])
        if optimizer:
            self.optimizer.load_state_dict(state["optimizer"])

    def outputs(self):
        """What :func:`summary` takes, for a model that makes no step."""
        output = self.run(8, forward_only=True)
        vars(self.ddp).clear()
        return self.rank, output, 0.0, {}

    def go_on(self, folder):
        """Save, compute the losses of another batch, and save again after one more step."""
        self.save(f"{folder}/state")
        output = self.run(8, forward_only=True)
        norm = self.step(9)
        self.save(f"{folder}/stepped")
        shared = {
            (self.stage, name): parameter.detach().clone()
            for name, parameter in self.model.named_parameters()
            if ".knock_" in name
        }
        vars(self.ddp).clear()
        return self.rank, output, norm, shared
