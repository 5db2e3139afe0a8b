"""Train a recipe in a Docker container on this machine."""

import sys

import nemo_run as run

from kha_megatron.recipes.nemo import partial

executor = run.DockerExecutor(
    container_image="train:1",
    num_gpus=8,
    ntasks_per_node=8,
    volumes=["/data:/data", "/runs:/runs"],
)
task = partial("dense-0.6b", executor, output="/runs/one", megatron="--mock-data")
with run.Experiment("dense-0.6b", executor=executor) as experiment:
    experiment.add(task, name="train")
    if "--dry-run" in sys.argv:
        experiment.dryrun(delete_exp_dir=False)
    else:
        experiment.run()
