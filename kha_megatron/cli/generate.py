"""``kha-megatron generate``: generate text with a Hugging Face model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kha_megatron.cli import console
from kha_megatron.cli.options import AsJSON, Device, HeadsFrom
from kha_megatron.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

_NO_LIMIT = 2**31
"""Used for models without a maximum length."""


def generate(
    hf_dir: Annotated[Path, typer.Argument(help="Path to a Hugging Face model directory.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_new_tokens: Annotated[
        int, typer.Option(min=1, max=2**31, help="Maximum number of tokens to generate.")
    ] = 64,
    temperature: Annotated[float, typer.Option(min=1e-3, help="Sampling temperature.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Random seed for sampling.")] = 0,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Use greedy decoding instead of sampling.")
    ] = False,
    device: Device = "auto",
    heads_from: HeadsFrom = None,
    as_json: AsJSON = False,
) -> None:
    """Generate text with a Hugging Face model, with or without KHA.

    This is meant for a quick look at a model. For other generation settings, use transformers or
    vLLM directly.

    Examples:
      kha-megatron generate out/hf "def main(" --temperature 0.7 --seed 1
      kha-megatron generate out/hf "import os" --greedy --json | jq -r .text
    """
    import torch
    from transformers import GenerationConfig, TextStreamer

    tokenizer, model = load_model(hf_dir, parse_device(device))
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    check_tokens(inputs.input_ids, model, max_new_tokens)
    chunks: list[str] = []

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if as_json:
                chunks.append(text)
            else:
                _write(text)

    settings: dict[str, Any] = {"do_sample": False}
    if not greedy:  # transformers uses top_k=50 by default
        settings = {"do_sample": True, "temperature": temperature, "top_k": 0}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        **_special_tokens(model, tokenizer),
        **settings,
    )
    torch.manual_seed(seed)
    if not as_json:
        _write(prompt)
    sequences = model.generate(
        **inputs,
        generation_config=config,
        streamer=Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    if as_json:
        _, total_length = sequences.shape
        _, prompt_length = inputs.input_ids.shape
        console.print_json(
            {
                "prompt": prompt,
                "text": "".join(chunks),
                "tokens": total_length - prompt_length,
            }
        )
    else:
        _write("\n")


def _special_tokens(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the IDs of the end and padding tokens. A model can have several end tokens."""
    end_token_id = model.generation_config.eos_token_id
    if end_token_id is None:
        end_token_id = tokenizer.eos_token_id
    pad_token_id = tokenizer.pad_token_id
    if pad_token_id is None and isinstance(end_token_id, list):
        pad_token_id = end_token_id[0]
    elif pad_token_id is None:
        pad_token_id = end_token_id
    return {"eos_token_id": end_token_id, "pad_token_id": pad_token_id}


def load_model(hf_dir: Path, device: "torch.device") -> tuple[Any, Any]:
    """Load a tokenizer and a model (in this order) for inference. Never executes remote code.

    Raises:
        CheckpointError: If the model cannot be loaded or the weights do not match the config.
        ConfigError: If the tokenizer cannot be loaded.
    """
    from kha_megatron.checkpoint.hf_reader import HFCheckpoint
    from kha_megatron.conversion.tokenizer_files import load_hf_tokenizer
    from kha_megatron.conversion.verify import load_hf_model

    HFCheckpoint.open(hf_dir)  # checks the files
    with console.log.status(f"Loading {hf_dir}"):
        tokenizer = load_hf_tokenizer(hf_dir)
        model = load_hf_model(hf_dir, dtype="auto")
    return tokenizer, model.to(device).eval()


def parse_device(name: str) -> "torch.device":
    """Parse ``--device`` (``auto``, ``cpu``, ``cuda`` or e.g. ``cuda:1``)."""
    import torch

    count = torch.cuda.device_count()
    available = ["cpu"]
    if count:
        available.append("cuda")
    for index in range(count):
        available.append(f"cuda:{index}")
    if name == "auto":
        name = "cuda" if count else "cpu"
    if name not in available:
        raise ConfigError(
            f"--device {name!r} is not available. Choose auto, cpu or one of {count} CUDA devices."
        )
    return torch.device(name)


def check_tokens(token_ids: "torch.Tensor", model: Any, new_tokens: int = 0) -> None:
    """Check that token IDs are in the vocabulary and that the sequence is not too long.

    Args:
        token_ids: int64 ``[1, length]``.
        new_tokens: Number of tokens that will be generated.
    """
    config = model.config.get_text_config()
    if token_ids.numel() and token_ids.max() >= config.vocab_size:
        raise CheckpointError(
            f"Token ID {int(token_ids.max())} is out of range for the model's vocabulary of size "
            f"{config.vocab_size}. Does the tokenizer belong to this model?"
        )
    max_length = getattr(config, "max_position_embeddings", None) or _NO_LIMIT
    length = token_ids.shape[1]
    if length == 0 or length + new_tokens > max_length:
        generated = f" and {new_tokens} new tokens" if new_tokens else ""
        raise ConfigError(
            f"The model supports 1 to {max_length} tokens in total (max_position_embeddings), but "
            f"the input has {length} tokens{generated}."
        )


def _write(text: str) -> None:
    """Write to stdout. Control characters are replaced if stdout is a terminal."""
    stream = console.out.file
    if stream.isatty():
        text = console.replace_control_characters(text)
    stream.write(text)
    stream.flush()
