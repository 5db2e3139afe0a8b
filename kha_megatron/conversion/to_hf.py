"""Any source to a Hugging Face folder, tensor by tensor."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedConfig

from kha_megatron.checkpoint.hf_writer import HFWriter, TensorEntry
from kha_megatron.checkpoint.staging import staged_folder
from kha_megatron.conversion.companions import Companions
from kha_megatron.conversion.engine import OnBytes, default_workers, transfer
from kha_megatron.conversion.hf_expression import expressed, stock_type, to_hf_config
from kha_megatron.conversion.opening import Opened, open_checkpoint, parse_dtype
from kha_megatron.conversion.sources import Source
from kha_megatron.conversion.table import Place, places
from kha_megatron.conversion.transforms import Cast, Expressed

MAX_SHARD_BYTES = 5 * 10**9
AUTO = "auto"


@dataclass(frozen=True)
class Conversion:
    """What was written."""

    path: Path
    architecture: str
    """``model_type`` of a Hugging Face folder, ``megatron`` otherwise."""
    tensors: int
    parameters: int
    size: int
    """Bytes of all tensors."""
    shards: int
    dtype: str
    tokenizer: str | None
    """Where the tokenizer came from; None if the source had none that can be saved."""
    arguments: list[str] = field(default_factory=list)
    """Of a Megatron checkpoint: what a training from it needs on its command line."""


@dataclass(frozen=True)
class HFPlan:
    """Everything checked and read but the tensors: nothing has been written yet."""

    source: Source
    config: PreTrainedConfig
    companions: Companions

    @property
    def size(self) -> int:
        """Bytes of the tensors to write."""
        return sum(self.source.nbytes(place) for place in places(self.source.model))


def plan(
    source: Path,
    *,
    architecture: str = "kha",
    dtype: str | None = None,
    tokenizer: Path | None = None,
) -> HFPlan:
    """Open a checkpoint and decide what the Hugging Face folder will hold.

    Args:
        source: a checkpoint of either side.
        architecture: a ``model_type``; ``auto`` is the stock one that fits a model without KHA,
            and ``kha`` otherwise.
        dtype: a key of ``opening.DTYPES``; None keeps each tensor's own.
        tokenizer: a tokenizer folder instead of the model's own.

    Raises:
        CheckpointError: the checkpoint is damaged, or cannot be expressed; the message says why.
        ConfigError: the dtype or the tokenizer folder does not exist.
    """
    parse_dtype(dtype)
    return plan_for(open_checkpoint(source, tokenizer=tokenizer), architecture, dtype)


def plan_for(opened: Opened, architecture: str, dtype: str | None) -> HFPlan:
    """The same for an open source, which may be transformed."""
    source, companions = opened.source, opened.companions
    if architecture == AUTO:
        architecture = "kha" if source.model.kha.variants else stock_type(source.model)
    config = to_hf_config(source.model, architecture)
    for name, value in companions.token_ids.items():
        setattr(config, name, value)
    source = Expressed(source, expressed(source.model, architecture))
    if dtype is not None:
        source = Cast(source, parse_dtype(dtype))
    return HFPlan(source, config, companions)


def convert(
    planned: HFPlan,
    target: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    workers: int | None = None,
    on_bytes: OnBytes = lambda count: None,
) -> Conversion:
    """Write the folder: safetensors shards, configuration, generation configuration, tokenizer.

    Args:
        planned: from :func:`plan`.
        target: a folder; it is replaced at the end, all at once.
        max_shard_bytes: as in ``save_pretrained``.
        workers: threads; None for one a core.
        on_bytes: called with the bytes of each tensor written.

    Raises:
        CheckpointError: a shard of the source is damaged.
        OutputError: the disk refuses; what was at ``target`` is still there.
    """
    source, config = planned.source, planned.config
    entries = list(_entries(source))
    with staged_folder(target) as folder:
        with HFWriter(folder, entries, max_shard_bytes=max_shard_bytes) as writer:

            def put(place: Place, parts: list[Tensor]) -> None:
                for name, part in zip(place.hf_names(source.model), parts, strict=True):
                    writer.write(name, part)

            transfer(source, put, workers=workers or default_workers(), on_bytes=on_bytes)
            written = writer.close(source.identity())
        config.dtype = entries[0].dtype
        config.save_pretrained(folder)
        planned.companions.write(folder)
    return Conversion(
        path=target,
        architecture=config.model_type,
        tensors=written.tensors,
        parameters=written.parameters,
        size=written.size,
        shards=written.shards,
        dtype=str(config.dtype).removeprefix("torch."),
        tokenizer=planned.companions.origin,
    )


def _entries(source: Source) -> list[TensorEntry]:
    """Name, dtype and shape of every tensor, in the order of the model."""
    return [
        TensorEntry(name, part.dtype, tuple(part.shape))
        for place in places(source.model)
        for name, part in zip(
            place.hf_names(source.model), source.read(place, meta=True), strict=True
        )
    ]
