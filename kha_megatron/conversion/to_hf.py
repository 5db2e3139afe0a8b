"""Export checkpoints to Hugging Face format."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.hf_reader import CONFIG, INDEX, json_object
from kha_megatron.checkpoint.hf_writer import HFWriter
from kha_megatron.checkpoint.manifest import MANIFEST
from kha_megatron.checkpoint.safetensors_file import TensorEntry
from kha_megatron.checkpoint.staging import as_json, staged_folder
from kha_megatron.conversion.engine import Conversion, OnBytes, Plan, transfer
from kha_megatron.conversion.file_format import FileFormat
from kha_megatron.conversion.folding import fold_heads
from kha_megatron.conversion.hf_configs import (
    can_predict,
    fill_missing_tensors,
    from_hf_config,
    names_in_transformers_4,
    stock_type,
    to_hf_config,
)
from kha_megatron.conversion.hf_families import FAMILIES
from kha_megatron.conversion.model_card import CARD, model_card
from kha_megatron.conversion.sources import FLOAT_DTYPES, ModelSource, open_source
from kha_megatron.conversion.tensor_mappings import TensorSlot
from kha_megatron.conversion.tensor_names import EMBEDDING, tensor_slots
from kha_megatron.conversion.tokenizer_files import OUTPUT_PATTERNS
from kha_megatron.conversion.transforms import (
    add_zero_tensors,
    cast,
    center_and_round_norms,
    drop_predictions,
    remove_padding,
)
from kha_megatron.conversion.upcycling import upcycle_heads
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.config import ModelConfig

MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class HFPlan(Plan):
    """See :func:`plan_export`."""

    config: PreTrainedConfig
    max_shard_bytes: int
    heads_before_folding: HeadsConfig | None = None
    """KHA config of the source model, if we are folding it into the projections."""

    marker = MANIFEST
    patterns = (MANIFEST, CONFIG, INDEX, CARD, *OUTPUT_PATTERNS, "model*.safetensors", "*_kha.py")

    @property
    def entries(self) -> list[TensorEntry]:
        entries = []
        for slot in tensor_slots(self.source.model):
            tensors = self.source.read(slot, meta=True)
            named_tensors = self._name_tensors(slot, tensors)
            for name, tensor in (*named_tensors, *self._name_copies(named_tensors)):
                shape = tuple(tensor.shape)
                entries.append(TensorEntry(name, tensor.dtype, shape))
        return entries

    @property
    def _file_format(self) -> FileFormat:
        return FAMILIES[self.config.model_type].file_format

    def _name_tensors(
        self,
        slot: TensorSlot,
        tensors: Sequence[Tensor],
    ) -> list[tuple[str, Tensor]]:
        """Return the tensors of a slot as in the files, with their names."""
        model = self.source.model
        names = self._file_format.names(slot, model)
        tensors_in_files = self._file_format.write(slot, model, tensors)
        return list(zip(names, tensors_in_files, strict=True))

    def _name_copies(self, named_tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return the other names that the files have for some of the tensors."""
        originals = self._file_format.copies(self.source.model)
        named_copies = []
        for name, tensor in named_tensors:
            for copy, original in originals.items():
                if original == name:
                    named_copies.append((copy, tensor))
        return named_copies

    def write(
        self,
        target: Path,
        *,
        workers: int | None = None,
        on_bytes: OnBytes = lambda count: None,
    ) -> Conversion:
        source = self.source
        config = self.config
        entries = self.entries
        with staged_folder(target) as folder:
            writer = HFWriter(folder, entries, max_shard_bytes=self.max_shard_bytes)

            def put(slot: TensorSlot, tensors: list[Tensor]) -> None:
                named_tensors = self._name_tensors(slot, tensors)
                for name, tensor in named_tensors:
                    writer.write(name, tensor)
                for name, tensor in self._name_copies(named_tensors):
                    writer.write(name, tensor)
                    on_bytes(tensor.nbytes)  # `transfer` only reports tensors of the source

            not_finite = transfer(source, put, workers=workers, on_bytes=on_bytes)
            origin = source.checkpoint.identity()
            shards = writer.close(origin)
            config.dtype = entries[0].dtype
            config.save_pretrained(folder)
            _add_old_config_names(folder / CONFIG)
            source.tokenizer.write(folder)
            conversion = self.summarize(
                target,
                architecture=config.model_type,
                shards=shards,
                not_finite=not_finite,
            )
            card = model_card(
                conversion,
                source.model,
                config,
                source_identity=origin,
                name_or_path=getattr(source.checkpoint, "config", {}).get("_name_or_path"),
                projections=_projections(entries),
                heads_before_folding=self.heads_before_folding,
            )
            (folder / CARD).write_text(card, encoding="utf-8")
        return conversion


def _add_old_config_names(path: Path) -> None:
    """Add the keys that transformers 4 reads to a ``config.json``."""
    raw = json_object(path)
    content = as_json(raw | names_in_transformers_4(raw))
    path.write_text(content + "\n", encoding="utf-8")


def _projections(entries: Sequence[TensorEntry]) -> list[str]:
    """Return the names of all linear layers in the attention, e.g. for LoRA."""
    projections = set()
    for entry in entries:
        # e.g. model.layers.0.self_attn.q_proj.weight
        *parents, module_name, _ = entry.name.split(".")
        is_in_attention = len(parents) == 4 and parents[3] == "self_attn"
        if is_in_attention and "_proj" in module_name:
            projections.add(module_name)
    return sorted(projections)


def _fitting_architecture(model: ModelConfig, *, only_stock: bool) -> str:
    try:
        return stock_type(model)
    except CheckpointError:
        if only_stock:
            raise
        return "kha"


def _warn_of_router_dtype(source: ModelSource, config: PreTrainedConfig) -> None:
    """Log a warning if the exported model computes its routers in another dtype."""
    (embedding,) = source.read(TensorSlot(EMBEDDING), meta=True)
    if not source.model.experts or embedding.dtype == torch.float32:
        return
    exported_model = from_hf_config(config.to_dict())
    exported_in_float32 = bool(exported_model.moe_router_dtype)
    trained_in_float32 = bool(source.model.moe_router_dtype)
    if exported_in_float32 == trained_in_float32:
        return
    computes = "always" if exported_in_float32 else "never"
    trained = "with" if trained_in_float32 else "without"
    announce(
        f"{config.model_type} {computes} computes its routers in float32, but the model was "
        f"trained {trained} --moe-router-dtype. It may select other experts. To keep the dtype "
        "of the routers, use --architecture kha."
    )


def plan_export(
    path: Path,
    *,
    architecture: str | None = None,
    dtype: str | None = None,
    allow_overflow: bool = False,
    tokenizer: Path | None = None,
    fold: bool = False,
    upcycle: HeadsConfig | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> HFPlan:
    """Open a checkpoint and prepare to export it.

    Args:
        path: Megatron checkpoint or Hugging Face model.
        architecture: Target ``model_type``. With ``auto``, we pick a stock architecture if there is
            one that fits, or else ``kha``. The default is ``kha`` (``auto`` if ``fold`` is set).
        dtype: ``float32``, ``bfloat16`` or ``float16``. By default, dtypes do not change.
        allow_overflow: Allow values outside of the range of ``dtype`` to become infinite.
        tokenizer: Use this tokenizer instead of the model's own.
        fold: Fold KHA and other foldable mechanisms into the projections.
        upcycle: Head mechanisms to add to the model (without changing its outputs).
        max_shard_bytes: Maximum size per safetensors file.

    Raises:
        CheckpointError: If the checkpoint is corrupted, or cannot be exported to ``architecture``.
        ConfigError: If an argument is invalid.
    """
    if architecture not in (None, "auto", *FAMILIES):
        available = ", ".join(("auto", *FAMILIES))
        raise ConfigError(f"Unknown architecture {architecture!r}. Available: {available}.")
    source = remove_padding(open_source(path, tokenizer=tokenizer))
    # Hugging Face models do not have the limitations of Megatron's GPTModel
    source = replace(source, model=replace(source.model, gpt_model=False))
    heads_before_folding = None
    if fold:
        heads_before_folding = source.model.kha
        source = fold_heads(source, heads_before_folding)
    if upcycle is not None:
        source = upcycle_heads(source, upcycle)
    if dtype is not None:
        source = cast(source, FLOAT_DTYPES[dtype], allow_overflow=allow_overflow)
    if architecture is None:
        architecture = "auto" if fold else "kha"
    if architecture == "auto":
        # models with partly folded matrices (`kha_folded`) need the kha architecture
        only_stock = fold and not source.model.kha_folded
        architecture = _fitting_architecture(source.model, only_stock=only_stock)
    if not can_predict(source.model, architecture):
        source = drop_predictions(source, f"{architecture} does not support them")
    if FAMILIES[architecture].has_zero_centered_norms:
        source = center_and_round_norms(source)
    config = to_hf_config(source.model, architecture)
    for name, value in source.tokenizer.token_ids.items():
        setattr(config, name, value)
    _warn_of_router_dtype(source, config)
    source = add_zero_tensors(source, fill_missing_tensors(source.model, architecture))
    return HFPlan(
        source=source,
        config=config,
        max_shard_bytes=max_shard_bytes,
        heads_before_folding=heads_before_folding,
    )
