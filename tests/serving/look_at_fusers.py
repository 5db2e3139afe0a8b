"""``look_at_fusers.py FOLDER...``: what vLLM's Transformers backend would merge, as JSON.

Of each folder's attention the names of the linear layers that a fuser takes together, by the path
of the module they lie in. And of ``trap``, a module with a knock's matrices whose forward looks
like an MLP: one that is merged.
"""

import json
import sys

import torch
from torch import nn
from transformers import AutoModel
from vllm.model_executor.models.transformers.fuser import get_fusers

import kha_megatron.hf  # noqa: F401 (registers)
from kha_megatron.hf.modeling_kha import HeadSharedLinear


class Trap(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.gate_proj, self.down_proj = (
            HeadSharedLinear(32, "identity") for _ in range(3)
        )

    def forward(self, x):
        return self.down_proj(self.up_proj(x) * torch.sigmoid(self.gate_proj(x)))


def merged(module):
    stacks = [stack for f in get_fusers(module) for stack in f.packed_modules_mapping.values()]
    return [name for stack in stacks for name in stack]


found = {"trap": merged(Trap())}
for folder in sys.argv[1:]:
    layer = AutoModel.from_pretrained(folder).layers[-1]
    attention = layer.self_attn
    found[folder] = {name: merged(m) for name, m in attention.named_modules() if merged(m)}
print("\n" + json.dumps(found))
