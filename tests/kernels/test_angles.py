"""RoPE's cosines and sines, which the prologue's kernels make of Megatron's angles.

In Triton's interpreter, against float64. The interpreter has no ``cos.approx``: what is shown is
which angles are read, and that whole turns go without a loss.
"""

import torch

TOKENS, D = 7, 64


def turned_by(angles, change=None):
    """Relative errors of queries and of the buffer's gradient, at ``angles`` ``[s, 1, 1, D]``."""
    from kha_megatron.ops.kernels.prologue_launch import fused_prologue
    from kha_megatron.ops.prologue import PrologueSettings

    torch.manual_seed(0)
    heads = {"query": (0, 1), "key": (1, 2), "value": (2, 3)}
    settings = PrologueSettings(head_dim=D, heads=heads)
    qkv = torch.randn(len(angles), 1, 1, 3 * D, requires_grad=True)
    query, _, _ = fused_prologue(qkv, {}, None, None, angles, settings)
    upstream = torch.randn_like(query)
    if change is not None:  # as a caller that makes the next sequence's angles in the same place
        angles.copy_(change)
        query, _, _ = fused_prologue(qkv, {}, None, None, angles, settings)
    (gradient,) = torch.autograd.grad(query, qkv, upstream)
    turns = torch.polar(
        torch.ones(len(angles), D // 2).double(), angles[:, 0, 0, : D // 2].double()
    )

    def turn(x, by):
        pairs = torch.complex(x[:, 0, 0, : D // 2].double(), x[:, 0, 0, D // 2 : D].double()) * by
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    want, want_gradient = turn(qkv.detach(), turns), turn(upstream, turns.conj())
    return (
        ((query[:, 0, 0].double() - want).norm() / want.norm()).item(),
        ((gradient[:, 0, 0, :D].double() - want_gradient).norm() / want_gradient.norm()).item(),
    )


def angles_at(places):
    """As Megatron has them: both halves the same."""
    inverse = 10000 ** (-torch.arange(0, D, 2) / D)
    half = torch.tensor(places, dtype=torch.float32)[:, None] * inverse
    return torch.cat([half, half], dim=-1)[:, None, None]


def test_far_places(interpreter):
    # in float32 the product of a million turns is 0.06 off, and a cosine with it
    found = interpreter(turned_by, angles_at([0, 1, 3.25, 8191, 131071, 999_983, 16_777_215]))
    assert max(found) < 1e-6


def test_angles_that_change_in_their_place_are_read_again(interpreter):
    found = interpreter(turned_by, angles_at(range(TOKENS)), angles_at(range(50, 50 + TOKENS)))
    assert max(found) < 1e-6
