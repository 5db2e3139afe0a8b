"""Train a recipe with another of NeMo-Run's executors.

``python examples/launch_executor.py docker|lepton|slurm [--dry-run]``. With ``--dry-run``, only
print the request.
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
        shm_size="64g",  # NCCL and data loaders exchange data in shared memory
        ipc_mode="host",
        ulimits=["memlock=-1", "stack=67108864"],
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
    # Slurm, from a login node. `kha-megatron launch --executor slurm` also checks the paths.
    "slurm": lambda: run.SlurmExecutor(
        account="acme",
        time="04:00:00",
        nodes=2,
        ntasks_per_node=8,
        gpus_per_node=8,
        exclusive=True,
        mem="0",
        srun_args=["--mem=0", "--cpu-bind=none"],
        container_image="registry.example/train:1",
        container_mounts=["/data:/data", "/runs:/runs"],
        tunnel=run.LocalTunnel(job_dir="/runs/nemo"),
        packager=run.Packager(),
        retries=2,
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
