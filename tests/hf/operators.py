"""Count the kernels of a decoding step."""

from collections import Counter

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache


class KernelCount(TorchDispatchMode):
    """Counts operators by name, except for allocations. Views are counted separately."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.views: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        output = operator(*args, **(kwargs or {}))
        name = operator.overloadpacket.__name__
        allocates = name.startswith(("empty", "new_empty"))
        if not allocates:
            counts = self.views if is_view(operator, args, output) else self.counts
            counts[name] += 1
        return output


def is_view(operator, inputs, output) -> bool:
    """Whether an operator only returns other views of its input."""
    if operator._schema.is_mutable:
        return False
    storages = set()
    for value in tree_leaves(inputs):
        if isinstance(value, Tensor):
            storages.add(value.untyped_storage().data_ptr())
    outputs = [value for value in tree_leaves(output) if isinstance(value, Tensor)]
    return all(value.untyped_storage().data_ptr() in storages for value in outputs)


@torch.no_grad()
def count_step(model, views: bool = False) -> Counter[str]:
    """Count the kernels of a decoding step with a batch of one, or its views."""
    ids = torch.arange(1, 9)[None]
    cache = DynamicCache(config=model.config)
    for chunk in (ids[:, :7], ids[:, 7:]):
        model(chunk, past_key_values=cache, use_cache=True)
    with KernelCount() as counter:
        model(ids[:, :1], past_key_values=cache, use_cache=True)
    return counter.views if views else counter.counts


def count_layer(build, views: bool = False) -> Counter[str]:
    """Count the kernels of one layer, as the difference of models with three and two layers.

    ``build`` returns a model with a given number of layers. With ``views``, count views instead.
    """
    counts = count_step(build(3), views)
    counts.subtract(count_step(build(2), views))
    return Counter({name: count for name, count in counts.items() if count})
