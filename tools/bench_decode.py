"""Time decoding with transformers: exported models and their baseline without KHA.

The baseline is a stock model with random weights. `kha-megatron convert` makes the others from it.
`mlp` is a kha model with KHA-MLP on the values, `linear` has linear matrices on q, k and v, and
`folded` is `linear` with its matrices folded, a stock model again. `mlp-folded` is `mlp` with its
matrices folded, a kha model with a GLU in each layer.

Each turn generates the given number of tokens greedily for every sequence of the batch. With a
static cache transformers compiles the model (on a CPU this needs a C++ compiler).
"""

import argparse
import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench import positive
from measuring import Cells, interleaved, ratios, spreads
from transformers import AutoModelForCausalLM, CompileConfig, Qwen3Config

import kha_megatron.hf  # noqa: F401, registers the architecture
from kha_megatron.conversion import to_hf
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.recipes.paper import MODEL_SIZES, VOCAB_SIZE, ModelSize

SMALL = ModelSize(layers=4, hidden=512, ffn=1536)
BASELINE = "baseline"
FOLDED = {"folded": "linear", "mlp-folded": "mlp"}
"""Contenders that are made by folding another one."""
CONTENDERS = ("mlp", "linear", *FOLDED)
AT_MOST = {"mlp-folded": 1.01, "folded": 1.01}
"""Targets: the largest ratio of times to the baseline."""

DEFAULTS = {
    "cuda": {
        "shape": "dense-1.7b",
        "batches": [1, 64],
        "prompt": 128,
        "new": 128,
        "dtype": "bfloat16",
        "repetitions": 10,
    },
    "cpu": {
        "shape": "small",
        "batches": [1, 8],
        "prompt": 16,
        "new": 16,
        "dtype": "float32",
        "repetitions": 5,
    },
}
HEADER = ["batch", "cache", "model", "class", "tokens/s", "time over baseline", "cache bytes"]
HEADER += ["target"]


def make_models(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Save and convert the models in ``folder`` and return them on the device."""
    dtype = getattr(torch, args.dtype)
    shape = SMALL
    vocabulary = 4096
    if args.shape != "small":
        shape = MODEL_SIZES[args.shape]
        vocabulary = VOCAB_SIZE
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=32,  # of the paper's models
        num_key_value_heads=4,
        head_dim=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder / BASELINE)
    unfolded = {FOLDED.get(name, name) for name in args.models}
    for name in unfolded:
        kha = HeadsConfig.from_preset(f"kha_{name}")
        to_hf.plan_export(folder / BASELINE, upcycle=kha).write(folder / name)
    for name, source in FOLDED.items():
        if name in args.models:
            to_hf.plan_export(folder / source, fold=True).write(folder / name)
    models = {}
    for name in (BASELINE, *args.models):
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=dtype)
        for parameter in model.parameters():
            # products with weights in mapped files are up to a tenth slower on a CPU
            parameter.data = parameter.data.clone()
        models[name] = model.eval().to(args.device)
    return models


def generate(model: Any, prompt: torch.Tensor, new: int, cache: str) -> int:
    """Generate ``new`` tokens greedily and return the bytes of the cache."""
    compiled = CompileConfig()
    compiled._compile_all_devices = True  # by default transformers compiles on GPUs only
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
    return sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))


def measure(find: Callable[[], dict], batch: int, cache: str, args: Any) -> dict[str, Any]:
    """Return tokens per second and cache bytes of every model. ``find`` makes the models once."""
    models = find()
    generator = torch.Generator().manual_seed(batch)
    vocabulary = models[BASELINE].config.vocab_size
    prompt = torch.randint(vocabulary, (batch, args.prompt), generator=generator)
    prompt = prompt.to(args.device)
    calls = {
        name: functools.partial(generate, model, prompt, args.new, cache)
        for name, model in models.items()
    }
    cache_bytes = {name: call() for name, call in calls.items()}
    device = torch.device(args.device)
    times = interleaved(calls, device, repetitions=args.repetitions, warm_up=1)
    return {
        "batch": batch,
        "cache": cache,
        "classes": {name: type(model).__name__ for name, model in models.items()},
        "tokens_per_second": spreads(times, lambda seconds: batch * args.new / seconds),
        "over_baseline": {name: ratios(t, times[BASELINE]) for name, t in times.items()},
        "cache_bytes": cache_bytes,
    }


def rows(result: dict[str, Any]) -> list[list[str]]:
    lines = []
    for name, speed in result["tokens_per_second"].items():
        ratio = result["over_baseline"][name]
        cache_bytes = result["cache_bytes"][name]
        target = ratio.verdict(AT_MOST[name]) if name in AT_MOST else ""
        if target and cache_bytes != result["cache_bytes"][BASELINE]:
            target = "MISSED: the cache is not the baseline's"
        lines.append(
            [
                str(result["batch"]),
                result["cache"],
                name,
                result["classes"][name],
                speed.text(1),
                ratio.text(4),
                f"{cache_bytes:,}",
                target,
            ]
        )
    return lines


def options(add: Callable[..., Any]) -> None:
    dense = [name for name, shape in MODEL_SIZES.items() if not shape.experts]
    add(
        "--shape",
        choices=["small", *dense],
        help="default: dense-1.7b; on a CPU: small",
    )
    add(
        "--models",
        nargs="+",
        choices=CONTENDERS,
        default=CONTENDERS,
        help="default: all",
    )
    add(
        "--batches",
        nargs="+",
        type=positive,
        help="batch sizes (default: 1 64; on a CPU: 1 8)",
    )
    add("--prompt", type=positive, help="tokens of the prompt")
    add("--new", type=positive, help="tokens to generate")
    add(
        "--caches",
        nargs="+",
        choices=["dynamic", "static"],
        default=["dynamic", "static"],
    )
    add("--dtype", choices=["bfloat16", "float16", "float32"])


def cells(args: argparse.Namespace, device: torch.device) -> Cells:
    """Yield the name of each batch size and cache, and a function that measures it."""

    @functools.cache
    def models() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="kha-decode-") as folder:
            return make_models(args, Path(folder))

    for batch, cache in itertools.product(args.batches, args.caches):
        run = functools.partial(measure, models, batch, cache, args)
        yield f"batch {batch}, {cache} cache", run
