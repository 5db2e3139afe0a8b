"""Time decoding with transformers: exported models beside their baseline without KHA.

The baseline is a stock model with random weights. `kha-megatron convert` makes the others of it:
`mlp` is a kha model with KHA-MLP on the values, `linear` one with linear matrices on q, k and v,
and `folded` is what remains of that when they are folded: a stock model again.

Each turn generates the given number of tokens for every sequence of the batch, greedily, after a
short prompt; all models take turns, in another order each time. Printed are tokens per second, the
ratio of times to the baseline turn by turn, and the bytes of keys and values that the cache holds
at the end. With a static cache transformers compiles the model, on a CPU because it is asked to
here (needs a C++ compiler); with a dynamic one it does not.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from bench import in_words, positive, within
from measuring import Spread, interleaved, ratios
from transformers import AutoModelForCausalLM, CompileConfig, Qwen3Config, Qwen3MoeConfig

import kha_megatron.hf  # noqa: F401, registers the architecture
from kha_megatron.config import KHAConfig
from kha_megatron.conversion import to_hf
from kha_megatron.recipes.paper import SHAPES, VOCAB_SIZE, Shape

EXAMPLE = """example:
  python tools/bench.py decode --shape dense-1.7b --json benchmarks/decode.json
  python tools/bench.py decode --caches static --batches 1
"""

SMALL = Shape(layers=4, hidden=512, ffn=1536)
HEADS, GROUPS, HEAD_DIM = 32, 4, 128  # of the paper's models

DEFAULTS = {
    "cuda": {
        "shape": "dense-1.7b",
        "batches": [1, 64],
        "prompt": 128,
        "new": 128,
        "caches": ["dynamic", "static"],
        "dtype": "bfloat16",
        "repetitions": 10,
    },
    "cpu": {
        "shape": "small",
        "batches": [1, 8],
        "prompt": 16,
        "new": 16,
        "caches": ["dynamic", "static"],
        "dtype": "float32",
        "repetitions": 5,
    },
}

BASELINE = "baseline"
CONTENDERS = ("mlp", "linear", "folded")
AT_MOST = {"mlp": 1.01}
"""Largest ratio of times to the baseline that is good enough. A folded model has to be the
baseline's class with the baseline's cache, and so needs no such number."""


def save_baseline(name: str, dtype: torch.dtype, folder: Path) -> None:
    """A stock Qwen3 model of these sizes with random weights."""
    shape = SMALL if name == "small" else SHAPES[name]
    sizes = {
        "vocab_size": 4096 if name == "small" else VOCAB_SIZE,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": True,
    }
    config = Qwen3Config(**sizes)
    if shape.experts:
        total, active = shape.experts
        experts = {"num_experts": total, "num_experts_per_tok": active, "norm_topk_prob": True}
        config = Qwen3MoeConfig(**sizes, **experts, moe_intermediate_size=shape.ffn)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)


def save_models(
    name: str, dtype: torch.dtype, folder: Path, contenders: Collection[str] = CONTENDERS
) -> dict[str, Path]:
    """The folders of the baseline and of these contenders."""
    folders = {model: folder / model for model in (BASELINE, *CONTENDERS)}
    save_baseline(name, dtype, folders[BASELINE])
    needed = {"linear" if contender == "folded" else contender for contender in contenders}
    for contender in needed:
        kha = KHAConfig.from_preset(f"kha_{contender}")
        to_hf.plan(folders[BASELINE], upcycle=kha).write(folders[contender])
    if "folded" in contenders:
        to_hf.plan(folders["linear"], fold=True).write(folders["folded"])
    return {model: path for model, path in folders.items() if model in (BASELINE, *contenders)}


def in_memory(model: Any) -> Any:
    """``model`` in evaluation mode, its weights copied out of the mapped file.

    How a file's pages lie in memory makes its products on a CPU up to a tenth slower, for one model
    by as much in every turn.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval()


def generation(
    model: Any, prompt: torch.Tensor, new: int, cache: str
) -> Callable[[], tuple[int, int]]:
    """Generate greedily; returns the number of new tokens and the bytes of the cache."""
    compiled = CompileConfig()
    compiled._compile_all_devices = True  # transformers' switch for others than GPUs

    def call() -> tuple[int, int]:
        result = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation=cache,
            compile_config=compiled if cache == "static" else None,
            return_dict_in_generate=True,
        )
        layers = result.past_key_values.layers
        held = sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))
        return result.sequences.numel() - prompt.numel(), held

    return call


def measure(
    models: dict[str, Any], batch: int, cache: str, given: argparse.Namespace
) -> dict[str, Any]:
    """Tokens per second and cache bytes of every model."""
    device = torch.device(given.device)
    generator = torch.Generator().manual_seed(batch)
    vocabulary = models[BASELINE].config.vocab_size
    prompt = torch.randint(vocabulary, (batch, given.prompt), generator=generator).to(device)
    calls = {name: generation(model, prompt, given.new, cache) for name, model in models.items()}
    done = {name: call() for name, call in calls.items()}
    tokens = {made for made, _ in done.values()}
    if tokens != {batch * given.new}:
        raise SystemExit(f"error: {tokens} tokens were generated instead of {batch * given.new}")
    times = interleaved(calls, device, repetitions=given.repetitions, warm_up=1)
    over = {name: ratios(t, times[BASELINE]) for name, t in times.items()}
    return {
        "batch": batch,
        "cache": cache,
        "classes": {name: type(model).__name__ for name, model in models.items()},
        "tokens_per_second": {
            name: Spread.of([batch * given.new / seconds for seconds in t])
            for name, t in times.items()
        },
        "over_baseline": over,
        "cache_bytes": {name: held for name, (_, held) in done.items()},
        "targets": {
            name: judged(name, models, done, over[name])
            for name in models
            if name in ("folded", *AT_MOST)
        },
    }


def judged(
    name: str, models: dict[str, Any], done: dict[str, tuple[int, int]], ratio: Spread
) -> dict[str, Any]:
    """What became of the target: the cache of the baseline, and its class or nearly its time."""
    same_cache = done[name] == done[BASELINE]
    if (limit := AT_MOST.get(name)) is not None:
        found = within(limit, ratio)
        found["met"] &= same_cache
        return {"text": f"at most {limit:g}, same cache", **found}
    same_class = type(models[name]) is type(models[BASELINE])
    return {"text": "the baseline's class and cache", "met": same_cache and same_class}


HEADER = ["batch", "cache", "model", "class", "tokens/s", "time over baseline", "cache bytes"]
HEADER += ["target"]


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Of the table."""
    found = []
    for name, speed in result["tokens_per_second"].items():
        target = result["targets"].get(name)
        word = f"{in_words(target)} ({target['text']})" if target else ""
        cells = [str(result["batch"]), result["cache"], name, result["classes"][name]]
        over = result["over_baseline"][name].text(4)
        found.append([*cells, speed.text(1), over, f"{result['cache_bytes'][name]:,}", word])
    return found


def options(add: Callable[..., Any]) -> None:
    """What the user may ask for; sizes depend on the device."""
    add("--shape", choices=["small", *SHAPES], help="default: dense-1.7b; on a CPU: small")
    add("--models", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="default: all")
    add("--batches", nargs="+", type=positive, help="sequences at once (default: 1 64; CPU: 1 8)")
    add("--prompt", type=positive, help="tokens before the generated ones")
    add("--new", type=positive, help="tokens to generate")
    add("--caches", nargs="+", choices=["dynamic", "static"])
    add("--dtype", choices=["bfloat16", "float16", "float32"])
    add("--folder", type=Path, help="where to put the models meanwhile (default: a temporary one)")


def results(given: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """One for each batch and cache; the models are made before and deleted."""
    dtype = getattr(torch, given.dtype)
    with tempfile.TemporaryDirectory(prefix="kha-decode-", dir=given.folder) as folder:
        made = save_models(given.shape, dtype, Path(folder), given.models)
        models = {
            name: in_memory(AutoModelForCausalLM.from_pretrained(path, dtype=dtype)).to(device)
            for name, path in made.items()
        }
    for batch, cache in itertools.product(given.batches, given.caches):
        print(f"batch {batch}, {cache} cache", file=sys.stderr, flush=True)
        yield measure(models, batch, cache, given)
