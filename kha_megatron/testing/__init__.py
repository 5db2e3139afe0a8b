"""Tests for head mechanisms on the CPU.

Example (in a test of your own)::

    from kha_megatron.testing import check_mechanism
    from my_heads import Mine


    def test_mine():
        check_mechanism(Mine)
"""

import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kha_megatron.errors import ConfigError
from kha_megatron.heads import HeadFacts, HeadSizes, Mechanism
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.registry import mechanism_types, use_files

SIZES = HeadSizes(query_heads=8, kv_heads=4, head_dim=6, hidden_size=40)
TOLERANCE = 1e-6  # relative to the norm, in float64

_TAKEN = {f"{part}_{end}" for part in "qkvo" for end in ("proj", "norm", "knock")}


def check_mechanism(mechanism: type[Mechanism], *, smooth: bool = True, **settings: Any) -> None:
    """Check all rules that a mechanism must follow. Takes less than a minute on two CPU cores.

    We check the declarations, the initial values, gradients against finite differences, TP sizes 1,
    2 and 4 with and without sequence parallelism against one rank, resharding, export to
    transformers and import, and decoding with a KV cache. During training, no token may depend on
    later tokens or on other sequences. The layer must also support attention masks, attention
    dropout, and models with and without QK-norm (unless ``unsupported_reason`` refuses one of
    them), and the mechanism and each of its parameters must have an effect on the outputs.

    Args:
        mechanism: Class to check. If it is not registered, its file is (see ``--heads-from``).
        smooth: Set to False for straight-through gradients, to skip the finite differences.
        settings: Settings of the mechanism.

    Raises:
        AssertionError: Names the broken rule, e.g. "Gradient of `w` is declared `whole`, but
            differs between TP ranks: it is a sum over heads".
    """
    if mechanism.name not in mechanism_types():
        use_files([inspect.getfile(mechanism)])
    kha = HeadsConfig(mechanism_types()[mechanism.name](**settings))
    _raise_first(_find_wrong_declarations(kha))
    with tempfile.TemporaryDirectory(prefix="kha-check-") as scratch:
        request = json.dumps({"kha": kha.to_dict(), "smooth": smooth, "scratch": scratch})
        if mistake := _check_layouts(request):
            raise AssertionError(mistake)
        _raise_first(_find_wrong_exports(kha, Path(scratch)))


def _check_layouts(request: str) -> str | None:
    """Run :mod:`kha_megatron.testing.layouts` in a new process. Returns the first mistake."""
    words = [sys.executable, "-m", "kha_megatron.testing.layouts", request]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    mistake: str | None = json.loads(done.stdout.splitlines()[-1])
    return mistake


def _raise_first(mistakes: Iterator[str]) -> None:
    for mistake in mistakes:
        raise AssertionError(mistake)


def _find_wrong_declarations(kha: HeadsConfig) -> Iterator[str]:
    (mechanism,) = kha.mechanisms
    tensors = kha.tensors(SIZES)
    exported = [tensor.hf for tensor in tensors] + [row.hf for row in kha.rows(SIZES)]
    part: Any
    for part in (*tensors, *kha.rows(SIZES)):
        if not part.name.startswith(f"{mechanism.name}_"):
            yield f"The name of `{part.name}` must start with `{mechanism.name}_`."
        if not part.hf.isidentifier() or part.hf in _TAKEN or exported.count(part.hf) > 1:
            yield (
                f"Export name of `{part.name}` is {part.hf!r}. Set `hf` to a name that no other "
                "module in `self_attn` has."
            )
    for tensor in tensors:
        heads = SIZES.heads(tensor.heads)
        if tensor.per_head and tensor.shape[0] != heads:
            yield (
                f"TP split of `{tensor.name}`: it is declared `per_head` with shape "
                f"{tensor.shape}, but dim 0 must be the number of {tensor.heads} heads ({heads})."
            )
    if type(mechanism).from_dict(json.loads(json.dumps(mechanism.to_dict()))) != mechanism:
        yield f"The settings of {mechanism} change when they are saved as JSON."


def is_supported(kha: HeadsConfig, *, qk_norm: bool) -> bool:
    """Check whether the mechanism supports models with, or without, QK-norm."""
    try:
        kha.check(HeadFacts(qk_norm=qk_norm))
    except ConfigError:
        return False
    return True


def _find_wrong_exports(kha: HeadsConfig, scratch: Path) -> Iterator[str]:
    """Check the transformers model, and its conversion to Megatron and back."""
    import torch

    from kha_megatron.conversion import to_hf, to_megatron
    from kha_megatron.conversion.verify import Pair
    from kha_megatron.hf import KHAForCausalLM, KHAModelConfig

    config = KHAModelConfig(
        vocab_size=56,
        hidden_size=SIZES.hidden_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=SIZES.query_heads,
        num_key_value_heads=SIZES.kv_heads,
        head_dim=SIZES.head_dim,
        max_position_embeddings=32,
        use_qk_norm=is_supported(kha, qk_norm=True),
        attn_implementation="eager",
        **{f"kha_{name}": value for name, value in kha.to_dict(start=False).items()},
        **kha.providers_entry,
    )
    torch.manual_seed(0)
    model = KHAForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(56, (2, 7))
    with torch.no_grad():
        whole, cache, steps = model(ids).logits, None, []
        for start, end in ((0, 4), (4, 5), (5, 6), (6, 7)):
            step = model(ids[:, start:end], past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            steps.append(step.logits)
    if not torch.allclose(torch.cat(steps, 1), whole, rtol=1e-3, atol=1e-3):
        yield (
            "KV cache: the transformers model gives other logits token by token than for the whole "
            "sequence. `apply` must treat all tokens independently."
        )
    folders = {name: scratch / name for name in ("transformers", "megatron", "back")}
    model.save_pretrained(folders["transformers"])
    to_megatron.plan_import(folders["transformers"]).write(folders["megatron"])
    to_hf.plan_export(folders["megatron"]).write(folders["back"])
    for name, other in (("import", "megatron"), ("export", "back")):
        found = Pair.open(folders["transformers"], folders[other]).compare(logits=name == "import")
        if not found.agrees:
            yield f"The {name} changes the model: {found}."
