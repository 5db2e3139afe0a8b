"""A pretrained model without KHA to one with knocking heads at the identity, to go on training."""

from pathlib import Path

from kha_megatron.config import KHAConfig
from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.conversion.opening import Opened, open_checkpoint, parse_dtype
from kha_megatron.conversion.to_hf import HFPlan
from kha_megatron.conversion.to_megatron import DIVISIBLE_BY, MegatronPlan
from kha_megatron.conversion.transforms import Upcycled


def plan_hf(
    source: Path, kha: KHAConfig, *, dtype: str | None = None, tokenizer: Path | None = None
) -> HFPlan:
    """To a ``kha`` folder. For the arguments and errors see :func:`plan_megatron`."""
    return to_hf.plan_for(_upcycled(source, kha, dtype, tokenizer), "kha", dtype)


def plan_megatron(
    source: Path,
    kha: KHAConfig,
    *,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    divisible_by: int = DIVISIBLE_BY,
    tensor_parallel: int = 1,
) -> MegatronPlan:
    """To a Megatron checkpoint. The logits stay the same bit for bit.

    Args:
        source: a stock Hugging Face folder, a ``kha`` one without knocking heads, or a checkpoint
            of plain Megatron, whose padding of the vocabulary is kept.
        kha: what to knock.
        dtype: see ``to_megatron.plan``.
        tokenizer: see ``to_megatron.plan``.
        divisible_by: see ``to_megatron.plan``.
        tensor_parallel: see ``to_megatron.plan``.

    Raises:
        CheckpointError: the model is damaged, has knocking heads already, or cannot be expressed.
        ConfigError: nothing would be knocked, or not from the identity, or with a variant that the
            model's attention cannot carry; the dtype or the tokenizer folder does not exist.
    """
    opened = _upcycled(source, kha, dtype, tokenizer, padded=True)
    return to_megatron.plan_for(opened, dtype, divisible_by, tensor_parallel)


def _upcycled(
    source: Path, kha: KHAConfig, dtype: str | None, tokenizer: Path | None, padded: bool = False
) -> Opened:
    parse_dtype(dtype)
    opened = open_checkpoint(source, tokenizer=tokenizer, padded=padded)
    return opened._replace(source=Upcycled(opened.source, kha))
