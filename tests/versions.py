"""Calls to Megatron that several tests share."""

from typing import Any


def on_this_cp_rank(batch: dict[str, Any], cp_group: Any) -> dict[str, Any]:
    """Call Megatron's ``get_batch_on_this_cp_rank`` for a batch without packed sequences."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    return get_batch_on_this_cp_rank(batch, cp_group=cp_group, is_hybrid_cp=False)
