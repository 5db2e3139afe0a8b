"""Any source to a Hugging Face folder, tensor by tensor."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedConfig

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.hf_reader import CONFIG, INDEX
from kha_megatron.checkpoint.hf_writer import HFWriter
from kha_megatron.checkpoint.manifest import MANIFEST
from kha_megatron.checkpoint.safetensors_file import TensorEntry
from kha_megatron.checkpoint.staging import staged_folder
from kha_megatron.config import KHAConfig
from kha_megatron.conversion.companions import COMPANIONS
from kha_megatron.conversion.dialects import Dialect
from kha_megatron.conversion.engine import Conversion, OnBytes, Plan, transfer
from kha_megatron.conversion.hf_configs import (
    FAMILIES,
    expressed,
    has_stock_heads,
    stock_type,
    to_hf_config,
)
from kha_megatron.conversion.model_card import CARD, model_card
from kha_megatron.conversion.sources import open_source, parse_dtype
from kha_megatron.conversion.table import Place
from kha_megatron.conversion.transforms import Cast, Expressed, Upcycled, folded
from kha_megatron.hf import KHAModelConfig
from kha_megatron.hf.modeling_kha import vllm_obstacle

MAX_SHARD_BYTES = 5 * 10**9
AUTO = "auto"


@dataclass(frozen=True)
class HFPlan(Plan):
    """A model in one of transformers' architectures, and how large its files may become."""

    config: PreTrainedConfig
    max_shard_bytes: int
    folded: KHAConfig | None = None
    """What is folded into projections; None if nothing is."""

    mark = MANIFEST
    holds = (MANIFEST, CONFIG, INDEX, CARD, *COMPANIONS, "model*.safetensors", "*_kha.py")

    @property
    def dialect(self) -> Dialect:
        """How the architecture's files hold the tensors."""
        return FAMILIES[self.config.model_type].dialect

    @property
    def entries(self) -> list[TensorEntry]:
        """See ``Plan``."""
        found, model = [], self.source.model
        for place, _ in self.source.entries():
            parts = self.dialect.written(place, model, self.source.read(place, meta=True))
            for name, part in zip(self.dialect.names(place, model), parts, strict=True):
                found.append(TensorEntry(name, part.dtype, tuple(part.shape)))
        return found

    def write(
        self, target: Path, *, workers: int | None = None, on_bytes: OnBytes = lambda count: None
    ) -> Conversion:
        """Safetensors shards, configuration, generation configuration, tokenizer and a README; see
        ``Plan``."""
        source, config, entries = self.source, self.config, self.entries
        dialect, model, lost = self.dialect, self.source.model, dict[Place, int]()
        with staged_folder(target) as folder:
            writer = HFWriter(folder, entries, max_shard_bytes=self.max_shard_bytes)

            def put(place: Place, parts: list[Tensor]) -> None:
                lost[place] = dialect.lost_in_files(place, model, parts)
                held = dialect.written(place, model, parts)
                for name, part in zip(dialect.names(place, model), held, strict=True):
                    writer.write(name, part)

            wrong = transfer(source, put, workers=workers, on_bytes=on_bytes)
            origin = source.identity()
            shards = writer.close(origin)
            config.dtype = entries[0].dtype
            config.save_pretrained(folder)
            source.companions.write(folder)
            written = self.written(target, config.model_type, shards, wrong)
            is_kha = isinstance(config, KHAModelConfig)
            card = model_card(
                written,
                model,
                origin=origin,
                folded=self.folded,
                unserved=vllm_obstacle(config, by_backend=False) if is_kha else None,
            )
            (folder / CARD).write_text(card, encoding="utf-8")
        if count := sum(lost.values()):
            announce(
                f"{count:,} weights of norms below 1/2 are rounded: {config.model_type} stores how "
                "far they are from one, in the digits of that; give --dtype float32, or kha, which "
                "stores them as they are"
            )
        return written


def plan(
    path: Path,
    *,
    architecture: str | None = None,
    dtype: str | None = None,
    allow_overflow: bool = False,
    tokenizer: Path | None = None,
    fold: bool = False,
    upcycle: KHAConfig | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> HFPlan:
    """Open a checkpoint and decide what the Hugging Face folder will hold.

    Args:
        path: a checkpoint of either side.
        architecture: a ``model_type``; None for ``kha``, and with ``fold`` for ``auto``. ``auto``
            is ``kha`` for a model with knocking heads, and the stock one that fits otherwise: by a
            gate on the output ``qwen3_next`` (element-wise) or ``lfm3`` (head-wise);
            ``deepseek_v3`` for MLA; by the router ``qwen3_moe`` (softmax) or ``glm4_moe``
            (sigmoid); ``qwen3``, or ``llama`` without QK-norm. GTA and GLA have none.
        dtype: a key of ``sources.DTYPES``; None keeps each tensor's own.
        allow_overflow: whether numbers that ``dtype`` cannot hold may become infinite.
        tokenizer: a tokenizer folder instead of the model's own.
        fold: fold linear knocking heads into the projections before them, and the mixing vectors
            of collaborative heads into the query projection.
        upcycle: what to knock of a model without knocking heads, from the identity.
        max_shard_bytes: as in ``save_pretrained``.

    Raises:
        CheckpointError: the checkpoint is damaged, or cannot be expressed, folded or upcycled so;
            the message says why.
        ConfigError: the dtype or the tokenizer folder does not exist; nothing would be knocked, or
            not from the identity, or with a variant that the model's attention cannot carry.
    """
    asked = parse_dtype(dtype)
    source = open_source(path, tokenizer=tokenizer)
    knocked = source.model.kha if fold else None
    if fold:
        source = folded(source, source.model.kha)
    if upcycle is not None:
        source = Upcycled(source, upcycle)
    if asked is not None:
        source = Cast(source, asked, allow_overflow=allow_overflow)
    architecture = architecture or (AUTO if fold else "kha")
    if architecture == AUTO:
        stock = fold or has_stock_heads(source.model)
        architecture = stock_type(source.model) if stock else "kha"
    model = expressed(source.model, architecture)
    config = to_hf_config(model, architecture)
    for name, value in source.companions.token_ids.items():
        setattr(config, name, value)
    return HFPlan(Expressed(source, model), config, max_shard_bytes, knocked)
