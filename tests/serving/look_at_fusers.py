"""``look_at_fusers.py DIRECTORY...``: print what vLLM's Transformers backend would merge, as JSON.

For each directory: the names of the merged linear layers, by the path of their module in the
attention. For ``trap``, a module with the matrices of a knock whose forward looks like an MLP.
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
