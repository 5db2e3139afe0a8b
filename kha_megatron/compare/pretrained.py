"""Pretrained models that a comparison continues.

Each variant starts from its own Megatron checkpoint, ``OUTPUT/starts/VARIANT``, to which its head
mechanisms are added without changing the outputs. The trials of a seed therefore begin with the
same loss. Null trials share the checkpoint of the reference.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.manifest import CONVERTED_FROM
from kha_megatron.checkpoint.reading import read_regular
from kha_megatron.checkpoint.tracker import newest
from kha_megatron.compare.variants import ModelVariant
from kha_megatron.data import check_same_tokenizer
from kha_megatron.errors import CheckpointError, KHAError, OutputError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.config import ModelConfig
from kha_megatron.model.fields import declared_fields
from kha_megatron.model.megatron import command_line
from kha_megatron.model.run import Run
from kha_megatron.recipes import Recipe
from kha_megatron.recipes.paper import TRAINING

if TYPE_CHECKING:
    from kha_megatron.conversion.to_megatron import MegatronPlan

STARTS = "starts"
"""Subdirectory of the output directory with the initial checkpoint of each variant."""
RESERVED = ("--pretrained-checkpoint", "--use-checkpoint-args", "--finetune", "--kha-upcycle")
"""Megatron arguments that ``compare --pretrained-checkpoint`` sets or that contradict it."""
_TRAINING_FIELDS = ("fp8", "fp8_recipe", "transformer_impl", "moe_token_dispatcher_type")
"""Fields of ModelConfig that a recipe may set for a pretrained model."""
_DIVISOR = "make_vocab_size_divisible_by"

_DEFAULT_RECIPE = Recipe(
    name="pretrained",
    description="continued pre-training",
    ranks=1,
    run=Run.from_values(
        **TRAINING,
        lr=1e-4,
        min_lr=1e-5,
        lr_warmup_fraction=0.05,
        seq_length=1024,
        micro_batch_size=1,
        global_batch_size=16,
        split="95,5,0",
    ),
    environment={"OMP_NUM_THREADS": "1"},  # parallel runs on a CPU would compete for its cores
)


@dataclass(frozen=True)
class InitialCheckpoint:
    """The checkpoint that the trials of a variant start from."""

    plan: "MegatronPlan"
    folder: Path

    @property
    def model(self) -> ModelConfig:
        return self.plan.source.model

    @property
    def kha(self) -> HeadsConfig:
        """Mechanisms of the variant, and those that the pretrained model already had."""
        return self.model.kha

    def words(self) -> list[str]:
        """Return Megatron's arguments for training from this checkpoint."""
        words = command_line(self.plan.args, str(self.folder.absolute()))
        return [*words, "--no-use-tokenizer-model-from-checkpoint-args"]

    def check(self) -> None:
        """Make sure that an existing checkpoint was made from the same model.

        Raises:
            OutputError: If it was made from another model.
        """
        path = newest(self.folder)
        if path is None:
            return
        record = json.loads(read_regular(path / CONVERTED_FROM))
        identity = self.plan.source.checkpoint.identity()
        if record["source"]["sha256"] != identity["sha256"]:
            raise OutputError(
                f"{self.folder} was made from {record['source']['path']}, which is not "
                f"{identity['path']}. Choose another --output."
            )

    def write(self) -> None:
        """Write the checkpoint, unless it exists."""
        if newest(self.folder) is None:
            announce(f"Writing {self.folder} from {self.plan.source.path}")
            self.plan.write(self.folder)


def make_recipe(path: Path, recipe: Recipe | None) -> Recipe:
    """Return a recipe that trains the model in ``path``.

    Args:
        path: Hugging Face model or Megatron checkpoint.
        recipe: Recipe for the optimizer, batch and layout. Its model is ignored. By default, all
            layers are trained with a peak learning rate of 1e-4.
    """
    model_name = path.resolve().name
    base_recipe = recipe or replace(_DEFAULT_RECIPE, name=model_name)
    dropped_arguments = set()
    for field in declared_fields(ModelConfig):
        if field.name not in _TRAINING_FIELDS:
            dropped_arguments.add(field.argument)
    arguments = {}
    for name, argument in base_recipe.run.explicit.items():
        if name not in dropped_arguments:
            arguments[name] = argument
    return replace(
        base_recipe,
        description=f"{model_name}, {_DEFAULT_RECIPE.description}",
        run=Run(explicit=arguments),
    )


def plan_initial_checkpoint(
    path: Path,
    variant: ModelVariant,
    run: Run,
    output: Path,
) -> InitialCheckpoint:
    """Plan the initial checkpoint of a variant. Nothing is written yet.

    Args:
        path: Hugging Face model or Megatron checkpoint without KHA.
        variant: Variant to add.
        run: Run of the comparison, for the padding of the vocabulary and the tokenizer.
        output: Output directory of the comparison.

    Raises:
        CheckpointError: If the model already has head mechanisms, or the variant cannot be added
            without changing its outputs.
        DataError: If the data was prepared with another tokenizer.
        OutputError: If there is an initial checkpoint that was made from another model.
    """
    from kha_megatron.conversion.sources import open_source  # imports transformers
    from kha_megatron.conversion.to_megatron import plan_import

    adds_mechanisms = bool(variant.kha.mechanisms or variant.kha.attention)
    source = open_source(path)
    pretrained_kha = source.model.kha
    if pretrained_kha.without_output_gate().mechanisms or pretrained_kha.attention:
        raise CheckpointError(
            f"{path} already uses {pretrained_kha}. --pretrained-checkpoint requires a model "
            "without KHA."
        )
    check_same_tokenizer(path, {"tokenizer_model": source.tokenizer.path}, run.arguments)
    try:
        plan = plan_import(
            path,
            upcycle=variant.kha if adds_mechanisms else None,
            divisible_by=run.arguments.get(_DIVISOR, ModelConfig.make_vocab_size_divisible_by),
            tensor_parallel=run.layout(None).tp,
        )
    except KHAError as error:
        raise CheckpointError(
            f"Variant {variant.name} cannot start from {path}: {error}"
        ) from error
    initial_checkpoint = InitialCheckpoint(plan, output / STARTS / variant.name)
    initial_checkpoint.check()
    return initial_checkpoint
