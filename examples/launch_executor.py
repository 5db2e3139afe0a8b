"""Train a recipe with another of NeMo-Run's executors.

``python examples/launch_executor.py docker|lepton|kubeflow|skypilot [--dry-run]``. With
``--dry-run``, only print the request. Kubeflow needs ``pip install kubernetes`` and a kubeconfig,
and SkyPilot ``pip install 'nemo-run[skypilot]'``, even for a dry run.
"""

import sys

import nemo_run as run

from kha_megatron.recipes.nemo import partial

EXECUTORS = {
    # A container on this machine.
    "docker": lambda: run.DockerExecutor(
        container_image="train:1",
        num_gpus=8,
        ntasks_per_node=8,
        volumes=["/data:/data", "/runs:/runs"],
    ),
    # NVIDIA DGX Cloud Lepton.
    "lepton": lambda: run.LeptonExecutor(
        container_image="registry.example/train:1",
        nemo_run_dir="/nemo",
        resource_shape="gpu.8xh100",
        nodes=2,
        nprocs_per_node=8,
        gpus_per_node=8,
    ),
    # Kubernetes with Kubeflow's training operator. All pods mount the claim "work".
    "kubeflow": lambda: run.KubeflowExecutor(
        image="registry.example/train:1",
        num_nodes=2,
        nprocs_per_node=8,
        gpus_per_node=8,
        namespace="training",
        workdir_pvc="work",
        workdir_pvc_path="/workdir",
    ),
    # Kubernetes or a cloud. SkyPilot copies the committed tree of this repository.
    "skypilot": lambda: run.SkypilotExecutor(
        container_image="docker:registry.example/train:1",
        infra="k8s",
        gpus="H100",
        gpus_per_node=8,
        torchrun_nproc_per_node=8,
        num_nodes=2,
        packager=run.GitArchivePackager(),
    ),
}

if __name__ == "__main__":
    executor = EXECUTORS[sys.argv[1]]()
    task = partial("dense-0.6b", executor, output="/runs/one", megatron="--mock-data")
    with run.Experiment("dense-0.6b", executor=executor) as experiment:
        experiment.add(task, name="train")
        if "--dry-run" in sys.argv:
            experiment.dryrun(delete_exp_dir=False)
        else:
            experiment.run()
