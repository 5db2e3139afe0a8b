"""``kha-megatron params`` and ``kha-megatron flops``: what a recipe's model holds and computes."""

from dataclasses import asdict
from typing import Annotated

import typer

from kha_megatron import recipes
from kha_megatron.cli import console
from kha_megatron.cli.options import AsJSON, RecipeName
from kha_megatron.plan.counts import as_printed, count, counted, flops


def params(recipe: RecipeName, as_json: AsJSON = False) -> None:
    """Count a recipe's parameters: all, active, KHA's own; and the cache of one token.

    Active are those that one token passes through: all but the experts it is
    not routed to, the tied embedding once. The paper's own counts are without
    KHA's; they are shown beside ours in as many digits as it prints.

    \b
    Example:
      kha-megatron params moe-a0.8b-6.6b
    """
    chosen = recipes.get_recipe(recipe)
    model, kha = counted(chosen.run.model), chosen.run.kha
    counts = count(model, kha)
    plain = {"total": counts.total - counts.kha, "active": counts.active - counts.kha}
    paper = {n: as_printed(plain[n], str(chosen.paper[n])) for n in plain if n in chosen.paper}
    if as_json:
        printed = {
            name: {"paper": chosen.paper[name], "ours": ours, "how": how}
            for name, (ours, how) in paper.items()
        }
        data = {"recipe": recipe, "knocks": str(kha), **asdict(counts), "without_kha": plain}
        console.print_json(data | {"printed": printed})
        return
    table = console.numbers("parameters", "with KHA", "without", "paper")
    for name, own in plain.items():
        ours, how = paper.get(name, ("", ""))
        if ours and ours != chosen.paper[name]:
            ours, how = str(chosen.paper[name]), f"{ours}: {how}"
        note = f"{ours} ({how})" if ours else "-"
        table.add_row(name, f"{getattr(counts, name):,}", f"{own:,}", note)
    table.add_row("KHA's own", f"{counts.kha:,}", "0", "-")
    console.out.print(f"{chosen.name}: {chosen.description}", markup=False)
    console.out.print(table)
    console.out.print(
        f"cache: {counts.cache_bytes:,} bytes a token in bf16, {model.num_layers} layers of "
        f"{counts.cache_per_layer:,} numbers; KHA adds none"
    )


def count_flops(
    recipe: RecipeName,
    seq: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence; the recipe's if not given.")
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Count the FLOPs of one sequence, forward and backward, and KHA's share.

    The paper's equations 10 to 12, for any number of heads and any head size:
    matrix multiplications, with scores for all pairs of positions. Backward is
    twice forward. The paper's equations give the forward pass.

    \b
    Example:
      kha-megatron flops moe-a0.8b-6.6b --seq 4096
      kha-megatron flops equation12
    """
    chosen = recipes.get_recipe(recipe)
    model, kha = counted(chosen.run.model), chosen.run.kha
    length = seq or chosen.run.arguments["seq_length"]
    result = flops(model, kha, length)
    shares = {"layers": result.share_of_layers, "attention": result.share_of_attention}
    if as_json:
        data = {
            "recipe": recipe,
            "seq": length,
            "forward": asdict(result) | {"total": result.forward},
            "backward": {"total": 2 * result.forward, "kha": 2 * result.kha},
            "training": {"total": 3 * result.forward, "kha": 3 * result.kha},
            "kha_share_of": shares,
        }
        console.print_json(data)
        return
    table = console.numbers(f"TFLOPs of {length:,} tokens", "forward", "backward", "training")
    parts = {
        "attention projections": result.projections,
        "attention scores": result.scores,
        "MLP or routed experts": result.mlp,
        "router": result.router,
        "KHA": result.kha,
        "output layer": result.logits,
        "all": result.forward,
    }
    for name, forward in parts.items():
        if forward:
            table.add_row(name, *(f"{times * forward / 1e12:,.4f}" for times in (1, 2, 3)))
    console.out.print(f"{chosen.name}: {chosen.description}; knocks {kha}", markup=False)
    console.out.print(table)
    console.out.print(
        f"KHA adds {shares['layers']:.2%} to the layers and {shares['attention']:.2%} to attention"
    )
