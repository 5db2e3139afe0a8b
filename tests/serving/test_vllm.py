"""Exported models in vLLM: tokens and log-probabilities of transformers, or an error.

transformers runs in this environment. vLLM runs in another one, which ``tools/test_serving.sh``
creates and which has no Megatron.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from kha_megatron.conversion import to_hf
from kha_megatron.hf import KHAForCausalLM, KHAModelConfig
from tests.docs.pages import commands
from tests.ports import free_port
from tests.serving.ask_vllm import TOKENS

VLLM = os.environ.get("KHA_VLLM")
pytestmark = [
    pytest.mark.skipif(VLLM is None, reason="NOT TESTED: needs vLLM. Run `make test-serving`."),
    pytest.mark.timeout(900),
]
HERE = Path(__file__).parent
SERVER = "vllm.entrypoints.openai.api_server"
TUTORIAL = "docs/tutorials/pretrained.md"
TOLERANCE = 1e-5
"""For log-probabilities in float32, because sums have another order."""

BASE = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,
    "eos_token_id": 0,
    "dtype": "float32",
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LINEAR = {f"kha_{projection}": "linear" for projection in ("query", "key", "value")}
SERVED = {
    "linear": LINEAR | {"num_key_value_heads": 3},
    "each": {
        "kha_query": "mlp",
        "kha_key": "gate",
        "kha_value": "mlp",
        "use_qk_norm": False,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "gates": {
        "kha_value": "mlp",
        "kha_gate": dict.fromkeys(("output", "query", "dense"), "element")
        | {"value": "head", "key": "shared"},
    },
    "one_key": {"num_key_value_heads": 1, "kha_value": "mlp", "kha_gate": {"value": "element"}},
    "still": {
        "num_key_value_heads": None,
        "kha_value": "gate",
        "kha_gate": {"output": "head", "reads_input": False, "activation": "half_sigmoid"},
    },
    "added": {"kha_gate": {"output": "shared", "form": "add", "activation": "silu"}},
    "softmax": EXPERTS
    | {
        "kha_value": "mlp",
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 48,
        "shared_expert_gate": True,
    },
    "softmax_sum": EXPERTS | {"kha_value": "mlp"},
    "groups": EXPERTS
    | {
        "kha_value": "mlp",
        "kha_gate": {"output": "element"},
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "shared_expert_intermediate_size": 48,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "n_group": 4,
        "topk_group": 2,
    },
    "folded": {
        "kha_key": "mlp",
        "kha_value": "mlp",
        "kha_folded": ["value", "output"],
        "attention_bias": True,
    },
    "folded_one_key": {
        "num_key_value_heads": 1,
        "kha_value": "mlp",
        "kha_folded": ["value"],
        "kha_gate": {"output": "element"},
    },
}
LATENT = LINEAR | {
    "num_key_value_heads": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
REFUSED = {
    "mla": (LATENT, "MLA, GLA or GTA are not"),
    "gta": ({"kha_value": "mlp", "kha_attention": "gta"}, "MLA, GLA or GTA are not"),
    "moh": ({"kha_moh": {"share": 0.75}}, "does not support kha_moh.*serve the model"),
    "talking": ({"kha_talking": {}}, "does not support kha_talking"),
}
BACKEND = ("each", "gates", "softmax_sum", "folded", "folded_one_key")
"""Models that also run in vLLM's Transformers backend."""
RELOADED = ("each", "gates", "folded")
"""Models whose weights are also replaced in a running engine, as in reinforcement learning. vLLM
copies the weights of experts on CPUs, so that they cannot be replaced there."""
LENGTHS = (5, 17, 33, 64, 3, 90, 41, 150)


def make(folder, settings, seed=5):
    """Save a model without initial values, and a tokenizer with a word for each id.

    The default seed and 1 make no two tokens of the tests almost equally likely.
    """
    torch.manual_seed(seed)
    config = KHAModelConfig(**BASE | settings)
    model = KHAForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.08 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer.add_(0.05 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    words = models.WordLevel({f"w{i}": i for i in range(config.vocab_size)}, unk_token="w1")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="w0")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("vllm")
    settings = SERVED | {name: refused for name, (refused, _) in REFUSED.items()}
    return {name: str(make(root / name, given)) for name, given in settings.items()}


@pytest.fixture(scope="module")
def updated_folders(tmp_path_factory):
    """Return directories with other weights of the models in ``RELOADED``."""
    root = tmp_path_factory.mktemp("updated")
    return {name: str(make(root / name, SERVED[name], seed=1)) for name in RELOADED}


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 320, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def adapters(folders, tmp_path_factory):
    """Return LoRA directories for ``each`` by name, and a model with that of q, v and o merged."""
    place = tmp_path_factory.mktemp("lora")
    found = {}
    for name, targets in {"attention": ["q_proj", "v_proj", "o_proj"], "all": "all-linear"}.items():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_pretrained(folders["each"])
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets))
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if "lora_B" in path:
                    parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(place / name)
        found[name] = str(place / name)
        if name == "attention":
            model.merge_and_unload().save_pretrained(place / "merged")
            found["merged"] = str(place / "merged")
    return found


def expected(folder, prompts):
    """Return greedy tokens and log-probabilities of transformers."""
    torch.set_num_threads(1)  # for small products on a busy machine
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = {"tokens": [], "logprobs": [], "prompt_logprobs": []}
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            ids = model.generate(
                ids,
                max_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=None,
            )
            logits = model(ids, use_cache=False).logits[0]
        best = logits[len(prompt) - 1 : -1].topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-4, "two tokens are equally likely"
        logprobs = logits.log_softmax(-1)[:-1]
        next_tokens = ids[0, 1:, None]
        chosen = logprobs.gather(1, next_tokens)[:, 0].tolist()
        found["tokens"].append(ids[0, len(prompt) :].tolist())
        found["logprobs"].append(chosen[len(prompt) - 1 :])
        found["prompt_logprobs"].append(chosen[: len(prompt) - 1])
    return found


def environment(**more):
    """Return a quiet, offline environment without this Python's variables."""
    inherited = {}
    for name, value in os.environ.items():
        if not name.startswith(("PYTHON", "VIRTUAL")):
            inherited[name] = value
    return inherited | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "PYTHONPATH": "",
        **more,
    }


def in_vllm(program, *arguments, **variables):
    done = subprocess.run(
        [VLLM, str(HERE / program), *map(str, arguments)],
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done


def run_jobs(jobs, place, **variables):
    """Return the answer to each job by name."""
    (place / "jobs.json").write_text(json.dumps(list(jobs.values())))
    done = in_vllm("ask_vllm.py", place / "jobs.json", place / "answers.json", **variables)
    (place / "log").write_text(done.stderr)
    found = json.loads((place / "answers.json").read_text())
    assert len(found) == len(jobs), done.stderr[-3000:]
    return dict(zip(jobs, found, strict=True))


def check(answer, truth):
    """Compare tokens and log-probabilities of all rounds."""
    assert "error" not in answer, answer["error"]
    for tokens, logprobs in zip(answer["tokens"], answer["logprobs"], strict=True):
        assert tokens == truth["tokens"]
        assert max_error(logprobs, truth["logprobs"]) < TOLERANCE
    if answer["prompt_logprobs"]:
        assert max_error(answer["prompt_logprobs"], truth["prompt_logprobs"]) < TOLERANCE


def max_error(rows, others):
    errors = []
    for row, other in zip(rows, others, strict=True):
        difference = torch.tensor(row) - torch.tensor(other)
        errors.append(difference.abs().max().item())
    return max(errors)


@pytest.fixture(scope="module")
def truths(folders, prompts):
    return {name: expected(folders[name], prompts) for name in SERVED}


@pytest.fixture(scope="module")
def answers(folders, updated_folders, prompts, adapters, tmp_path_factory):
    """Answer all jobs in one process of vLLM, because its import takes longest."""

    def job(name, rounds=1, adapter=None, **engine):
        common = {"folder": folders[name], "prompts": prompts, "engine": engine}
        return common | {"rounds": rounds, "adapter": adapter}

    backend = {"model_impl": "transformers"}
    lora = {"enable_lora": True, "max_lora_rank": 8}
    jobs = {("served", name): job(name) for name in SERVED}
    jobs |= {
        "prefix caching": job("each", rounds=2, enable_prefix_caching=True),
        "chunked prefill": job("each", max_num_batched_tokens=32, enable_chunked_prefill=True),
        "compiled": job("gates", enforce_eager=False),
        "lora": job("each", adapter=adapters["attention"], **lora),
        "lora of all": job("each", adapter=adapters["all"], **lora),
    }
    converted = tmp_path_factory.mktemp("converted") / "folded"
    to_hf.plan_export(Path(folders["softmax"]), fold=True).write(converted)
    jobs["converted"] = job("softmax") | {"folder": str(converted)}
    for name in RELOADED:
        jobs["reloaded", name] = job(name, rounds=2) | {"reload": updated_folders[name]}
    jobs |= {("refused", name): job(name) for name in REFUSED}
    jobs |= {("backend", name): job(name, **backend) for name in BACKEND}
    jobs |= {("backend refused", name): job(name, **backend) for name in REFUSED}
    return run_jobs(jobs, tmp_path_factory.mktemp("one process"))


@pytest.mark.parametrize(
    ("job", "name"),
    [
        *((("served", name), name) for name in SERVED),
        *((("backend", name), name) for name in BACKEND),
        *(("prefix caching", "each"), ("chunked prefill", "each"), ("compiled", "gates")),
        ("converted", "softmax"),
    ],
    ids=str,
)
def test_tokens_and_log_probabilities_are_those_of_transformers(job, name, answers, truths):
    check(answers[job], truths[name])
    if job == "prefix caching":
        assert answers[job]["cached"] >= 5 * 32  # complete blocks of the longer prompts


@pytest.mark.parametrize("name", RELOADED)
def test_weights_of_a_running_engine_are_replaced(name, answers, truths, updated_folders, prompts):
    answer = answers["reloaded", name]
    assert "error" not in answer, answer["error"]
    for index, truth in enumerate((truths[name], expected(updated_folders[name], prompts))):
        assert answer["tokens"][index] == truth["tokens"]
        assert max_error(answer["logprobs"][index], truth["logprobs"]) < TOLERANCE
    assert answer["tokens"][0] != answer["tokens"][1]


def test_adapter_of_the_attention(answers, truths, adapters, prompts):
    truth = expected(adapters["merged"], prompts)
    assert max_error(truth["prompt_logprobs"], truths["each"]["prompt_logprobs"]) > 0.01
    check(answers["lora"], truth)


def test_adapter_of_a_knock_is_refused(answers):
    """vLLM identifies modules by the last part of their names and would silently drop it."""
    assert "v_knock" in answers["lora of all"]["error"]


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_models_are_refused(name, answers):
    for kind in ("refused", "backend refused"):
        assert re.search(REFUSED[name][1], answers[kind, name]["error"]), kind


def test_two_ranks(folders, prompts, truths, tmp_path):
    """With two key/value heads, and with one that both ranks share."""
    names = ("gates", "one_key", "groups", "folded", "folded_one_key")
    engine = {"tensor_parallel_size": 2}
    jobs = {n: {"folder": folders[n], "prompts": prompts, "engine": engine} for n in names}
    answers = run_jobs(jobs, tmp_path, VLLM_CPU_OMP_THREADS_BIND="0|1")
    for name in names:
        check(answers[name], truths[name])


def test_a_vllm_without_a_needed_class_uses_the_backend(folders, prompts, truths, tmp_path):
    package = next(Path(VLLM).parents[1].glob("lib/*/site-packages/vllm"))
    shutil.copytree(package, tmp_path / "vllm", copy_function=os.symlink)
    changed = tmp_path / "vllm/model_executor/models/glm4_moe.py"
    text = changed.read_text().replace("Glm4MoeAttention", "Renamed")
    changed.unlink()
    changed.write_text(text)
    jobs = {"each": {"folder": folders["each"], "prompts": prompts, "engine": {}}}
    check(run_jobs(jobs, tmp_path, PYTHONPATH=str(tmp_path))["each"], truths["each"])
    (line,) = re.findall("kha_megatron: .*", (tmp_path / "log").read_text())
    assert "does not have vllm.model_executor.models.glm4_moe.Glm4MoeAttention. KHA" in line
    assert "transformers backend" in line


@contextmanager
def server(arguments, log, place=None):
    """Start a server in a directory, yield its address and end all its processes."""
    port = free_port()
    # `vllm serve` itself needs a distribution called vllm. That for CPUs is called vllm-cpu.
    command = [VLLM, "-m", SERVER, *arguments, "--host", "127.0.0.1", "--port", port]
    with open(log, "w") as file:
        process = subprocess.Popen(
            list(map(str, command)),
            env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="1"),
            stdout=file,
            stderr=file,
            cwd=place,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        start = monotonic()
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert monotonic() - start < 400, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=2).close()
                break
            except OSError:
                sleep(0.5)
        yield address
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)


def test_server_answers_eight_requests_at_once(folders, prompts, truths, tmp_path):
    arguments = ["--model", folders["groups"], "--dtype", "float32", "--max-model-len", 256]
    with server([*arguments, "--block-size", 32, "--enforce-eager"], tmp_path / "log") as address:

        def ask(prompt):
            body = {
                "model": folders["groups"],
                "prompt": prompt,
                "max_tokens": TOKENS,
                "temperature": 0,
                "logprobs": 1,
                "ignore_eos": True,
                "return_tokens_as_token_ids": True,
            }
            request = urllib.request.Request(
                f"{address}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=120) as answered:
                return json.load(answered)["choices"][0]["logprobs"]

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(ask, prompts))
    tokens = [[int(token.removeprefix("token_id:")) for token in f["tokens"]] for f in found]
    assert tokens == truths["groups"]["tokens"]
    assert max_error([f["token_logprobs"] for f in found], truths["groups"]["logprobs"]) < TOLERANCE


def test_commands_of_the_tutorial(tmp_path):
    """Serve a folded model, a stock Llama, and complete a text with curl."""
    (serve,) = (command for command in commands(TUTORIAL) if SERVER in command.words)
    (request,) = (command for command in commands(TUTORIAL) if command.words[0] == "curl")
    make(tmp_path / "hf/kha", LINEAR | {"use_qk_norm": False})
    to_hf.plan_export(tmp_path / "hf/kha", fold=True).write(tmp_path / "hf/folded")
    body = json.loads(request.words[-1])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf/folded")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf/folded", dtype=torch.float32)
    assert model.config.model_type == "llama"
    ids = tokenizer(body["prompt"], return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=body["max_tokens"], do_sample=False)
    with server(serve.words[3:], tmp_path / "log", tmp_path) as address:
        words = [word.replace("http://localhost:8000", address) for word in request.words]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    text = json.loads(done.stdout)["choices"][0]["text"]
    assert len(text.split()) > 3
    assert text.split() == tokenizer.decode(expected[0, ids.shape[1] :]).split()
