"""Load local checkpoints with Transformer Engine, and vice versa."""

from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
)
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

from kha_megatron.checkpoint.megatron import other_names
from kha_megatron.mcore.patching import patch


def load_from_either(*, scales: bool) -> None:
    """Patch ``dist_checkpointing.load`` to find norms that have another name in the checkpoint.

    ``scales`` also loads the FP8 state (``_extra_state``), which only delayed scaling needs.
    """

    @patch(dist_checkpointing, "load")
    def load_renamed(load: Any, state: Any, directory: Any, *args: Any, **kwargs: Any) -> Any:
        stored = load_sharded_metadata(str(directory))

        def rename(entry: Any) -> Any:
            if isinstance(entry, ShardedObject) and entry.key.endswith("_extra_state"):
                return entry if scales else LocalNonpersistentObject(None)
            if isinstance(entry, ShardedTensor) and entry.key not in stored:
                entry.key = next(filter(stored.__contains__, other_names(entry.key)), entry.key)
            return entry

        return load(dict_list_map_outplace(rename, state), directory, *args, **kwargs)
