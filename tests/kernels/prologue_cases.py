"""What is tested of the prologue's kernels, on any device: in the interpreter, and on a GPU.

Against the definition in float64. Unwritten memory, and what lies between the rows, is full of NaN.
Shape legend: ``s`` sequence, ``b`` batch, ``G`` key/value heads, ``r`` query heads of each, ``D``
head dim, ``R`` of its features that turn.
"""

import torch

from kha_megatron.heads.knock import PROJECTIONS
from tests.kernels.cases import relative_error, weight_of

MANY = 9003
"""Tokens that take every program of the largest GPU more than two turns, the last one ragged."""
LENGTHS = {1: (1, 1), 7: (7, 1), 21: (7, 3), 63: (21, 3), 129: (43, 3), MANY: (3001, 3)}
"""Ugly numbers of tokens, as sequence and batch."""
G = 3
NORMS = ("query norm", "key norm")
OPTIONS = {
    "part turns": {"rotary": 48},
    "nothing turns": {"rotary": 0},
    "each sequence has its angles": {"own_angles": True},
    "no norms": {"norms": ()},
    "one norm": {"norms": NORMS[1:]},
    "centred at zero": {"zero_centred": True},
    "some of the queries": {"heads": {"query": (1, 3), "key": (4, 5), "value": (5, 6)}},
    "another eps": {"eps": 0.1},
}
"""Of :func:`errors`, for four query heads of 96 features for each key/value head."""


def a_buffer(tokens, r, head_dim, dtype, device):
    """``[s, b, G, (r + 2) * D]`` of a larger one, with NaN in the gaps."""
    width = (r + 2) * head_dim
    whole = torch.full((*LENGTHS[tokens], G, width + 16), torch.nan, dtype=dtype, device=device)
    view = whole[..., :width]
    view.copy_(torch.randn(view.shape, device=device))
    return view


def angles_of(length, features, batch=1, device="cpu"):
    """As Megatron's rotary embedding gives them, or for each sequence of the batch its own."""
    inverse = 10000 ** (-torch.arange(0, features, 2, device=device) / features)
    place = torch.arange(length, device=device)[:, None] + 5 * torch.arange(batch, device=device)
    half = place[..., None].float() * inverse
    return torch.cat([half, half], dim=-1)[:, :, None]


def heads_of(r):
    """Of ``r`` queries, a key and a value, all."""
    return {"query": (0, r), "key": (r, r + 1), "value": (r + 1, r + 2)}


def both(tokens, r, head_dim, dtype, *, variants, rotary, norms, own_angles, device, **settings):
    """Outputs and gradients by name: of the kernels, and of the definition in float64."""
    from kha_megatron.ops.kernels.prologue_launch import fused_prologue
    from kha_megatron.ops.prologue import PrologueSettings, prologue

    torch.manual_seed(tokens)
    settings = {"heads": heads_of(r)} | settings
    settings = PrologueSettings(head_dim=head_dim, variants=variants, **settings)
    leaves = {"qkv": a_buffer(tokens, r, head_dim, dtype, device)}
    leaves |= {p: weight_of(v, head_dim, dtype, device) for p, v in variants.items()}
    for name in norms:
        leaves[name] = (1 + 0.3 * torch.randn(head_dim, device=device)).to(dtype)
    length, batch = LENGTHS[tokens]
    angles = None
    if rotary:
        angles = angles_of(length, rotary, batch if own_angles else 1, device)
    upstream, results = None, []
    for function, exact in ((fused_prologue, False), (prologue, True)):
        used = {n: x.double() if exact else x.detach() for n, x in leaves.items()}
        used = {n: x.requires_grad_() for n, x in used.items()}
        weights = {p: used[p] for p in variants}
        gains = [used.get("query norm"), used.get("key norm")]
        outputs = function(used["qkv"], weights, *gains, angles, settings)
        if upstream is None:
            # as some attentions give them: batch outermost in memory
            upstream = [torch.randn_like(x.transpose(0, 1)).transpose(0, 1) for x in outputs]
        used_upstream = [g.to(x.dtype) for g, x in zip(upstream, outputs, strict=True)]
        gradients = torch.autograd.grad(outputs, list(used.values()), used_upstream)
        assert all(x.is_contiguous() for x in outputs)
        results.append(
            dict(zip(PROJECTIONS, outputs, strict=True))
            | {f"d {name}": g for name, g in zip(used, gradients, strict=True)}
        )
    return results


def errors(tokens, r, head_dim, dtype, device="cpu", **options):
    """Relative error of each output and gradient; infinite where a gradient must be zero."""
    defaults = {"variants": {}, "rotary": head_dim, "norms": NORMS, "own_angles": False}
    got, want = both(tokens, r, head_dim, dtype, device=device, **defaults | options)
    unasked = want["d qkv"] == 0
    assert (got["d qkv"][unasked] == 0).all()
    return {name: relative_error(got[name], want[name]) for name in want}


def repeats(tokens=129, device="cpu"):
    """Whether two passes with several tiles for each program give the same bits."""
    options = {"variants": {}, "rotary": 64, "norms": NORMS, "own_angles": False}
    runs = [both(tokens, 2, 64, torch.bfloat16, device=device, **options)[0] for _ in range(2)]
    return all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def kept_for_backward():
    """Bytes that autograd keeps beyond the buffer, the parameters and Megatron's angles."""
    from kha_megatron.ops.kernels.prologue_launch import fused_prologue
    from kha_megatron.ops.prologue import PrologueSettings

    qkv = a_buffer(7, 2, 64, torch.float32, "cpu").requires_grad_()
    weight, norm = weight_of("mlp", 64, torch.float32).requires_grad_(), torch.ones(64)
    angles = angles_of(7, 64)
    known = {x.untyped_storage().data_ptr() for x in (qkv, weight, norm, angles)}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    settings = PrologueSettings(head_dim=64, heads=heads_of(2), variants={"value": "mlp"})
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        query, _, _ = fused_prologue(qkv, {"value": weight}, norm, norm, angles, settings)
    assert query.requires_grad
    return sum(size for place, size in kept.items() if place not in known)


def no_tokens():
    """Shapes of the outputs, and the norms' gradients, for an empty sequence."""
    from kha_megatron.ops.kernels.prologue_launch import fused_prologue
    from kha_megatron.ops.prologue import PrologueSettings

    qkv = torch.empty(0, 2, G, 4 * 64, requires_grad=True)
    norm = torch.ones(64, requires_grad=True)
    weight = weight_of("mlp", 64, torch.float32).requires_grad_()
    settings = PrologueSettings(head_dim=64, heads=heads_of(2), variants={"value": "mlp"})
    outputs = fused_prologue(qkv, {"value": weight}, norm, norm, None, settings)
    sum(x.sum() for x in outputs).backward()
    return [tuple(x.shape) for x in outputs], norm.grad.abs().max().item(), qkv.grad.shape
