"""Time decoding with transformers: exported models and their baseline without KHA.

The baseline is a stock model with random weights. `kha-megatron convert` makes the others from it.
`mlp` is a kha model with KHA-MLP on the values, and `mlp-folded` the same with the matrices folded
into the projections. `linear` has linear matrices on q, k and v, and `folded` is `linear` with its
matrices folded, a stock model again.

Each turn generates the given number of tokens greedily for every sequence of the batch. The caches
`dynamic` and `static` use generate(). With a static cache transformers compiles the model (on a CPU
this needs a C++ compiler). `step` is a static cache and a loop over one compiled step without
generate() and its logits processors, as a server has. On a GPU it is a CUDA graph. The prompt is
not timed. On a CPU the step is only traced to one graph, not compiled.
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
from torch import Tensor
from transformers import AutoModelForCausalLM, CompileConfig, Qwen3Config, StaticCache

import kha_megatron.hf  # noqa: F401, registers the architecture
from kha_megatron.conversion import to_hf
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.recipes.paper import MODEL_SIZES, VOCAB_SIZE, ModelSize

STEP = "step"
CACHES = ("dynamic", "static", STEP)
SMALL = ModelSize(layers=4, hidden=512, ffn=1536)
TINY = ModelSize(layers=16, hidden=32, ffn=64)
"""So small that launching operators takes all the time, as in eager decoding on a GPU."""
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
HEADER = ["batch", "cache", "model", "class", "tokens/s", "time over baseline"]
HEADER += ["weight bytes over baseline", "cache bytes", "target"]


def make_models(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Save and convert the models in ``folder`` and return them by contender, on the device."""
    dtype = getattr(torch, args.dtype)
    heads = {  # of the paper's models
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    vocabulary = 4096
    if args.shape == "tiny":
        shape = TINY
        heads = {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        }
    elif args.shape == "small":
        shape = SMALL
    else:
        shape = MODEL_SIZES[args.shape]
        vocabulary = VOCAB_SIZE
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        tie_word_embeddings=True,
        **heads,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder / BASELINE)
    for name in {FOLDED.get(model, model) for model in args.models}:
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


class StepDecoder:
    """Greedy decoding with a static cache and one compiled step.

    ``prompt`` is ``[batch, tokens]``. Each call continues it by ``new`` tokens and overwrites those
    of the call before.
    """

    def __init__(self, model: Any, prompt: Tensor, new: int) -> None:
        self.model = model
        self.new = new
        self.length = prompt.shape[1]
        self.cache = StaticCache(config=model.config, max_cache_len=self.length + new)
        with torch.no_grad():
            logits = model(prompt, past_key_values=self.cache, use_cache=True).logits
        self.first = logits[:, -1:].argmax(-1)
        if prompt.device.type == "cuda":
            settings = {"mode": "reduce-overhead"}
        else:
            settings = {"backend": "eager"}
        self.step = torch.compile(self._step, fullgraph=True, **settings)

    def _step(self, token: Tensor, position: Tensor) -> Tensor:
        """Return the next token for token and position, all ``[batch, 1]``."""
        output = self.model(
            token,
            past_key_values=self.cache,
            use_cache=True,
            position_ids=position,
        )
        return output.logits[:, -1:].argmax(-1)

    @torch.no_grad()
    def decode(self) -> Tensor:
        """Return the new tokens ``[batch, new]``."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.length)
        token = self.first
        position = torch.full_like(token, self.length)
        tokens = [token]
        for _ in range(self.new - 1):
            torch.compiler.cudagraph_mark_step_begin()
            token = self.step(token, position).clone()  # the graph overwrites its output
            position = position + 1
            tokens.append(token)
        return torch.cat(tokens, 1)

    def cache_bytes(self) -> int:
        """Return the bytes of keys and values."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)


def measure(
    find_models: Callable[[], dict[str, Any]], batch: int, cache: str, args: Any
) -> dict[str, Any]:
    """Return tokens per second, weight bytes and cache bytes of every model.

    ``find_models`` makes the models in its first call.
    """
    models = find_models()
    generator = torch.Generator().manual_seed(batch)
    vocabulary = models[BASELINE].config.vocab_size
    prompt = torch.randint(vocabulary, (batch, args.prompt), generator=generator)
    prompt = prompt.to(args.device)
    calls: dict[str, Callable[[], Any]] = {}
    cache_bytes = {}
    torch.compiler.reset()
    for name, model in models.items():
        if cache == STEP:
            decoder = StepDecoder(model, prompt, args.new)
            calls[name] = decoder.decode
            cache_bytes[name] = decoder.cache_bytes()
        else:
            calls[name] = functools.partial(generate, model, prompt, args.new, cache)
            cache_bytes[name] = calls[name]()
    weight_bytes = {}
    for name, model in models.items():
        weight_bytes[name] = sum(parameter.nbytes for parameter in model.parameters())
    device = torch.device(args.device)
    # CUDA graphs are recorded in the first two calls
    times = interleaved(calls, device, repetitions=args.repetitions, warm_up=2)
    return {
        "batch": batch,
        "cache": cache,
        "classes": {name: type(model).__name__ for name, model in models.items()},
        "tokens_per_second": spreads(times, lambda seconds: batch * args.new / seconds),
        "over_baseline": {name: ratios(t, times[BASELINE]) for name, t in times.items()},
        "weight_bytes": weight_bytes,
        "cache_bytes": cache_bytes,
    }


def rows(result: dict[str, Any]) -> list[list[str]]:
    lines = []
    for name, speed in result["tokens_per_second"].items():
        ratio = result["over_baseline"][name]
        weight_bytes = result["weight_bytes"][name] / result["weight_bytes"][BASELINE]
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
                f"{weight_bytes:.4f}",
                f"{cache_bytes:,}",
                target,
            ]
        )
    return lines


def options(add: Callable[..., Any]) -> None:
    dense = [name for name, shape in MODEL_SIZES.items() if not shape.experts]
    add(
        "--shape",
        choices=["tiny", "small", *dense],
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
        choices=CACHES,
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
