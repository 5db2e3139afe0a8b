"""One rank of a fine-tuning run with NeMo AutoModel's recipe on the CPU.

Run it with ``torchrun -m tests.automodel.rank RESULTS [--registered] -c CONFIG``. Each rank writes
its losses, gradients, weights and batches to ``RESULTS/rank{rank}.pt``.
"""

import sys
from pathlib import Path

import nemo_automodel._transformers.auto_model as auto_model
import torch
from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction
from torch import Tensor
from torch.distributed.tensor import DTensor


def use_cpu() -> None:
    """Replace the CUDA calls that AutoModel makes on a machine without a GPU."""
    torch.cuda.current_device = lambda: 0
    torch.cuda.reset_peak_memory_stats = lambda: None
    apply_model_infrastructure = auto_model.apply_model_infrastructure

    def apply_on_cpu(*args, **kwargs):
        kwargs["device"] = torch.device("cpu")
        return apply_model_infrastructure(*args, **kwargs)

    auto_model.apply_model_infrastructure = apply_on_cpu


def full_tensor(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


class RecordingRecipe(TrainFinetuneRecipeForNextTokenPrediction):
    """Record the batches, loss and gradients of every step, and the weights at both ends."""

    def setup(self) -> None:
        super().setup()
        self.model = self.model_parts[0]
        self.batches: list[list[dict[str, Tensor]]] = []
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.initial_weights = self.weights()
        self.optimizer[0].register_step_pre_hook(self._record_gradients)

    def weights(self) -> dict[str, Tensor]:
        return {name: full_tensor(weight) for name, weight in self.model.named_parameters()}

    def _record_gradients(self, *_) -> None:
        gradients = {}
        for name, weight in self.model.named_parameters():
            gradients[name] = full_tensor(weight.grad)
        self.gradients.append(gradients)

    def _run_train_optim_step(self, batches, *args, **kwargs):
        # Copy the dictionaries, because the recipe removes the labels from them.
        copies = []
        for batch in batches:
            tensors = {name: value for name, value in batch.items() if torch.is_tensor(value)}
            copies.append(tensors)
        self.batches.append(copies)
        result = super()._run_train_optim_step(batches, *args, **kwargs)
        self.losses.append(result.metrics["loss"])
        return result


def main() -> None:
    results = Path(sys.argv.pop(1))
    use_cpu()
    if "--registered" in sys.argv:
        sys.argv.remove("--registered")
        import kha_megatron.hf  # noqa: F401 (registers the kha architecture)
    recipe = RecordingRecipe(parse_args_and_load_config(None))
    recipe.setup()
    recipe.run_train_validation_loop()
    record = {
        "module": type(recipe.model.model).__module__,
        "batches": recipe.batches,
        "losses": recipe.losses,
        "gradients": recipe.gradients,
        "initial_weights": recipe.initial_weights,
        "weights": recipe.weights(),
    }
    torch.save(record, results / f"rank{recipe.dist_env.rank}.pt")


if __name__ == "__main__":
    main()
