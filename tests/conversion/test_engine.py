"""Transfer every tensor once in bounded memory."""

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from kha_megatron.conversion.engine import transfer
from kha_megatron.conversion.sources import ModelSource
from kha_megatron.model.config import ModelConfig

MODEL = ModelConfig(
    vocab_size=200_003,
    padded_vocab_size=200_003,
    hidden_size=1001,
    ffn_hidden_size=3003,
    num_layers=40,
    num_attention_heads=7,
    num_query_groups=1,
    kv_channels=144,
    untie_embeddings_and_output_weights=True,
)
BESIDE = 256 * 2**20


def read(slot, *, meta=False):
    """Return meta tensors, the largest of 800 MB."""
    return slot.mapping.split(torch.empty(slot.mapping.shape(MODEL), device="meta"), MODEL)


def described():
    checkpoint = SimpleNamespace(verifying=nullcontext)
    return ModelSource(checkpoint, MODEL, read)


class Put:
    """Record the moved slots and the peak memory."""

    def __init__(self, fails_at=None, during=lambda slot: None):
        self.begun, self.held, self.most = [], 0, 0
        self._fails_at, self._during, self._lock = fails_at, during, threading.Lock()

    def __call__(self, slot, parts):
        size = sum(part.nbytes for part in parts)
        with self._lock:
            self.begun.append(slot)
            self.held += 2 * size
            self.most = max(self.most, self.held)
        if slot == self._fails_at:
            raise OSError("full")
        self._during(slot)
        with self._lock:
            self.held -= 2 * size


@pytest.fixture(scope="module")
def sizes():
    return {slot: sum(e.nbytes for e in held) for slot, held in described().entries()}


@pytest.mark.parametrize("workers", [1, 5])
def test_all_slots_are_moved_once_in_bounded_memory(sizes, workers):
    put, done = Put(during=lambda slot: time.sleep(0.002 if sizes[slot] < 2**29 else 0.1)), []
    transfer(described(), put, workers=workers, on_bytes=done.append)
    assert len(put.begun) == len(sizes)
    assert set(put.begun) == sizes.keys()
    assert sorted(done) == sorted(sizes.values())
    assert put.most <= 2 * max(sizes.values()) + BESIDE


def test_an_error_stops_the_transfer(sizes):
    first = max(sizes, key=sizes.get)
    put = Put(fails_at=first, during=lambda slot: time.sleep(0.05))
    with pytest.raises(OSError, match="full"):
        transfer(described(), put, workers=2)
    assert len(put.begun) < len(sizes) / 2
