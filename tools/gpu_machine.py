"""What the machine has of what the check can use, looked at in other processes."""

from collections.abc import Mapping

from kha_megatron.cli.doctor import findings_of
from kha_megatron.cli.installation import find_module, probe

_COMPONENTS = ("torch", "triton", "megatron-core", "transformer-engine", "apex", "flash-attn")

_PROBE = """
import subprocess, torch
found = {"python": sys.version.split()[0]}
cudnn = torch.backends.cudnn.version()
found["cuDNN"] = str(cudnn) if cudnn else "-"
if torch.cuda.is_available():
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    found["GPU"] = f"{torch.cuda.device_count()} x {properties.name}"
    found["capability"] = f"{properties.major}.{properties.minor}"
    found["free memory"] = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB"
    found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True).stdout
        found["driver"] = answer.splitlines()[0]
    except (OSError, IndexError):
        found["driver"] = "nvidia-smi does not say"
print(json.dumps(found))
"""

_FP8_PROBE = """
import torch, transformer_engine.pytorch as te
found = {}
for name, ask in {
    "fp8": te.is_fp8_available,
    "blockwise": te.is_fp8_block_scaling_available,
    "mxfp8": te.is_mxfp8_available,
}.items():
    can, why = ask(return_reason=True)
    found[name] = "" if can else why or "no reason given"
print(json.dumps(found))
"""


def examine() -> tuple[dict[str, str], dict[str, bool]]:
    """What is there, in words for the report, and by the keys of ``gpu_cases.NEEDS``.

    The first has ``GPU`` only where PyTorch sees one.
    """
    told: dict[str, str] = dict(probe(_PROBE))
    findings = {
        finding.name: finding for name in _COMPONENTS for finding in findings_of(name, deep=True)
    }
    for name, finding in findings.items():
        words = finding.found if finding.status == "ok" else f"{finding.status} {finding.found}"
        told[name] = f"{words.replace('missing -', 'missing')}; {finding.effect}"
    has = {
        "te": findings["transformer-engine"].status == "ok",
        "flash-attn": findings["flash-attn"].status == "ok",
        "apex": findings["apex"].status == "ok"
        and find_module("fused_weight_gradient_mlp_cuda") is not None,
    }
    if has["te"] and "GPU" in told:
        has |= _fp8(told)
    return told, has


def _fp8(told: dict[str, str]) -> Mapping[str, bool]:
    """Which scalings Transformer Engine has for this GPU; it says why it has not the others."""
    seen = probe(_FP8_PROBE)
    for name, why in seen.items():
        told[f"FP8, {name}"] = why or "yes"
    return {name: not why for name, why in seen.items() if name not in ("error", "kinds")}
