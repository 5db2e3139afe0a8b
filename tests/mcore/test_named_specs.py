"""`--spec kha_megatron.mcore.specs NAME`: one object for every builder, and never plain attention.

The builder of Megatron-Core 0.19 (``GPTModelBuilder``) and the older ``gpt_builders.py``, which
hands the object to ``GPTModel`` as it is, must both make what :func:`kha_layer_spec` makes.
"""

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

from kha_megatron.errors import ConfigError
from kha_megatron.heads import Knock
from kha_megatron.heads.config import PRESETS, HeadsConfig

SPECS = "kha_megatron.mcore.specs"
MOE = {"num_layers": 4, "num_moe_experts": 4, "moe_layer_freq": [0, 1, 1, 0]}
LAYOUTS = {
    "dense": (1, {}, {}),
    "experts in some layers": (1, {}, MOE),
    "sequence parallel": (
        2,
        {"tensor_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "second pipeline stage": (
        2,
        {"pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2} | MOE,
    ),
}


def _built(models, config, builder, preset, stages):
    """A model by the name of a preset, the way one of Megatron's builders makes it."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import import_module

    spec = import_module((SPECS, preset))
    first, last = stages
    if builder == "as it is":
        return models.gpt_model(
            config, None, layer_spec=spec, perturbed=False, pre_process=first, post_process=last
        )
    from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

    model = GPTModelConfig(
        transformer=config,
        transformer_layer_spec=spec,
        vocab_size=models.VOCAB,
        seq_length=models.SEQUENCE,
        position_embedding_type="rope",
    )
    return GPTModelBuilder(model).build_model(
        ProcessGroupCollection.use_mpu_process_groups(), first, last
    )


def equal_builds(builders, presets, layout, overrides):
    """Where the named specs differ from kha_layer_spec, in these builders, and what they said."""
    from megatron.core import parallel_state

    from tests.distributed import models

    models.initialize(**layout)
    config = models.transformer_config(**overrides)
    stages = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    wrong, said = [], io.StringIO()
    for preset in presets:
        kha = HeadsConfig.from_preset(preset)
        torch.manual_seed(5)
        ours = models.gpt_model(
            config, kha, perturbed=False, pre_process=stages[0], post_process=stages[1]
        )
        want = _features(models, ours)
        for builder in builders:
            torch.manual_seed(5)
            with contextlib.redirect_stderr(said):
                model = _built(models, config, builder, preset, stages)
            got = _features(models, model)
            wrong += [f"{preset}, {builder}: {n}" for n in want if got[n] != want[n]]
    return wrong, [x for x in said.getvalue().splitlines() if x.startswith("kha_megatron")]


def _features(models, model):
    """Everything that two builds must agree on; the values of tensors as bytes."""
    state = {n: t.numpy().tobytes() for n, t in model.state_dict().items() if t is not None}
    return {
        "module tree": str(model),
        "parameters": state,
        "checkpoint": sorted(
            (entry.key, tuple(entry.global_shape), tuple(entry.global_offset))
            for entry in model.sharded_state_dict().values()
            if hasattr(entry, "global_shape")
        ),
        "outputs": _output(models, model).numpy().tobytes(),
    }


def _output(models, model):
    models.perturb(model)
    tokens, positions, mask = models.batch()
    if not model.pre_process:
        generator = torch.Generator().manual_seed(2)
        shape = models.SEQUENCE, models.BATCH, model.config.hidden_size
        model.set_input_tensor(torch.randn(shape, generator=generator))
    with torch.no_grad():
        return model(tokens, positions, mask)


@pytest.mark.fast
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_builders_make_what_kha_layer_spec_makes(ranks, layout):
    n, sizes, overrides = LAYOUTS[layout]
    presets = ["kha_mlp", "baseline"]
    if layout == "dense":
        presets = [*PRESETS, "kha_mlp+gate_output", "gate_value+moh_75+kha_linear"]
    builders = ["as it is", "GPTModelBuilder"]
    answers = ranks(equal_builds, n, builders, presets, sizes, overrides)
    assert [wrong for wrong, _ in answers] == [[]] * n
    lines = [
        f"kha_megatron: using layer spec {preset} ({HeadsConfig.from_preset(preset)})"
        for preset in presets
        for _ in builders
    ]
    assert answers[0][1] == lines
    assert all(said == [] for _, said in answers[1:])


def test_every_preset_has_a_name_for_gpt_and_for_hybrid(ranks):
    names = {*PRESETS, "kha"}
    assert ranks(module_names, 1)[0] == names | {f"{name}_hybrid" for name in names}


def module_names():
    from megatron.core.transformer.spec_utils import ModuleSpec

    from kha_megatron.mcore import specs

    named = {name for name, value in vars(specs).items() if isinstance(value, ModuleSpec)}
    return {name for name in named if "+" not in name}  # added when a test asks for them


IMPORT_BUILDERS = """
import sys
from kha_megatron.mcore import cpu
cpu.install(despite_cuda=True, quiet=True)
from kha_megatron.mcore import building, gpt, hybrid
from megatron.core.transformer import transformer_block
from megatron.core.transformer.torch_norm import WrappedTorchNorm
assert transformer_block.LayerNormImpl is WrappedTorchNorm
"""


def test_building_models_without_spec_has_no_import_side_effects():
    """Only the module that ``--spec`` imports replaces Megatron's final norm and reads argv."""
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_BUILDERS, "--spec", SPECS, "no-preset"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def refusals(cases):
    """For each change of the environment, model and name: the configuration, or the refusal."""
    from megatron.core.transformer.spec_utils import import_module

    from tests.distributed import models

    models.initialize()

    def one(name, variable, overrides):
        environment = {} if variable is None else {"KHA_CONFIG": variable}
        with mock.patch.dict(os.environ, environment):
            try:
                config = models.transformer_config(**overrides)
                model = models.gpt_model(
                    config, None, layer_spec=import_module((SPECS, name)), perturbed=False
                )
            except (ConfigError, KeyError, ImportError) as error:  # from 0.20 on the last
                return error
        return model.decoder.layers[0].self_attention.kha

    return [one(*case) for case in cases]


def test_settings_from_the_environment(ranks, tmp_path):
    file = tmp_path / "kha.json"
    file.write_text('{"value": "mlp", "key": "none", "init": "random"}')
    cases = {
        ("kha", '{"value": "mlp", "init": "random", "init_seed": 5}'): HeadsConfig(
            Knock(value="mlp", init="random"), init_seed=5
        ),
        ("kha", '{"value": null}'): HeadsConfig(),
        ("kha_linear", '{"init_seed": 7}'): HeadsConfig.from_preset("kha_linear", init_seed=7),
        ("kha_mlp", str(file)): HeadsConfig(Knock(value="mlp", init="random")),
        ("kha_mlp", None): HeadsConfig(Knock(value="mlp")),
    }
    got = [ranks(refusals, 1, [(*case, {})])[0][0] for case in cases]
    assert got == list(cases.values())


def test_what_a_named_spec_cannot_honour_is_refused(ranks, tmp_path):
    broken = tmp_path / "kha.json"
    broken.write_text("{")
    cases = [
        ("kha", None, {}, "requires KHA_CONFIG to set at least one of query"),
        ("kha", '{"value": "mlp", "seed": 5}', {}, "Unknown KHA setting seed"),
        ("kha", str(tmp_path / "none.json"), {}, "must be a JSON object"),
        ("kha", str(broken), {}, "must be a JSON object"),
        (
            "kha_mlp",
            '{"value": "gate"}',
            {},
            "value=gate in KHA_CONFIG conflicts with --spec kha_mlp",
        ),
        ("kha_mpl", None, {}, "kha_mpl"),
    ]
    answers = ranks(refusals, 1, [case[:3] for case in cases])[0]
    for (*case, expected), answer in zip(cases, answers, strict=True):
        kind = (KeyError, ImportError) if case[0] == "kha_mpl" else ConfigError
        assert isinstance(answer, kind), f"{case}: {answer!r}"
        assert expected in str(answer)
        assert "\n" not in str(answer)


def differing_nodes(layout):
    """One rank's environment says something else."""
    from megatron.core import parallel_state
    from megatron.core.transformer.spec_utils import import_module

    from tests.distributed import models

    models.initialize(**layout)
    last = parallel_state.is_pipeline_last_stage()
    rank = torch.distributed.get_rank()
    text = '{"value": "mlp"}' if rank else '{"value": "gate"}'
    with mock.patch.dict(os.environ, {"KHA_CONFIG": text}):
        if rank:
            torch.distributed.barrier()
        try:
            models.gpt_model(
                models.transformer_config(**layout),
                None,
                layer_spec=import_module((SPECS, "kha")),
                pre_process=not last or "pipeline_model_parallel_size" not in layout,
                post_process=last,
            )
        except ConfigError as error:
            return str(error)
        finally:
            if not rank:
                torch.distributed.barrier()
    return None


@pytest.mark.parametrize("axis", ["pipeline_model_parallel_size", "tensor_model_parallel_size"])
def test_ranks_whose_environments_differ_are_refused(ranks, axis):
    first, second = ranks(differing_nodes, 2, {axis: 2})
    assert first is None  # it came first
    assert '"value": "mlp"} on rank 1, but' in second
    assert "Export the same KHA_CONFIG on all nodes" in second
