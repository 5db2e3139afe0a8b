"""Train a recipe on Kubernetes with Kubeflow's training operator.

Needs ``pip install kubernetes`` and a kubeconfig. All pods mount the claim ``work``.
"""

import sys

import nemo_run as run

from kha_megatron.recipes.nemo import partial

executor = run.KubeflowExecutor(
    image="registry.example/train:1",
    num_nodes=2,
    nprocs_per_node=8,
    gpus_per_node=8,
    namespace="training",
    workdir_pvc="work",
    workdir_pvc_path="/workdir",
)
task = partial("dense-0.6b", executor, output="/runs/one", megatron="--mock-data")
with run.Experiment("dense-0.6b", executor=executor) as experiment:
    experiment.add(task, name="train")
    if "--dry-run" in sys.argv:
        experiment.dryrun(delete_exp_dir=False)
    else:
        experiment.run()
