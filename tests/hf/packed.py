"""One row of packed sequences, as servers give it to a model, against each sequence by itself."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from tests.hf.conftest import tokens

SEQUENCES = (3, 4)


def packed_attention(module, query, key, value, attention_mask, scaling, instances=None, **ignored):
    """A server's attention: its own state by layer, tokens flattened, ``[tokens, H * D]`` out."""
    instances[module.layer_idx].append((module, query.shape, key.shape, value.shape, scaling))
    assert attention_mask is None, "a server knows which tokens belong together"
    row = torch.arange(len(SEQUENCES)).repeat_interleave(torch.tensor(SEQUENCES))
    place = torch.arange(len(row))
    sees = (row[:, None] == row) & (place[:, None] >= place)
    output = F.scaled_dot_product_attention(query, key, value, sees, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2).flatten(2)[0], None


AttentionInterface.register("packed", packed_attention)


def check_packed(
    make: Callable[..., PreTrainedModel],
) -> tuple[PreTrainedModel, dict[int, list[tuple[Any, ...]]]]:
    """Both give the same.

    Args:
        make: a model, with the attention implementation ``attention`` where it is given.

    Returns:
        the model and, by layer, what its attention was called with: the module, the shapes of
        queries, keys and values, and the scale.
    """
    model, twin = make(attention="packed").model, make().model
    twin.load_state_dict(model.state_dict())
    sequences = [tokens(1, n) for n in SEQUENCES]
    instances = {layer: [] for layer in range(len(model.layers))}
    with torch.no_grad():
        hidden = model(
            input_ids=torch.cat(sequences, 1),
            position_ids=torch.cat([torch.arange(n) for n in SEQUENCES])[None],
            use_cache=False,
            return_dict=False,
            instances=instances,
        )[0][0]
        alone = torch.cat([twin(ids).last_hidden_state[0] for ids in sequences])
    torch.testing.assert_close(hidden, alone, rtol=1e-5, atol=1e-5)
    return model, instances
