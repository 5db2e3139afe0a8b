"""Train `kha` models with verl's Megatron engine, as its workers do."""

from functools import partial
from typing import Any

import torch
from torch.distributed import broadcast, get_world_size

ON_CPU = {
    "attention_backend": "auto",  # verl would select FlashAttention
    "gradient_accumulation_fusion": False,
}
"""Fields of the provider for the test double of Transformer Engine."""


def build(folder: str, external_lib: str, **layout: int) -> Any:
    """Build verl's engine with the model and weights of a Hugging Face directory."""
    from megatron.core import parallel_state
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.base import EngineRegistry

    parallel_state.destroy_model_parallel()  # verl would use the groups of another layout
    torch.cuda.mem_get_info = lambda device=None: (0, 0)  # verl logs the memory of the GPU
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="megatron",
        model_config=HFModelConfig(path=folder, external_lib=external_lib),
        engine_config=McoreEngineConfig(
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=2,
            override_transformer_config=dict(ON_CPU),
            **layout,
        ),
        optimizer_config=McoreOptimizerConfig(lr=0.02, total_training_steps=100),
        checkpoint_config=CheckpointConfig(save_contents=["hf_model"], load_contents=["hf_model"]),
    )
    engine.initialize()
    return engine


def make_batch(vocab_size: int) -> Any:
    """Return four prompts with responses, of 6 to 7 tokens together, in verl's packed format."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import left_right_2_no_padding

    generator = torch.Generator().manual_seed(3)
    prompt_lengths = torch.tensor([3, 5, 4, 5])
    response_lengths = torch.tensor([4, 2, 3, 1])
    prompt_mask = torch.arange(5).flip(0) < prompt_lengths[:, None]  # padded on the left
    response_mask = torch.arange(4) < response_lengths[:, None]
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1).long()
    tokens = torch.randint(0, vocab_size, attention_mask.shape, generator=generator)
    batch = TensorDict(
        {
            "input_ids": tokens,
            "prompts": tokens[:, :5],
            "responses": tokens[:, 5:],
            "attention_mask": attention_mask,
            "response_mask": response_mask.long(),
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "advantages": torch.randn(4, 4, generator=generator),
        },
        batch_size=4,
    )
    tensordict_utils.assign_non_tensor(
        batch,
        temperature=1.0,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        global_batch_size=4,
    )
    return left_right_2_no_padding(batch)


def compute_log_probs(engine: Any, batch: Any) -> torch.Tensor:
    """Return the log probabilities of the responses ``[4, 4]``. Padding is zero."""
    from verl.workers.utils.padding import no_padding_2_padding

    with engine.eval_mode():
        model_output = engine.infer_batch(batch).get("model_output")
    log_probs = torch.zeros(batch["responses"].shape)
    if model_output:  # only on the last pipeline stage
        log_probs = no_padding_2_padding(model_output["log_probs"], batch).float()
    broadcast(log_probs, get_world_size() - 1)
    return log_probs * batch["response_mask"]


def train(engine: Any, batch: Any) -> None:
    """Train one step with verl's PPO loss."""
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    actor = ActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=2)
    with engine.train_mode():
        engine.train_batch(batch, partial(ppo_loss, actor))


def export(engine: Any) -> dict[str, torch.Tensor]:
    """Collect the tensors that verl sends to the inference engine after each update."""
    stream, adapter_config = engine.get_per_tensor_param()
    assert adapter_config is None
    tensors = {}
    for name, tensor in stream:
        assert name not in tensors
        tensors[name] = tensor.detach().clone().contiguous()
    return tensors
