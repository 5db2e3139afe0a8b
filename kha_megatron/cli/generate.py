"""``kha-megatron generate``: stream text from a Hugging Face model folder."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kha_megatron.cli import console
from kha_megatron.cli.options import AsJSON, Device, ModelFolder
from kha_megatron.errors import CheckpointError, ConfigError, in_one_line

if TYPE_CHECKING:
    import torch

DEFAULT_TEMPERATURE = 0.8


def generate(
    hf_dir: ModelFolder,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Flatness of the sampling, above 0.", show_default=f"{DEFAULT_TEMPERATURE}"
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the likeliest tokens of this total.", show_default="1.0"),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Of the sampling.")] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always take the likeliest token.")
    ] = False,
    device: Device = "auto",
    as_json: AsJSON = False,
) -> None:
    """Continue PROMPT with the model in HF_DIR, printing prompt and continuation as they come.

    Works for kha models and for the stock architectures of transformers. Nothing in the folder is
    executed: only safetensors are read, and remote code is never trusted.

    Examples:
      kha-megatron generate out/hf "def main(" --temperature 0.7 --seed 1
      kha-megatron generate out/hf "import os" --greedy --json | jq -r .text
    """
    sampling = _sampling(max_new_tokens, temperature, top_p, seed, greedy)
    check_model_folder(hf_dir)
    target = parse_device(device)
    with console.log.status(f"Loading {hf_dir}"):
        tokenizer, model = load(hf_dir, target)
    inputs = _encode(tokenizer, model, prompt, max_new_tokens)
    pieces: list[str] = []
    if not as_json:
        _write(prompt)
    started = time.perf_counter()
    tokens = _stream(tokenizer, model, inputs, sampling, seed, pieces.append if as_json else _write)
    seconds = time.perf_counter() - started
    if as_json:
        facts = {"seconds": seconds, "device": str(target)}
        text = "".join(pieces)
        console.print_json({"prompt": prompt, "text": text, "tokens": tokens} | facts)
        return
    _write("\n")
    console.log.print(
        f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} tokens/s) on {target}"
    )


def check_model_folder(hf_dir: Path) -> None:
    """Refuse a folder that cannot be generated from, before any weight is read.

    Raises:
        CheckpointError: the folder, its config, its safetensors or its tokenizer is missing or
            damaged, or its ``model_type`` is unknown.
    """
    if not hf_dir.is_dir():
        raise CheckpointError(f"{hf_dir} is no folder: name a Hugging Face model folder")
    from kha_megatron.checkpoint.hf_reader import HFCheckpoint
    from kha_megatron.conversion.companions import VOCABULARIES

    config = HFCheckpoint.open(hf_dir).config
    if not any((hf_dir / name).is_file() for name in VOCABULARIES):
        raise CheckpointError(
            f"{hf_dir} has no tokenizer ({', '.join(VOCABULARIES)}): "
            "copy the files of the tokenizer that the model was trained with into it"
        )
    from transformers import CONFIG_MAPPING

    import kha_megatron.hf  # noqa: F401 (registers the kha architecture)

    if config.get("model_type") not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{hf_dir / 'config.json'} has model_type {config.get('model_type')!r}, which is "
            "neither kha nor an architecture of the installed transformers: upgrade transformers"
        )


def load(hf_dir: Path, device: "torch.device", dtype: str = "auto") -> tuple[Any, Any]:
    """Tokenizer and model in evaluation mode; every weight comes from the folder.

    The class with an output layer; of models that transformers has with an encoder of pictures
    only, that one, which takes text as well.

    Args:
        hf_dir: the model folder.
        device: where to put the model.
        dtype: ``auto`` for the stored one, or ``float32``, ``bfloat16``, ``float16``.

    Raises:
        CheckpointError: transformers refuses the folder, or the weights do not match the config.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoTokenizer,
    )
    from transformers.models.auto import modeling_auto as known
    from transformers.utils import logging

    import kha_megatron.hf  # noqa: F401 (registers the kha architecture)

    logging.set_verbosity_error()  # what it warns of while loading is refused below
    logging.disable_progress_bar()
    safe = {"trust_remote_code": False, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(hf_dir, **safe)
        kind = AutoConfig.from_pretrained(hf_dir, **safe).model_type
        pictures = known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()
        only = kind in pictures - known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
        auto = AutoModelForImageTextToText if only else AutoModelForCausalLM
        model, info = auto.from_pretrained(
            hf_dir,
            **safe,
            use_safetensors=True,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # to name the weights below; transformers does not
        )
    except Exception as error:  # what transformers lacks, or does not expect, raises many kinds
        raise CheckpointError(
            f"{hf_dir} cannot be loaded ({type(error).__name__}): {in_one_line(error)}"
        ) from error
    for problem in ("missing", "unexpected", "mismatched"):
        # A mismatched key comes with its two shapes.
        keys = info[f"{problem}_keys"]
        if names := sorted(key if isinstance(key, str) else key[0] for key in keys):
            raise CheckpointError(
                f"{hf_dir}: {len(names)} {problem} weights, such as {names[0]}: "
                "config.json and the safetensors files are of different models"
            )
    return tokenizer, model.to(device).eval()


def _sampling(
    max_new_tokens: int,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    greedy: bool,
) -> dict[str, Any]:
    """The settings of ``model.generate``, complete: none is left to the folder's own defaults."""
    given = {"--temperature": temperature, "--top-p": top_p, "--seed": seed}
    if greedy and (clash := [name for name, value in given.items() if value is not None]):
        raise ConfigError(f"--greedy draws nothing, so leave out {', '.join(clash)}")
    if greedy:
        return {"max_new_tokens": max_new_tokens, "do_sample": False}
    temperature = DEFAULT_TEMPERATURE if temperature is None else temperature
    top_p = 1.0 if top_p is None else top_p
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"--temperature {temperature} must be above 0: or choose --greedy")
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p {top_p} must be above 0 and at most 1")
    return {
        "max_new_tokens": max_new_tokens,
        "do_sample": True,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": 0,  # transformers cuts to the best 50 unless told not to
    }


def parse_device(name: str) -> "torch.device":
    """``auto``, ``cpu``, ``cuda`` or ``cuda:1`` as a device that this machine has.

    Raises:
        ConfigError: anything else.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is no device: choose auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name!r} is not supported: choose auto, cpu or cuda")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"--device {name!r}: this machine has {count} CUDA devices: choose cpu")
    return device


def _encode(tokenizer: Any, model: Any, prompt: str, max_new_tokens: int) -> Any:
    """Tokens of the prompt on the model's device, checked against what the model can take."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    ids, config = inputs["input_ids"], model.config.get_text_config()
    if ids.numel() == 0:
        raise ConfigError("the prompt holds no token: write at least one character")
    check_tokens(ids, config.vocab_size)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and ids.shape[1] + max_new_tokens > limit:
        raise ConfigError(
            f"{ids.shape[1]} prompt tokens and --max-new-tokens {max_new_tokens} exceed the "
            f"{limit} positions the model was trained on: lower --max-new-tokens or the prompt"
        )
    return inputs.to(model.device)


def check_tokens(ids: "torch.Tensor", vocab_size: int) -> None:
    """Refuse tokens that a model does not know.

    Raises:
        CheckpointError: the tokenizer is of another model.
    """
    if ids.max() >= vocab_size:
        raise CheckpointError(
            f"the tokenizer makes token {int(ids.max())}, the model has {vocab_size}: "
            "the tokenizer is of another model"
        )


def _stream(
    tokenizer: Any,
    model: Any,
    inputs: Any,
    sampling: dict[str, Any],
    seed: int | None,
    write: Callable[[str], None],
) -> int:
    """Hand the continuation on as it comes; the number of new tokens."""
    import torch
    from transformers import GenerationConfig, TextStreamer

    class Pieces(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            write(text)

    stored = model.generation_config
    end = stored.eos_token_id if stored.eos_token_id is not None else tokenizer.eos_token_id
    first_end = end[0] if isinstance(end, list) else end
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else first_end
    if seed is not None:
        torch.manual_seed(seed)
    output = model.generate(
        **inputs,
        generation_config=GenerationConfig(**sampling, eos_token_id=end, pad_token_id=pad),
        streamer=Pieces(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    return output.shape[1] - inputs["input_ids"].shape[1]


def _write(text: str) -> None:
    """Text as it is, or with control characters shown as signs when a terminal would obey them."""
    stream = console.out.file
    stream.write(text.translate(console.VISIBLE) if stream.isatty() else text)
    stream.flush()
