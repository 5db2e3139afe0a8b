"""Train a recipe on Kubernetes or a cloud with SkyPilot.

Needs ``pip install 'nemo-run[skypilot]'``. SkyPilot copies the committed tree of this repository.
"""

import sys

import nemo_run as run

from kha_megatron.recipes.nemo import partial

executor = run.SkypilotExecutor(
    container_image="docker:registry.example/train:1",
    infra="k8s",
    gpus="H100",
    gpus_per_node=8,
    torchrun_nproc_per_node=8,
    num_nodes=2,
    packager=run.GitArchivePackager(),
)
task = partial("dense-0.6b", executor, output="/runs/one", megatron="--mock-data")
with run.Experiment("dense-0.6b", executor=executor) as experiment:
    experiment.add(task, name="train")
    if "--dry-run" in sys.argv:
        experiment.dryrun(delete_exp_dir=False)
    else:
        experiment.run()
