"""Compare two Megatron checkpoints byte by byte."""

from pathlib import Path

import torch

from kha_megatron.checkpoint.integrity import FileChecks
from kha_megatron.checkpoint.torch_dist import Record, TorchDistFolder


def assert_same_bytes(one: Path, two: Path) -> None:
    """Compare model, optimizer, random states and scheduler."""
    first, second = (TorchDistFolder(path, FileChecks(path, {})) for path in (one, two))
    assert first.tensors.keys() == second.tensors.keys()
    assert any("decoder." in key for key in first.tensors)
    assert any("optimizer." in key for key in first.tensors)
    for key in first.tensors:
        a, b = (folder.read(key).contiguous().view(torch.uint8) for folder in (first, second))
        assert torch.equal(a, b), key
    assert first.objects.keys() == second.objects.keys()
    assert any("rng_state" in key for key in first.objects)
    common = "common_state/shard_0_1"
    for key in first.objects.keys() - {common}:
        assert stored_bytes(first, key) == stored_bytes(second, key), key
    states = [folder.read_object(common)[0] for folder in (first, second)]
    args = [state.pop("args").state for state in states]
    assert states[0]["opt_param_scheduler"]["num_steps"] == 6 * states[0]["iteration"]
    assert_same(*states, common)
    assert args[0].keys() == args[1].keys()
    different = {name for name in args[0] if repr(args[0][name]) != repr(args[1][name])}
    assert different <= COMMAND_LINE, different


COMMAND_LINE = {
    "async_save",
    "async_strategy",
    "ckpt_step",
    "exit_interval",
    "iteration",
    "kha_heads",
    "kha_preset",
    "load",
    "num_floating_point_operations_so_far",
    "save",
    "tensorboard_dir",
    "use_checkpoint_args",
    "use_persistent_ckpt_worker",
}
"""Arguments in which the runs differ on purpose."""


def stored_bytes(folder: TorchDistFolder, key: str) -> bytes:
    chunk = folder.objects[key]
    return (folder.path / chunk.file).read_bytes()[chunk.start : chunk.start + chunk.length]


def assert_same(a, b, where: str) -> None:
    """Compare containers, tensors and unread objects."""
    if isinstance(a, Record):
        a, b = ([x.name, x.arguments, x.state] for x in (a, b))
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        a, b = (list(x.values()) for x in (a, b))
    if isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, pair in enumerate(zip(a, b, strict=True)):
            assert_same(*pair, f"{where}/{i}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert repr(a) == repr(b), where
