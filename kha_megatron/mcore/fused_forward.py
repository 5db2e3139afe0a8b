"""The fused prologue inside Megatron's self-attention.

Megatron splits the output of the QKV projection, normalises queries and keys, and turns them, each
with kernels of its own, and between them KHA knocks. :class:`FusedPrologue` does all of it in the
method that Megatron asks for query, key and value: there it takes the projection unsplit, and it
keeps the rotary embedding of the call from the rest of Megatron's ``forward``, which then finds
nothing left to turn.

Modules and parameters stay where they are; norms and shared matrices are read, not called. What
calling them would have done beside the maths is done in its place: the hooks with which Megatron
waits for gathered parameters run, and those of a knocked value get its input and its output. Where
another hook would be passed by, the attention falls back.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kha_megatron.announcements import announce
from kha_megatron.errors import ConfigError
from kha_megatron.heads.knock import PROJECTIONS
from kha_megatron.ops.fused import prologue_kernel, trusts_prologue
from kha_megatron.ops.prologue import PrologueSettings
from kha_megatron.ops.verification import PrologueCase

type _Rotary = Tensor | tuple[Tensor, Tensor] | None

_GATHERING = "megatron.core.distributed.distributed_data_parallel"
"""Where Megatron defines the pre-hook that waits for a module's parameters."""

_OPTIONS = {
    "attention_output_gate": "the gate lies between queries and keys",
    "rotary_interleaved": "neighbouring features turn together",
    "yarn_rotary_scaling_factor": "YaRN scales what it turns",
    "flash_decode": "decoding turns elsewhere",
    "batch_invariant_mode": "norms must be Megatron's own",
    "qk_l2_norm": "queries and keys have no RMSNorm",
    "test_mode": "Megatron compares what it has split",
}
"""Fields of the configuration with which a layer is left to Megatron, and why."""


class FusedPrologue(Attention):
    """Goes before Megatron's ``SelfAttention`` among the bases of a knocked attention.

    The kernels take over where all of this holds; where something does not, Megatron's own path
    runs, and the first rank of each pipeline stage says why, once for each reason:

    - the kernels run here and have this dtype and head dim (``kha_megatron.ops.fused.refusal``),
      and ``KHA_KERNELS`` does not say ``torch``;
    - self-attention with keys and values of its own (not GTA), training or evaluating: no inference
      context, no packed sequences, no activations of ``qkv_linear`` offloaded;
    - QK-norms are RMSNorms without bias that agree on ``eps``, or there are none;
    - RoPE in halves, over all features or the first of them, the same for queries and keys, or
      none; no YaRN;
    - no option of ``_OPTIONS``; matrices of the dtype of activations, no weight a DTensor;
    - on every tensor-parallel rank the kernels equal plain torch (``kha_megatron.ops.verdicts``),
      and no hook on a norm or a knocked query or key would be passed by.
    """

    is_fused = False
    """Whether the running forward is; its angles are then kept from Megatron."""

    _kept_angles: Tensor | None = None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: _Rotary = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As ``SelfAttention.forward``."""
        if self._is_fused(
            hidden_states, key_value_states, inference_context, rotary_pos_emb, *args, **kwargs
        ):
            self.is_fused, self._kept_angles = True, self._angles(rotary_pos_emb)
            rotary_pos_emb = None
        try:
            return super().forward(
                hidden_states,
                attention_mask,
                key_value_states,
                inference_context,
                rotary_pos_emb,
                *args,
                **kwargs,
            )
        finally:
            self.is_fused, self._kept_angles = False, None

    def run_fused(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the running fused forward: knocked, normalised and turned.

        Args:
            qkv: whole groups ``[s, b, g, n]`` (:meth:`kha_megatron.mcore.qkv.QKVSplit.groups`).
        """
        settings = self._settings
        heads = settings.places(qkv)
        unknocked = heads["value"].flatten(2, 3)
        listening = None
        for norm in filter(None, self._norms()):
            _run_pre_hooks(norm, qkv)
        for projection, knocking in self.knockings.items():
            seen = unknocked if projection == "value" else heads[projection]
            if knocking.is_folded:  # the projection has knocked, and it returns what it gets
                _unchanged(knocking, knocking(seen) is seen)
            else:
                _run_pre_hooks(knocking, seen)
                listening = knocking if projection == "value" else listening
        active = {p: k for p, k in self.knockings.items() if not k.is_folded}
        settings = replace(settings, variants={p: k.variant for p, k in active.items()})
        # the gradient of shared matrices is summed over tensor-parallel ranks here
        weights = {
            p: copy_to_tensor_model_parallel_region(k.weight, group=k.tp_group)
            for p, k in active.items()
        }
        gains = [None if norm is None else norm.weight for norm in self._norms()]
        kernel, _ = prologue_kernel(qkv, settings.head_dim)
        assert kernel is not None  # or it would not be fused
        query, key, value = kernel(qkv, weights, *gains, self._kept_angles, settings)
        if listening is not None:
            for hook in listening._forward_hooks.values():
                changed = hook(listening, (unknocked,), value)
                value = value if changed is None else changed
        return query, key, value

    def _norms(self) -> list[torch.nn.Module | None]:
        norms = (self.q_layernorm, self.k_layernorm)
        return [None if isinstance(norm, IdentityOp) else norm for norm in norms]

    @functools.cached_property
    def _settings(self) -> PrologueSettings:
        norm = next((norm for norm in self._norms() if norm is not None), None)
        parts = self.split.layout.parts

        def places(projection: str) -> tuple[int, int]:
            mine, before = self.split.wanted[projection], parts[projection].first
            first = before // self.hidden_size_per_attention_head
            return first + mine.start, first + mine.stop

        return PrologueSettings(
            head_dim=self.hidden_size_per_attention_head,
            heads={p: places(p) for p in PROJECTIONS if p in parts},
            eps=getattr(norm, "eps", 0.0),
            zero_centred=self.config.layernorm_zero_centered_gamma,
        )

    def _angles(self, rotary_pos_emb: _Rotary) -> Tensor | None:
        no_rope = getattr(self.config, "no_rope_freq", None)
        if no_rope and no_rope[self.layer_number - 1]:
            return None
        return rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb

    def _is_fused(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None,
        inference_context: Any,
        rotary_pos_emb: _Rotary,
        *args: Any,
        **kwargs: Any,
    ) -> bool:
        kernel, reason = prologue_kernel(hidden_states, self.hidden_size_per_attention_head)
        if kernel is not None:
            call = key_value_states, inference_context, rotary_pos_emb, *args
            others = self._call_refusals(hidden_states, *call, **kwargs)
            reason = self._layer_refusal or next(others, "")
            if not reason:
                reason = next(self._passed_by(self.folding.folds(hidden_states)), "")
                case = self._case(hidden_states, rotary_pos_emb)
                if not self._is_agreed(case, may=not reason) and not reason:
                    return False  # and it was said why
        elif not reason:  # this process computes in torch, and said so
            return False
        what = f"not used: {reason}" if reason else "used"
        announce(f"fused prologue {what}", once=("prologue", what))
        return not reason

    def _case(self, hidden_states: Tensor, rotary_pos_emb: _Rotary) -> PrologueCase:
        """How :meth:`run_fused` is going to call the kernels."""
        folds = self.folding.folds(hidden_states)
        variants = {p: k.variant for p, k in self.knockings.items()}
        if folds:
            variants = {p: variant for p, variant in variants.items() if variant != "linear"}
        layout, ranks = self.split.layout, self.split.tp_group.size()
        groups = 1 if self.split.is_shared else layout.groups // ranks
        norms: list[Any] = self._norms()
        query_norm, key_norm = (None if norm is None else norm.weight.dtype for norm in norms)
        angles = self._angles(rotary_pos_emb)
        return PrologueCase(
            settings=replace(self._settings, variants=variants),
            dtype=hidden_states.dtype,
            batch=hidden_states.shape[1],
            groups=groups,
            features=layout.group_rows,
            width=layout.group_rows * (layout.groups if self.split.is_shared else groups),
            norms=(query_norm, key_norm),
            turning=0 if angles is None else angles.shape[-1],
            own_angles=angles is not None and angles.shape[1] > 1,
            device=hidden_states.device,
        )

    @functools.cached_property
    def _agreed(self) -> dict[PrologueCase, bool]:
        """What :meth:`_is_agreed` has found."""
        return {}

    def _is_agreed(self, case: PrologueCase, *, may: bool) -> bool:
        """Whether all tensor-parallel ranks trust the kernels and, as this one, may take them.

        They must do the same: with it, the gradients of shared matrices are all-reduced in another
        order than without. They are asked once for each layer: a hook can stand on one of them.
        """
        group = self.split.tp_group
        if group.size() == 1:
            return may and bool(trusts_prologue(case))
        if case not in self._agreed:
            mine = trusts_prologue(case)
            if mine is None:  # as on all ranks, which have made the same calls
                return False
            no = torch.tensor(float(not (mine and may)), device=case.device)
            torch.distributed.all_reduce(no, torch.distributed.ReduceOp.MAX, group=group)
            self._agreed[case] = not no
            if mine and may and no:
                why = "another tensor-parallel rank has wrong kernels, or a hook that is passed by"
                announce(f"fused prologue not used: {why}", once=("prologue", why))
        return may and self._agreed[case]

    @functools.cached_property
    def _layer_refusal(self) -> str | None:
        """Why no forward of this layer can be fused."""
        for option, why in _OPTIONS.items():
            if getattr(self.config, option, False):
                return f"{option}, {why}"
        if self.kind is not None:
            return f"attention={self.kind}"
        if self._acts_at("qkv") or self.split.layout.extra:
            return f"{self.kha} has more than the knock between projection and norm"
        if getattr(self, "offload_qkv_linear", False):
            return "offload_modules has qkv_linear"
        norms = [norm for norm in self._norms() if norm is not None]
        for norm in norms:
            if type(norm).__name__ != "RMSNorm" or getattr(norm, "bias", None) is not None:
                return f"{type(norm).__name__} of queries or keys is no RMSNorm without bias"
            centred = getattr(norm, "zero_centered_gamma", False)
            if centred != self.config.layernorm_zero_centered_gamma:
                return "layernorm_zero_centered_gamma is not what the norms say"
        if len({norm.eps for norm in norms}) > 1:
            return "the norms of queries and keys differ in eps"
        return None

    def _call_refusals(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None,
        inference_context: Any,
        rotary_pos_emb: _Rotary,
        *args: Any,
        inference_params: Any = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Iterator[str]:
        """Why this forward cannot be fused, on every tensor-parallel rank."""
        if key_value_states is not None:
            yield "keys and values come from other states"
        if inference_context is not None or inference_params is not None:
            yield "inference keeps keys and values"
        if packed_seq_params is not None:
            yield "packed sequences"
        if args:
            yield "arguments after rotary_pos_emb without their names"
        if isinstance(rotary_pos_emb, tuple) and rotary_pos_emb[0] is not rotary_pos_emb[1]:
            yield "queries and keys turn by different angles"
        angles = self._angles(rotary_pos_emb)
        if angles is not None:
            tokens = hidden_states.shape[0]
            if self.config.sequence_parallel:
                tokens *= self.world_size
            length, batch, heads, features = angles.shape
            if (length, heads) != (tokens, 1) or batch not in (1, hidden_states.shape[1]):
                yield f"angles {tuple(angles.shape)} of {tokens} tokens"
            if features > self.hidden_size_per_attention_head:
                yield f"RoPE turns {features} features"
        for module in (*self._norms(), *self.knockings.values()):
            if is_traceable_wrapper_subclass(getattr(module, "weight", None)):
                yield f"the weight of a {type(module).__name__} is a {type(module.weight).__name__}"
        for knocking in self.knockings.values():
            if knocking.weight.dtype != hidden_states.dtype:
                yield f"matrices are {knocking.weight.dtype} and activations {hidden_states.dtype}"

    def _passed_by(self, folds: bool) -> Iterator[str]:
        """Hooks that would not run, or not as they expect."""
        norms = [norm for norm in self._norms() if norm is not None]
        modules: list[tuple[torch.nn.Module, bool]] = [(norm, False) for norm in norms]
        for projection, knocking in self.knockings.items():
            called = folds and knocking.variant == "linear"
            modules.append((knocking, called or projection == "value"))
        for module, is_heard in modules:
            before, after = module._forward_pre_hooks, module._forward_hooks
            passed = [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]
            passed += [before[k] for k in module._forward_pre_hooks_with_kwargs]
            passed += [after[k] for k in module._forward_hooks_with_kwargs]
            if not is_heard:
                passed += after.values()
                passed += [h for h in before.values() if not _gathers(h)]
            for hook in passed:
                if getattr(hook, "may_be_passed_by", False):  # as mcore/finite.py's, of its modules
                    continue
                name = getattr(hook, "__qualname__", type(hook).__name__)
                yield f"{name} is a hook of a {type(module).__name__} that is no longer called"


def _run_pre_hooks(module: torch.nn.Module, x: Tensor) -> None:
    """What calling ``module(x)`` would do before its forward."""
    for hook in module._forward_pre_hooks.values():
        _unchanged(module, hook(module, (x,)) is None)


def _unchanged(module: torch.nn.Module, holds: bool) -> None:
    if not holds:
        raise ConfigError(
            f"a hook of {type(module).__name__} changes what it gets, which the fused prologue "
            "cannot honour: export KHA_KERNELS=torch"
        )


def _gathers(hook: Any) -> bool:
    """Whether it is the pre-hook that waits for a module's parameters."""
    return getattr(hook, "__module__", None) == _GATHERING
