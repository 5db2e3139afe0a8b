"""Train a recipe on NVIDIA DGX Cloud Lepton."""

import sys

import nemo_run as run

from kha_megatron.recipes.nemo import partial

executor = run.LeptonExecutor(
    container_image="registry.example/train:1",
    nemo_run_dir="/nemo",
    resource_shape="gpu.8xh100",
    nodes=2,
    nprocs_per_node=8,
    gpus_per_node=8,
)
task = partial("dense-0.6b", executor, output="/runs/one", megatron="--mock-data")
with run.Experiment("dense-0.6b", executor=executor) as experiment:
    experiment.add(task, name="train")
    if "--dry-run" in sys.argv:
        experiment.dryrun(delete_exp_dir=False)
    else:
        experiment.run()
