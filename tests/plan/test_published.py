"""Compare the planner with layouts that NVIDIA published: the table in benchmarks/layouts.md."""

from pathlib import Path
from typing import NamedTuple

import pytest

from kha_megatron.model.layout import Layout
from kha_megatron.model.run import Run
from kha_megatron.plan.search import build_setup, fits, plan_layouts
from kha_megatron.recipes.paper import ATTENTION

TABLE = Path(__file__).parents[2] / "benchmarks" / "layouts.md"

TRAINING = {"bf16": True, "use_distributed_optimizer": True, "micro_batch_size": 1}
TRAINING |= {"untie_embeddings_and_output_weights": True}

SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
SIZES += ("vocab_size", "num_experts", "moe_router_topk", "moe_ffn_hidden_size")
MODELS = {
    "Llama 3 8B": (32, 4096, 14336, 32, 8, 128256),
    "Llama 3 70B": (80, 8192, 28672, 64, 8, 128256),
    "Llama 3.1 405B": (126, 16384, 53248, 128, 8, 128256),
    "Mixtral 8x7B": (32, 4096, 14336, 32, 8, 32000, 8, 2, 14336),
    "Qwen3 30B-A3B": (48, 2048, 6144, 32, 4, 151936, 128, 8, 768),
    "Qwen3 235B-A22B": (94, 4096, 12288, 64, 4, 151936, 128, 8, 1536),
}


class Published(NamedTuple):
    """A layout and, if known, tokens per second and GPU on H100."""

    model: str
    precision: str
    gpus: int
    length: int
    batch: int
    sizes: tuple[int, ...]
    """TP, PP, VPP, CP, EP."""
    speed: int | None = None


PUBLISHED = (
    Published("Llama 3 8B", "bf16", 8, 8192, 128, (1, 1, 1, 2, 1)),
    Published("Llama 3 70B", "bf16", 64, 8192, 256, (4, 4, 5, 2, 1)),
    Published("Llama 3 70B", "fp8", 64, 8192, 256, (4, 8, 5, 1, 1), 1664),
    Published("Llama 3.1 405B", "fp8", 1024, 8192, 1536, (8, 8, 8, 2, 1), 328),
    Published("Mixtral 8x7B", "bf16", 32, 4096, 128, (1, 4, 1, 1, 8)),
    Published("Qwen3 30B-A3B", "fp8", 16, 4096, 1024, (1, 2, 12, 1, 8), 9058),
    Published("Qwen3 30B-A3B", "fp8", 16, 4096, 1024, (1, 1, 1, 1, 16), 8960),
    Published("Qwen3 235B-A22B", "fp8", 256, 4096, 8192, (2, 8, 4, 1, 32), 1712),
)


def sizes(layout: Layout) -> tuple[int, ...]:
    return layout.tp, layout.pp, layout.vpp or 1, layout.cp, layout.ep


def describe(tp: int, pp: int, vpp: int, cp: int, ep: int) -> str:
    named = {"TP": tp, "PP": f"{pp}x{vpp}" if vpp > 1 else pp, "CP": cp, "EP": ep}
    return " ".join(f"{name}{size}" for name, size in named.items() if size != 1) or "DP"


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.model} {row.sizes}")
def test_the_table_shows_how_the_plan_ranks_a_layout(row):
    given = ATTENTION | dict(zip(SIZES, MODELS[row.model], strict=False))
    given |= {"seq_length": row.length, "global_batch_size": row.batch}
    given |= {"qk_layernorm": "Qwen" in row.model, "group_query_attention": True}
    given |= {"fp8": "hybrid"} if row.precision == "fp8" else {}
    setup = build_setup(Run.from_values(**TRAINING, **given))
    plans = plan_layouts(setup, row.gpus, 80e9, {})
    etp = 1 if "num_experts" in given else row.sizes[0]
    number, plan = next(
        (number, plan)
        for number, plan in enumerate(plans, 1)
        if sizes(plan.layout) == row.sizes and plan.layout.expert_tp == etp
    )
    modelled = row.batch * row.length / row.gpus / plan.time.total
    cells = [
        f"{row.model}, {row.precision}",
        row.gpus,
        describe(*row.sizes) + ("" if fits(plan, 80e9) else " (does not fit)"),
        f"{number} of {len(plans)}",
        f"{plan.time.total / plans[0].time.total:.2f}",
        describe(*sizes(plans[0].layout)),
        f"{modelled:,.0f}",
        f"{row.speed:,}" if row.speed else "-",
    ]
    line = f"| {' | '.join(map(str, cells))} |"
    print(line)  # pytest -rP shows the rows to copy
    assert line in TABLE.read_text().splitlines()
