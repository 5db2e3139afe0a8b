"""Train a model under a layout, to compare it with an unsharded run.

A :class:`Case` describes layout, model and optimizer. :func:`train` runs it on the ranks of
``launcher.py`` with Megatron's schedules, data parallelism and optimizer, and returns the tensors
that ``pieces.py`` compares with the unsharded twin.

Shapes: ``s`` sequence, ``b`` microbatch, ``h`` hidden. Microbatches are numbered over all ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import batched
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from tests.distributed.pieces import Result, as_array, fill, gathered, pieces
from tests.versions import on_this_cp_rank

VOCAB = 56
MICROBATCH = 2
MICROBATCHES = 6, 2
"""Microbatches of all ranks in the first step, whose gradients are compared, and in later steps."""
CLIP = 0.1  # far below the norm of every case, so that clipping acts

MOE: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 20,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
    "moe_shared_expert_intermediate_size": 24,
    "moe_token_dispatcher_type": "alltoall",
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes as in Megatron's arguments."""

    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        """Number of ranks. Expert parallelism needs no further ranks."""
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        """Return a name such as ``tp2 sp ep2``."""
        words = []
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                words.append(f.name if value is True else f"{f.name}{value}")
        return " ".join(words) or "unsharded"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run. ``khas`` are trained one after the other in the same process groups."""

    layout: Layout
    khas: tuple[HeadsConfig, ...]
    model: str = "dense"
    groups: int = 4
    tied: bool = False
    bf16: bool = False
    per_token_loss: bool = False
    layers: int = 2
    """Pairs of attention and MLP. These are separate layers of a HybridModel."""
    gpt: bool = False
    """GPTModel instead of HybridModel."""
    mtp: int = 0
    """Number of tokens predicted in addition to the next one."""
    steps: int = 3
    sequence: int = 12
    packed: bool = False
    """Pack the sequences of a microbatch into one (THD). Without SP, which would split that one."""
    fold: bool = False
    """Fold KHA-Linear once per step."""
    fsdp: str = ""
    """``torch`` (FSDP2 in Megatron's wrapper) or ``megatron``, in place of Megatron's DDP."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the TransformerConfig that change the model."""
    savings: dict[str, Any] = field(default_factory=dict)
    """Fields of the TransformerConfig that must not change a result."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Fields of the DistributedDataParallelConfig."""

    def twin(self) -> "Case":
        """Return the same model and data in one process, without what must not change a result."""
        return replace(
            self,
            layout=Layout(),
            packed=False,
            savings={},
            ddp={},
            fold=False,
            fsdp="",
        )

    @property
    def pattern(self) -> str:
        """``--hybrid-layer-pattern`` with a segment for each pipeline stage."""
        attention = "+" if self.config.get("multi_latent_attention") else "*"
        dense = 1 if self.model == "moe" else self.layers
        symbols = f"{attention}-" * dense + f"{attention}E" * (self.layers - dense)
        stages = self.layout.pp * (self.layout.vpp or 1)
        segments = map("".join, batched(symbols, len(symbols) // stages))
        return "|".join(segments) + self.mtp * f"/{symbols[-2:]}"

    def __str__(self) -> str:
        """Return a name such as ``tp2 sp, moe, recompute_granularity=full``."""
        words = [str(self.layout), self.model]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in ("layout", "khas", "model", "steps") and value not in (f.default, {}):
                words.append(f.name if value is True else f"{f.name}={value}")
        words = [word for word in words if "{" not in word]
        mechanisms = set()
        for kha in self.khas:
            mechanisms.update(mechanism.name for mechanism in kha.without(Knock).mechanisms)
        words += sorted(mechanisms)
        for options in (self.config, self.savings, self.ddp):
            for name, value in options.items():
                words.append(name if value is True else f"{name}={value}")
        return ", ".join(words)


def initialize(layout: Layout) -> None:
    """Initialize Megatron's process groups for this layout."""
    from tests.distributed import models

    models.initialize(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )


def train(case: Case, mutate: Callable[[], Any] | None = None) -> list[Result]:
    """Run a case on this rank. ``mutate`` returns a context manager that breaks something."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    initialize(case.layout)
    MTPLossLoggingHelper.tracker.clear()  # its size depends on the number of predictions
    with ExitStack() as stack:
        if mutate is not None:
            stack.enter_context(mutate())
        return [_Run(case, kha).result() for kha in case.khas]


class _Run:
    def __init__(self, case: Case, kha: HeadsConfig, *, filled: bool = True) -> None:
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.transformer.module import Float16Module

        from kha_megatron.mcore.step_folding import fold_once_per_step

        self.case = case
        self.config = _transformer_config(case)
        self.chunks = _build(self.config, case, kha)
        ours = (".knock_", ".moh_", ".self_attention.gate_")
        self.initial = []
        for piece in pieces(self.chunks):
            if any(name in piece.name for name in ours):
                self.initial.append(piece)
        if filled:
            fill(self.chunks)
        if case.fold:
            fold_once_per_step(self.chunks, kha)
        settings = {"grad_reduce_in_fp32": True, "bucket_size": 3000}
        ddp_config = DistributedDataParallelConfig(**settings | case.ddp)
        wrap = _data_parallel(case)
        self.ddp = []
        for number, chunk in enumerate(self.chunks):
            model = Float16Module(self.config, chunk) if case.bf16 else chunk
            ddp = wrap(self.config, ddp_config, model, disable_bucketing=number > 0)
            self.ddp.append(ddp)
        self.optimizer = _optimizer(case, self.ddp)
        self._connect(ddp_config)
        self.kept: dict[tuple[str, int], Tensor] = {}
        self.microbatch = 0

    def _connect(self, ddp_config: Any) -> None:
        """Set the functions that Megatron's training loop sets before its first step."""
        from megatron.core.distributed import finalize_model_grads

        def one_or_all(functions: list[Any]) -> Any:
            return functions if len(functions) > 1 else functions[0]

        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        if ddp_config.overlap_grad_reduce:
            self.config.no_sync_func = one_or_all([m.no_sync for m in self.ddp])
            self.config.grad_sync_func = one_or_all([m.start_grad_sync for m in self.ddp])
        if ddp_config.overlap_param_gather:
            self.config.param_sync_func = one_or_all([m.start_param_sync for m in self.ddp])

    def result(self) -> Result:
        hooks = []
        for chunk in self.chunks:
            hooks += self._keep_activations(chunk)
        self._accumulate(MICROBATCHES[0])
        for hook in hooks:
            hook.remove()
        activations = list(self._activations())
        self.kept.clear()
        self._complete_gradients()
        filled = list(pieces(self.chunks, gathered))
        gradients = list(pieces(self.chunks, _gathered_gradient))
        norms = [self._step()]
        self._gather_parameters()
        stepped = list(pieces(self.chunks, gathered))
        for _ in range(self.case.steps - 1):
            self._accumulate(MICROBATCHES[1])
            norms.append(self._step())
        self._gather_parameters()
        trained = list(pieces(self.chunks, gathered))
        # autograd's hooks refer to the model, and the garbage collector does not see them. Without
        # this, the threads of its process groups would stay alive
        for ddp in self.ddp:
            vars(ddp).clear()
        return Result(
            self.initial,
            activations,
            filled,
            gradients,
            stepped,
            trained,
            norms,
        )

    def _step(self) -> float:
        """Make an optimizer step and return the gradient norm."""
        _, norm, _ = self.optimizer.step()
        return float(norm)

    def _accumulate(self, microbatches: int) -> None:
        from megatron.core.parallel_state import get_data_parallel_rank
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for ddp in self.ddp:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        count = microbatches // self.case.layout.dp
        first = get_data_parallel_rank() * count
        data: list[Iterator[int]] = [iter(range(first, first + count)) for _ in self.ddp]
        has_virtual_stages = len(self.ddp) > 1
        sequence = self.case.sequence
        batch_size = MICROBATCH
        if self.case.packed:
            sequence *= MICROBATCH
            batch_size = 1
        run_forward_backward = get_forward_backward_func()
        run_forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=data if has_virtual_stages else data[0],
            model=self.ddp if has_virtual_stages else self.ddp[0],
            num_microbatches=count,
            seq_length=sequence,
            micro_batch_size=batch_size,
            forward_only=False,
        )

    def _forward_step(self, numbers: Iterator[int], model: Any) -> Any:
        self.microbatch = next(numbers)
        batch = _batch(self.microbatch, self.case)
        inputs = [batch[name] for name in ("tokens", "position_ids", "labels")]
        packing = {}
        if self.case.packed:
            inputs = [x.reshape(1, -1) for x in inputs]
            packing["packed_seq_params"] = _packing(self.case.sequence)
        tokens, positions, labels = inputs
        output = model(tokens, positions, None, labels=labels, **packing)
        return output, partial(self._loss, self.microbatch, batch["loss_mask"])

    def _loss(self, microbatch: int, mask: Tensor, losses: Tensor) -> Any:
        losses = losses.view_as(mask)
        self.kept.setdefault(("loss", microbatch), losses)
        total = (losses.float() * mask).sum()
        return total, mask.sum().int(), {"loss": total.detach()}

    def _keep_activations(self, chunk: Any) -> Iterator[Any]:
        def keep(name: str, module: Any, inputs: Any, output: Tensor) -> None:
            if (name, self.microbatch) not in self.kept:  # the layers of MTP embed again
                output.retain_grad()
                self.kept[name, self.microbatch] = output

        if chunk.pre_process:
            yield chunk.embedding.register_forward_hook(partial(keep, "input"))
        if chunk.post_process:
            yield chunk.decoder.register_forward_hook(partial(keep, "output"))

    def _activations(self) -> Iterator[tuple[str, int, np.ndarray, np.ndarray]]:
        """Yield losses as ``[s, b]`` and hidden states ``[s, b, h]`` of this rank."""
        layout = self.case.layout
        # a rank's loss is a mean over its own tokens, and these ranks are averaged afterwards
        share = 1 if self.case.per_token_loss else layout.cp * layout.dp
        whole, mine = _positions(layout, self.case.sequence)
        for (name, microbatch), x in self.kept.items():
            if name == "loss":
                yield name, microbatch, whole, as_array(x.detach().transpose(0, 1))
                continue
            if name == "input":
                name = "input gradient"
                x = x.grad / share
            if self.case.packed:
                x = x.view(MICROBATCH, -1, x.shape[-1]).transpose(0, 1)
            yield name, microbatch, mine, as_array(x.detach())

    def _complete_gradients(self) -> None:
        """Gather the parts of each bucket that the distributed optimizer reduced on other ranks."""
        if not self.case.ddp.get("use_distributed_optimizer"):
            return
        for ddp in self.ddp:
            for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
                ranks = group.intra_distributed_optimizer_instance_group
                for bucket in group.buckets:
                    mine = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, mine, group=ranks)

    def _gather_parameters(self) -> None:
        if self.case.ddp.get("overlap_param_gather"):
            for ddp in self.ddp:
                ddp.start_param_sync(force_sync=True)


def _gathered_gradient(parameter: Any) -> Tensor:
    return gathered(getattr(parameter, "main_grad", parameter.grad))


def _transformer_config(case: Case) -> Any:
    from tests.distributed import models

    layout = case.layout
    settings: dict[str, Any] = {
        "num_layers": case.layers,
        "num_query_groups": case.groups,
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "calculate_per_token_loss": case.per_token_loss,
    }
    if layout.vpp:  # Megatron's own command line insists on it: without it losses are wrong
        settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if case.model == "moe":
        settings |= MOE
        if case.gpt:
            settings["moe_layer_freq"] = [0] + [1] * (case.layers - 1)
    if not case.gpt:
        settings |= {"num_layers": 2 * case.layers, "is_hybrid_model": True}
    if case.mtp:
        settings |= {"mtp_num_layers": case.mtp, "mtp_loss_scaling_factor": 0.5}
    if case.bf16:
        dtype = torch.bfloat16
        settings |= {"bf16": True, "params_dtype": dtype, "pipeline_dtype": dtype}
    return models.transformer_config(**settings | case.config | case.savings)


def _build(config: Any, case: Case, kha: HeadsConfig) -> list[Any]:
    """Build the model chunks of this rank, one for each virtual stage."""
    from megatron.core import parallel_state as ps
    from megatron.core.enums import ModelType

    from tests.distributed import models

    build: Callable[..., Any] = models.gpt_model
    if not case.gpt:
        build = partial(models.hybrid_model, pattern=case.pattern)
    virtual_stages: Iterable[int | None] = [None]
    if case.layout.vpp:
        virtual_stages = range(case.layout.vpp)
    chunks = []
    for stage in virtual_stages:
        is_first = ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        is_last = ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        chunk = build(
            config,
            kha,
            perturbed=False,
            pre_process=is_first,
            post_process=is_last,
            share_embeddings_and_output_weights=case.tied,
            vp_stage=stage,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        chunks.append(chunk.cuda())
    return chunks


def _data_parallel(case: Case) -> Any:
    from megatron.core import distributed

    if case.fsdp == "megatron":
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        return FullyShardedDataParallel
    if case.fsdp:
        return distributed.TorchFullyShardedDataParallel
    return distributed.DistributedDataParallel


def _optimizer(case: Case, ddp: list[Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    precision = {"bf16": True, "params_dtype": torch.bfloat16} if case.bf16 else {}
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            # without a floor of the size of the gradients, Adam turns the rounding of the smallest
            # ones into whole steps
            adam_eps=1e-3,
            clip_grad=CLIP,
            use_distributed_optimizer=case.ddp.get("use_distributed_optimizer", False),
            overlap_param_gather=case.ddp.get("overlap_param_gather", False),
            **precision,
        ),
        ddp,
    )


def _packing(sequence: int) -> Any:
    """Return the lengths of the packed sequences of a microbatch, over all CP ranks."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = sequence * torch.arange(MICROBATCH + 1, dtype=torch.int32, device="cuda")
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=sequence,
        max_seqlen_kv=sequence,
    )


def _batch(microbatch: int, case: Case) -> dict[str, Tensor]:
    """Return the part of a microbatch of this CP rank. Per-token losses have masked tokens."""
    from megatron.core import parallel_state as ps

    generator = torch.Generator().manual_seed(microbatch)
    text = torch.randint(0, VOCAB, (MICROBATCH, case.sequence + 1), generator=generator)
    mask = torch.ones(MICROBATCH, case.sequence)
    if case.per_token_loss:
        mask = (torch.rand(MICROBATCH, case.sequence, generator=generator) < 0.7).float()
    positions = torch.arange(case.sequence).expand(MICROBATCH, -1)
    batch = {
        "tokens": text[:, :-1].contiguous().cuda(),
        "labels": text[:, 1:].contiguous().cuda(),
        "loss_mask": mask.cuda(),
        "position_ids": positions.contiguous().cuda(),
        "cu_seqlens": None,
    }
    return on_this_cp_rank(batch, ps.get_context_parallel_group())


def _positions(layout: Layout, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of this rank's tokens without and with sequence parallelism."""
    from megatron.core import parallel_state as ps

    rank = ps.get_context_parallel_rank()
    chunks = np.arange(sequence).reshape(2 * layout.cp, -1)
    whole = chunks[[rank, 2 * layout.cp - 1 - rank]].reshape(-1)
    if not layout.sp:
        return whole, whole
    return whole, whole.reshape(layout.tp, -1)[ps.get_tensor_model_parallel_rank()]


@dataclass(frozen=True)
class SteppedParameter:
    """A bf16 parameter after one optimizer step. All arrays are in float32."""

    weight: np.ndarray
    main: np.ndarray
    """The optimizer's main parameter."""
    expected: np.ndarray
    """What Adam makes of the main parameter, computed in float64."""


def step_in_bf16(case: Case) -> dict[str, SteppedParameter]:
    """Make one optimizer step on one rank. Return the parameters by name."""
    initialize(case.layout)
    run = _Run(case, case.khas[0])
    (model,) = run.chunks
    parameters = dict(model.named_parameters())
    before = {name: parameter.detach().double() for name, parameter in parameters.items()}
    run._accumulate(MICROBATCHES[0])
    gradients = {name: parameter.main_grad.double() for name, parameter in parameters.items()}
    clipping = min(1.0, CLIP / run._step())
    settings = run.optimizer.config
    stepped = {}
    for name, parameter in parameters.items():
        main = parameter.main_param.detach().view_as(parameter)
        assert parameter.dtype == torch.bfloat16
        assert main.dtype == torch.float32
        gradient = clipping * gradients[name]
        expected = (1 - settings.lr * settings.weight_decay) * before[name]
        expected -= settings.lr * gradient / (gradient.abs() + settings.adam_eps)
        arrays = [as_array(tensor.detach()) for tensor in (parameter, main, expected)]
        stepped[name] = SteppedParameter(*arrays)
    for ddp in run.ddp:
        vars(ddp).clear()
    return stepped
