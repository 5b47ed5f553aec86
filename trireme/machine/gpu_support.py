"""Whether an NVIDIA GPU can run a model, and if not, why. Pure and torch-free.

Called by resolve before anything starts and by the CUDA decoder when it is built; the limits of the kernels in csrc/cuda are
listed here and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple

from trireme.config import Decision, EngineConfig
from trireme.errors import ConfigError
from trireme.machine.device import DeviceFacts
from trireme.machine.gpu_formats import FOR_GPUS_ALONE, SCHEMES
from trireme.model.bodies import MoeBody
from trireme.model.spec import ArchSpec

CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8")
FP8_HEAD_DIMS = (64, 96, 128, 256)  # of csrc/cuda/attention/attention_decode.cu over a float8 cache
HEAD_DIMS = range(8, 257, 8)
MOST_EXPERTS, MOST_CHOSEN, EXPERT_UNIT = 256, 32, 8  # of csrc/cuda/moe/moe.cu; the last divides widths


class Obstacle(NamedTuple):
    """A reason why a deployment cannot run on the GPU, and what the operator can do about it."""

    why: str
    cure: str


def lacks_on_gpu(arch: ArchSpec, max_len: int | None = None) -> list[str]:
    """Features of a model that the CUDA decoder lacks; empty when it supports the model for sequences of up to `max_len` tokens
    (default: the model's own limit)."""
    is_long = (max_len or arch.max_position) > arch.rope.original_max_position
    lacks = {
        f"the layers of {arch.family}": arch.family == "stub",
        "a rotary base that grows with the length": is_long and arch.rope.kind == "dynamic",
        "a tied head of unit outputs": arch.unit_head and arch.tie_embeddings,
        f"heads of {arch.head_dim}": arch.head_dim not in HEAD_DIMS,
    }
    if isinstance(arch.body, MoeBody):
        lacks |= _lacks_for_experts(arch, arch.body)
    return [name for name, is_so in lacks.items() if is_so]


def _lacks_for_experts(arch: ArchSpec, body: MoeBody) -> dict[str, bool]:
    return {
        "experts whose inputs are scaled": body.router != "softmax",
        "experts that all tokens share": body.shared_expert,
        "layers without experts": len(body.moe_layers) < arch.num_layers,
        "layers without rotation": bool(arch.no_rope_layers or body.no_rope_layers),
        "attention in chunks": body.attention_chunk > 0,
        "norms of q and k without weights": body.unit_qk_norm,
        "scales of q that depend on the position": body.temperature is not None,
        f"{body.num_experts} experts": body.num_experts > MOST_EXPERTS,
        f"{body.top_k} experts for a token": body.top_k > MOST_CHOSEN,
        f"experts of {arch.ffn} columns": arch.ffn % EXPERT_UNIT > 0,
        f"experts of {arch.hidden} inputs": arch.hidden % EXPERT_UNIT > 0,
    }


def obstacles(config: EngineConfig, arch: ArchSpec, device: DeviceFacts) -> list[Obstacle]:
    """Every obstacle to running this deployment on this machine's GPUs."""
    parallel, found = config.parallel, []
    if device.num_gpus == 0:
        found.append(Obstacle("this machine shows no NVIDIA GPU (/dev/nvidia0)", "--device cpu"))
    elif (needed := parallel.dp * parallel.tp * parallel.pp) > device.num_gpus and not parallel.share_gpus:
        why = f"{needed} workers need a GPU each; there are {device.num_gpus}"
        found.append(Obstacle(why, "fewer of --dp, --tp and --pp, or --share-gpus"))
    if not device.has_cuda_kernels:
        cure = "make native (with nvcc and a torch for CUDA), or --device cpu"
        found.append(Obstacle("the extension trireme.models._cuda is not built", cure))
    if missing := lacks_on_gpu(arch, config.model.max_len):
        trained = arch.rope.original_max_position
        cure = "--device cpu" if lacks_on_gpu(arch, trained) else f"--max-len {trained}, or --device cpu"
        found.append(Obstacle(f"the GPU body lacks {', '.join(missing)}", cure))
    if config.model.quantize is not None and config.model.quantize not in SCHEMES:
        why = f"--quantize {config.model.quantize} quantizes for the CPU's kernels"
        found.append(Obstacle(why, f"{' or '.join('--quantize ' + name for name in SCHEMES)}, or --device cpu"))
    if config.model.quantize is not None and isinstance(arch.body, MoeBody):
        found.append(Obstacle("experts on a GPU have 16 bits", "leave --quantize out, or --device cpu"))
    if config.in_lockstep:
        found.append(Obstacle("--ep splits experts over engines on the CPU alone", "--tp instead, or --device cpu"))
    if config.model.dtype == "float32":
        found.append(Obstacle("the GPU's kernels compute in 16 bits", "--dtype bfloat16, or --device cpu"))
    if config.cache.kv_dtype not in CACHE_DTYPES:
        why = f"the GPU's cache does not hold {config.cache.kv_dtype}"
        found.append(Obstacle(why, "--kv-dtype auto, or --device cpu"))
    elif config.cache.kv_dtype == "fp8":
        if arch.head_dim not in FP8_HEAD_DIMS:
            found.append(Obstacle(f"heads of {arch.head_dim} have no cache of fp8", "--kv-dtype auto"))
    elif config.model.dtype != "auto" and config.cache.kv_dtype not in ("auto", config.model.dtype):
        why = f"on the GPU keys and values are as the weights: {config.model.dtype}, not {config.cache.kv_dtype}"
        found.append(Obstacle(why, "--kv-dtype auto"))
    return found


def choose_device(config: EngineConfig, arch: ArchSpec, device: DeviceFacts) -> Decision:
    """The device, cpu or cuda, for what was requested. Raises ConfigError for a `--device cuda` that cannot run."""
    asked = config.parallel.device
    if asked == "cpu":
        return Decision("device", "cpu", "--device cpu")
    if config.parallel.worker == "fake":
        return Decision("device", "cpu", "fake workers compute nothing")
    found = obstacles(config, arch, device)
    if asked == "cuda" and found:
        raise ConfigError(f"--device cuda: {found[0].why}", hint=found[0].cure)
    if found:
        return Decision("device", "cpu", found[0].why)
    return Decision("device", "cuda", "--device cuda" if asked == "cuda" else "an NVIDIA GPU and its kernels are here")


def compute_dtype(config: EngineConfig, arch: ArchSpec) -> str:
    """Type of weights, activations and cache on the GPU: the requested one, else the stored one where that has 16 bits."""
    if config.model.dtype != "auto":
        return config.model.dtype
    if config.cache.kv_dtype not in ("auto", "fp8"):
        return config.cache.kv_dtype
    return arch.weights_dtype if arch.weights_dtype in ("bfloat16", "float16") else "bfloat16"


def refuse_on_cpu(config: EngineConfig, choice: Decision) -> None:
    """Raises ConfigError for GPU-only settings where the CPU was chosen."""
    for flag, value, has_it, cure in (
        ("--quantize", config.model.quantize, config.model.quantize in FOR_GPUS_ALONE, "--quantize q8_0"),
        ("--kv-dtype", config.cache.kv_dtype, config.cache.kv_dtype == "fp8", "--kv-dtype int8"),
        (
            "--graph-sizes",
            config.parallel.graph_sizes,
            config.parallel.graph_sizes != "auto",
            "leave --graph-sizes out",
        ),
    ):
        if has_it and config.parallel.worker != "fake":
            raise ConfigError(f"{flag} {value} is for a GPU; this runs on the CPU: {choice.because}", hint=cure)
