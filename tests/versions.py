"""Empty checks; to be removed from the tests that call them."""

from typing import Any


def needs_training_package() -> None: ...
def needs_hybrid_models() -> None: ...
def needs_fsdp2() -> None: ...
def needs_added_losses() -> None: ...
def needs_attention_family() -> None: ...


def on_this_cp_rank(batch: dict[str, Any], cp_group: Any) -> dict[str, Any]:
    """Call Megatron's ``get_batch_on_this_cp_rank`` for a batch without packed sequences."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    return get_batch_on_this_cp_rank(batch, cp_group=cp_group, is_hybrid_cp=False)
