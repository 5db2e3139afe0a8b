"""A training of the quickstart's kind of model in plain PyTorch, to hold Megatron's speed against.

    python tools/plain_training.py FOLDER [--steps N]

FOLDER is what a run on one rank of `timed_training.py --record FOLDER` has left: sizes, first
weights, and the tokens of every step. Here the same weights train on the same tokens by the same
maths (RMSNorm, GQA with QK-norm and RoPE, knocked heads, sigmoid-routed SwiGLU experts balanced by
a bias, AdamW, clipping), written as one would without Megatron, with torch's fused attention and
AdamW. The losses must therefore be the run's. Printed lines are those of `timed_training.py`.

Shape legend: ``b`` sequences, ``s`` tokens of one, ``n = b * s``, ``h`` hidden size, ``D`` features
of a head, ``E`` experts, ``k`` of them for a token.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from timed_training import BATCHES, LOSS, PROCESSOR, SECONDS, SETTINGS, WEIGHTS
from torch import Tensor
from torch.nn import functional as F


class PlainModel(torch.nn.Module):
    """Parameters by Megatron's names, and the forward pass."""

    def __init__(self, settings: dict[str, Any], weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.settings = settings
        self.biases = {n: w for n, w in weights.items() if n.endswith("expert_bias")}
        self.loads: dict[str, Tensor] = {}
        counts = {n for n in weights if n.endswith("local_tokens_per_expert")}
        self.tensors = {
            name: torch.nn.Parameter(weight)
            for name, weight in weights.items()
            if name not in self.biases and name not in counts
        }
        self.trained = torch.nn.ParameterList(self.tensors.values())
        length, width = settings["seq_length"], settings["kv_channels"]
        rates = settings["rotary_base"] ** -(torch.arange(0, width, 2) / width)
        angles = (torch.arange(length)[:, None] * rates).repeat(1, 2)
        self.cosines, self.sines = angles.cos(), angles.sin()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of ``[b, s]`` tokens and labels."""
        table = self.tensors["embedding.word_embeddings.weight"]
        x = F.embedding(tokens, table)
        for layer in range(self.settings["num_layers"]):
            name = f"decoder.layers.{layer}"
            x = x + self._attention(f"{name}.self_attention", self._norm(f"{name}.input", x))
            normed = self._norm(f"{name}.pre_mlp", x)
            x = x + self._experts(f"{name}.mlp", normed.flatten(0, 1)).view_as(x)
        logits = self._norm("decoder.final", x) @ table.T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.tensors[f"{name}_layernorm.weight"]
        return F.rms_norm(x, weight.shape, weight, self.settings["layernorm_epsilon"])

    def _attention(self, name: str, x: Tensor) -> Tensor:
        """``[b, s, h]``."""
        heads, groups = (self.settings[f"num_{n}"] for n in ("attention_heads", "query_groups"))
        mixed = x @ self.tensors[f"{name}.linear_qkv.weight"].T
        mixed = mixed.unflatten(-1, (groups, heads // groups + 2, -1))  # [b, s, groups, rows, D]
        query, key, value = mixed.split([heads // groups, 1, 1], dim=-2)
        parts = {"query": query.flatten(2, 3), "key": key.flatten(2, 3), "value": value[..., 0, :]}
        for projection, rows in parts.items():
            matrices = self.tensors.get(f"{name}.knock_{projection}.weight")
            if matrices is not None:
                up, gate, down = matrices
                parts[projection] = (2 * (rows @ up) * torch.sigmoid(rows @ gate)) @ down
        output = F.scaled_dot_product_attention(
            self._turned(self._norm(f"{name}.q", parts["query"])).transpose(1, 2),
            self._turned(self._norm(f"{name}.k", parts["key"])).transpose(1, 2),
            parts["value"].transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return output.transpose(1, 2).flatten(2) @ self.tensors[f"{name}.linear_proj.weight"].T

    def _turned(self, x: Tensor) -> Tensor:
        """``[b, s, heads, D]`` with rotary embeddings."""
        first, second = x.chunk(2, dim=-1)
        swapped = torch.cat((-second, first), dim=-1)
        return x * self.cosines[:, None] + swapped * self.sines[:, None]

    def _experts(self, name: str, x: Tensor) -> Tensor:
        """``[n, h]``."""
        scores = torch.sigmoid(x @ self.tensors[f"{name}.router.weight"].T)
        bias = self.biases[f"{name}.router.expert_bias"]
        chosen = (scores.detach() + bias).topk(self.settings["moe_router_topk"]).indices  # [n, k]
        shares = scores.gather(1, chosen)
        shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
        self.loads[f"{name}.router.expert_bias"] = chosen.flatten().bincount(minlength=len(bias))
        output = torch.zeros_like(x)
        for expert in range(len(bias)):
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            inner, outer = (
                self.tensors[f"{name}.experts.local_experts.{expert}.linear_fc{n}.weight"]
                for n in (1, 2)
            )
            gate, up = (x[rows] @ inner.T).chunk(2, dim=-1)
            result = (F.silu(gate) * up) @ outer.T
            output = output.index_add(0, rows, result * shares[rows, slots, None])
        return output

    def balance(self) -> None:
        """Move the expert biases against the loads of the last forward pass, by their sign."""
        for name, bias in self.biases.items():
            load = self.loads[name].float()
            bias += self.settings["moe_router_bias_update_rate"] * torch.sign(load.mean() - load)


def train(folder: Path, steps: int | None = None) -> Iterator[tuple[float, float, float]]:
    """The loss of each step, its seconds and its processor time.

    Args:
        folder: of a recorded run.
        steps: how many; the tokens begin again after the last. As many as recorded if None.
    """
    settings = json.loads((folder / SETTINGS).read_text())
    model = PlainModel(settings, torch.load(folder / WEIGHTS, weights_only=True))
    batches = torch.load(folder / BATCHES, weights_only=True)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings["lr"],
        betas=(settings["adam_beta1"], settings["adam_beta2"]),
        eps=settings["adam_eps"],
        weight_decay=settings["weight_decay"],
        fused=True,
    )
    for tokens, labels in itertools.islice(itertools.cycle(batches), steps or len(batches)):
        start, used = time.perf_counter(), time.process_time()
        loss = model(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_grad"])
        optimizer.step()
        optimizer.zero_grad()
        model.balance()
        yield loss.item(), time.perf_counter() - start, time.process_time() - used


def main() -> None:
    """Train, and say how long every step took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int)
    given = parser.parse_args()
    for loss, seconds, used in train(given.folder, given.steps):
        print(f"{LOSS} {loss}\n{SECONDS} {seconds}\n{PROCESSOR} {used}", flush=True)


if __name__ == "__main__":
    main()
