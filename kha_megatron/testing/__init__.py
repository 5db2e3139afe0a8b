"""Tests for head mechanisms on the CPU.

Example (in a test of your own)::

    from kha_megatron.testing import check_mechanism
    from my_heads import Mine


    def test_mine():
        check_mechanism(Mine)
"""

import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kha_megatron.errors import ConfigError
from kha_megatron.heads import HeadFacts, HeadRows, HeadSizes, HeadTensor, Mechanism
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.registry import mechanism_types, use_files

SIZES = HeadSizes(query_heads=8, kv_heads=4, head_dim=6, hidden_size=40)
"""Awkward sizes, so that no two dimensions are equal."""
TOLERANCE = 1e-6  # relative to the norm, in float64

_OUR_MODULES = re.compile("[qkvo]_(proj|norm|knock)")
"""Modules of ``self_attn`` in our Hugging Face model."""
_VOCAB_SIZE = 56


def check_mechanism(
    mechanism: type[Mechanism],
    *,
    smooth: bool = True,
    **settings: Any,
) -> None:
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
        request = {
            "kha": kha.to_dict(),
            "smooth": smooth,
            "scratch": scratch,
        }
        mistake = _check_layouts(json.dumps(request))
        if mistake is not None:
            raise AssertionError(mistake)
        _raise_first(_find_wrong_exports(kha, Path(scratch)))


def _check_layouts(request: str) -> str | None:
    """Run :mod:`kha_megatron.testing.layouts` in a new process. Returns the first mistake."""
    result = subprocess.run(
        [sys.executable, "-m", "kha_megatron.testing.layouts", request],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    last_line = result.stdout.splitlines()[-1]
    mistake: str | None = json.loads(last_line)
    return mistake


def _raise_first(mistakes: Iterator[str]) -> None:
    for mistake in mistakes:
        raise AssertionError(mistake)


def _find_wrong_declarations(kha: HeadsConfig) -> Iterator[str]:
    """Check names, shapes and settings without running the mechanism."""
    yield from _find_wrong_names(kha)
    for tensor in kha.tensors(SIZES):
        heads = SIZES.heads(tensor.heads)
        if tensor.per_head and tensor.shape[0] != heads:
            yield (
                f"TP split of `{tensor.name}`: it is declared `per_head` with shape "
                f"{tensor.shape}, but dim 0 must be the number of {tensor.heads} heads ({heads})."
            )
    (mechanism,) = kha.mechanisms
    saved = json.dumps(mechanism.to_dict())
    loaded = type(mechanism).from_dict(json.loads(saved))
    if loaded != mechanism:
        yield f"The settings of {mechanism} change when they are saved as JSON."


def _find_wrong_names(kha: HeadsConfig) -> Iterator[str]:
    """Check the names of the mechanism's weights in Megatron and transformers."""
    (mechanism,) = kha.mechanisms
    prefix = f"{mechanism.name}_"
    weights: list[HeadTensor | HeadRows] = [*kha.tensors(SIZES), *kha.rows(SIZES)]
    exported_names = [weight.hf for weight in weights]
    for weight in weights:
        exported_name = weight.hf
        if not weight.name.startswith(prefix):
            yield f"The name of `{weight.name}` must start with `{prefix}`."
        is_duplicate = exported_names.count(exported_name) > 1
        is_taken = _OUR_MODULES.fullmatch(exported_name) is not None
        if is_duplicate or is_taken or not exported_name.isidentifier():
            yield (
                f"Export name of `{weight.name}` is {exported_name!r}. Set `hf` to a name that no "
                "other module in `self_attn` has."
            )


def is_supported(kha: HeadsConfig, *, qk_norm: bool) -> bool:
    """Check whether the mechanism supports models with, or without, QK-norm."""
    try:
        kha.check(HeadFacts(qk_norm=qk_norm))
    except ConfigError:
        return False
    return True


def _find_wrong_exports(kha: HeadsConfig, scratch: Path) -> Iterator[str]:
    """Check the transformers model, and its conversion to Megatron and back."""
    from kha_megatron.conversion import to_hf, to_megatron
    from kha_megatron.conversion.verify import Pair

    model = _build_hf_model(kha)
    if not _decodes_like_forward(model):
        yield (
            "KV cache: the transformers model gives other logits token by token than for the whole "
            "sequence. `apply` must treat all tokens independently."
        )
    original = scratch / "transformers"
    imported = scratch / "megatron"
    exported = scratch / "exported"
    model.save_pretrained(original)
    to_megatron.plan_import(original).write(imported)
    to_hf.plan_export(imported).write(exported)
    comparison = Pair.open(original, imported).compare(logits=True)
    if not comparison.agrees:
        yield f"The import changes the model: {comparison}."
    comparison = Pair.open(original, exported).compare(logits=False)
    if not comparison.agrees:
        yield f"The export changes the model: {comparison}."


def _build_hf_model(kha: HeadsConfig) -> Any:
    """Build a small transformers model with random weights."""
    import torch

    from kha_megatron.hf import KHAForCausalLM, KHAModelConfig

    kha_settings = {}
    for name, value in kha.to_dict(start=False).items():
        kha_settings[f"kha_{name}"] = value
    config = KHAModelConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=SIZES.hidden_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=SIZES.query_heads,
        num_key_value_heads=SIZES.kv_heads,
        head_dim=SIZES.head_dim,
        max_position_embeddings=32,
        use_qk_norm=is_supported(kha, qk_norm=True),
        attn_implementation="eager",
        **kha_settings,
        **kha.providers_entry,
    )
    torch.manual_seed(0)
    model = KHAForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def _decodes_like_forward(model: Any) -> bool:
    """Compare the logits of a prompt and three decoding steps with those of one forward pass."""
    import torch

    prompt_length = 4
    token_ids = torch.randint(_VOCAB_SIZE, (2, 7))
    with torch.no_grad():
        expected = model(token_ids).logits
        cache = None
        step_logits = []
        for step_ids in token_ids.split([prompt_length, 1, 1, 1], dim=1):
            step = model(step_ids, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            step_logits.append(step.logits)
    decoded = torch.cat(step_logits, dim=1)
    return torch.allclose(decoded, expected, rtol=1e-3, atol=1e-3)
