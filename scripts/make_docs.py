"""Writes docs/{cli,metrics,errors,models}.md from the tables of the code (`make docs`); tests compare them with these.

Errors: the classes with a `code` in any package, with scripts/error_cures.py. Models: the tables of readers in trireme/model
and the questions that the program asks itself (trireme/machine); no model file and no torch is needed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.error_cures import CURES  # noqa: E402
from trireme.launch.options import COMMANDS, SWITCHES, flag_text, overview, spellings  # noqa: E402
from trireme.machine.gpu_formats import FOR_GPUS_ALONE, FORMATS, SCHEMES, format_of  # noqa: E402
from trireme.machine.gpu_support import lacks_on_gpu  # noqa: E402
from trireme.machine.runtime import TORCH, choose_runtime  # noqa: E402
from trireme.metrics import METRICS  # noqa: E402
from trireme.model.bodies import GptBody  # noqa: E402
from trireme.model.gguf_config import GGUF_FAMILIES  # noqa: E402
from trireme.model.gguf_header import LOADED_AS, TENSOR_TYPES  # noqa: E402
from trireme.model.packed_ints import Packing  # noqa: E402
from trireme.model.reader import HF_READERS, arch_from_config  # noqa: E402
from trireme.model.spec import ArchSpec, RopeKind, RopeSpec  # noqa: E402
from trireme.settings import Setting, table  # noqa: E402
from trireme.topology.mesh import Mesh  # noqa: E402

_NOTE = "<!-- Written by `make docs` from the code. Do not edit. -->\n"


_STATUS = (
    ("0", "done; of `serve`: a signal came, and what ran has ended (the drain)"),
    (
        "1",
        "something failed: an engine, a server at `--url`, a request of a benchmark; `plan`: it does not fit; `doctor`: unfit",
    ),
    ("2", "the command line, the environment or the file of settings is wrong"),
    ("3", "a model's file is missing, broken or unsupported"),
    (
        "130, 143",
        "SIGINT (Ctrl-C) or SIGTERM ended it at once: before `serve` was ready, or as the second signal while it drained",
    ),
    ("141", "whoever read the output has left"),
)


def cli() -> str:
    """The command-line reference: every command, and every setting in its three spellings."""
    parts = [
        "# Command line\n",
        _NOTE,
        "```\n" + overview() + "\n```\n",
        "Settings can be given as a flag, in the environment, or in a YAML file named by `--config` or `TRIREME_CONFIG`.",
        "A flag wins over the environment, the environment over the file, the file over the default. File keys may be",
        "grouped (`cache: {block_size: 16}`) or flat (`block-size: 16`). `trireme serve --print-config` writes a file",
        "that reproduces a run, without keys. An unknown name is an error that says the nearest one.\n",
        SWITCHES.strip() + " In the environment and in a file its value is true or false.",
        "Values in a file are taken as they stand there (`served-name: 1.10` is that text), and the kind of the setting",
        "says what they mean; a plain `null`, `~` or nothing is the default. A setting that stands there twice is an error.",
        "Addresses that Kubernetes puts into the environment for a service called `trireme` or `trireme-...`",
        "(`TRIREME_SERVICE_HOST`, `TRIREME_PORT=tcp://...`) are no settings and are left alone.\n",
        "## Exit status\n",
        "| status | meaning |\n|---|---|",
        *(f"| {status} | {meaning} |" for status, meaning in _STATUS),
        "",
    ]
    for command in COMMANDS:
        places = " ".join(f"[{p.name.upper()}]" for p in command.positionals)
        parts.append(f"## trireme {command.name} {places}".rstrip() + "\n")
        parts.append(command.summary[0].upper() + command.summary[1:] + ".\n")
        parts.append("```\n" + "\n".join(command.examples) + "\n```\n")
        parts.append("| flag | default | meaning |\n|---|---|---|")
        parts += [f"| `{flag_text(s)}` | {_default(s)} | {_cell(s.help)} |" for s in command.options]
        if command.common:
            parts.append("\nand all settings below.")
        parts.append("")
    parts.append("## Settings\n")
    group = ""
    for setting in table():
        if setting.group != group:
            group = setting.group
            parts.append(
                f"\n### {group}\n\n| flag | environment, key | default | limits | meaning |\n|---|---|---|---|---|"
            )
        flag = "by position" if setting.name == "model" else " ".join(f"`{flag}`" for flag in spellings(setting))
        parts.append(
            f"| {flag} | `{setting.env}` `{setting.key}` | {_default(setting)} | {_cell(setting.limits)} | {_cell(setting.help)} |"
        )
    return "\n".join(parts) + "\n"


def metrics() -> str:
    """The metrics reference."""
    rows = [
        f"| {'**' if m.decisive else ''}`{m.exported}`{'**' if m.decisive else ''} | {m.kind} | {', '.join(m.labels)} | {m.help} |"
        for m in METRICS
    ]
    head = (
        "# Metrics\n\n" + _NOTE + "\nServed at `/metrics` in the Prometheus text form. The decisive ones are bold.\n\n"
    )
    return head + "| name | kind | labels | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


class ErrorClass(NamedTuple):
    """A class that has a `code`, as found in the source."""

    code: str
    name: str
    status: int
    exit_code: int
    place: str


PACKAGES = ("trireme", "coordinator", "engine_core", "launch", "models", "serving", "transport", "workers")


def error_classes() -> list[ErrorClass]:
    """Every code of the tree: of classes, inherited values resolved, and those an instance sets in its constructor."""
    found: dict[str, tuple[ast.ClassDef, str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found[node.name] = (node, str(path.relative_to(ROOT)))

    def value(name: str, attribute: str) -> Any:
        node, _ = found.get(name, (None, ""))
        if node is None:
            return None
        own = dict(_assigned(node.body, attribute))
        return own[""] if "" in own else next((v for b in node.bases if (v := value(ast.unparse(b), attribute))), None)

    def is_ours(name: str) -> bool:
        return name == "TriremeError" or (
            name in found and any(is_ours(ast.unparse(base)) for base in found[name][0].bases)
        )

    codes: list[ErrorClass] = []
    for name, (node, place) in found.items():
        if not is_ours(name):
            continue
        status, exit_code = value(name, "status"), value(name, "exit_code")
        codes += [ErrorClass(code, name, status, exit_code, place) for _, code in _assigned(node.body, "code")]
        for part in ast.walk(node):
            if isinstance(part, ast.If):
                inside = {where: dict(_assigned(part.body, where)) for where in ("code", "status")}
                if "self" in inside["code"]:
                    own_status = inside["status"].get("self", status)
                    codes.append(ErrorClass(inside["code"]["self"], name, own_status, exit_code, place))
    return sorted(codes, key=lambda entry: (entry.status, entry.code))


def _assigned(body: list[ast.stmt], attribute: str) -> Iterator[tuple[str, Any]]:
    """Constants given to `attribute` (with "") or to `self.attribute` (with "self") by the statements of a body."""
    for part in body:
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Constant):
            target = ast.unparse(part.targets[0])
            if target == attribute:
                yield "", part.value.value
            elif target == f"self.{attribute}":
                yield "self", part.value.value


def errors() -> str:
    """Codes by HTTP status, with cause and cure."""
    lines = [
        "# Errors\n",
        _NOTE,
        "Over HTTP every refusal is OpenAI's envelope: `error.message`, `type`, `param` (the path of the field), `code`. A client",
        "should decide by `code`. A command prints the message with a hint that can be pasted, and exits with the status of the",
        "table, or 1.\n",
        "| code | status | class | cause | cure |\n|---|---|---|---|---|",
    ]
    for entry in error_classes():
        status = f"exit {entry.exit_code}" if entry.exit_code > 1 else str(entry.status)
        cause, cure = CURES[entry.code]
        lines.append(f"| `{entry.code}` | {status} | `{entry.name}` in `{entry.place}` | {cause} | {cure} |")
    return "\n".join(lines) + "\n"


TITLES = {
    "llama": "Llama 2 and 3, SmolLM2",
    "mistral": "Mistral",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "phi3": "Phi-3",
    "olmo2": "OLMo 2",
    "granite": "Granite",
    "smollm3": "SmolLM3",
    "cohere": "Command R",
    "stablelm": "StableLM",
    "internlm2": "InternLM2",
    "baichuan": "Baichuan 7B",
    "gpt2": "GPT-2",
    "gpt_neox": "GPT-NeoX, Pythia",
    "falcon": "Falcon (rotary)",
    "llama4": "Llama 4 (text part of a checkpoint)",
    "llama4_text": "Llama 4 (text)",
    "gpt_oss": "GPT-OSS",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
}
# A small model of every type at once: each reader takes the keys that it knows.
_CONFIG = {
    **dict.fromkeys(("hidden_size", "n_embd"), 256),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 24),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 512),
    **{"vocab_size": 1024, "num_experts": 8, "norm_topk_prob": True},
}
_OWN_CONFIG = {"gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}}
_INTEGERS = ("I8", "I16", "I32", "I64")  # GGUF types that no weight has


def sample_arch(family: str) -> ArchSpec:
    """ArchSpec of a small model of a `model_type`, by its reader."""
    config = {**_CONFIG, **_OWN_CONFIG.get(family, {}), "model_type": family}
    return arch_from_config(config, {}, Path(f"{family}/config.json"))


def models() -> str:
    """Families, positions and weights formats, each by the code that decides."""
    gguf_names: dict[str, list[str]] = {}
    for name, row in GGUF_FAMILIES.items():
        gguf_names.setdefault(row.family or name, []).append(name)
    lines = [
        "# Models\n",
        _NOTE,
        "A model is a directory of safetensors with `config.json`, or a GGUF file. What is not in these tables is refused by name",
        "before anything starts; `trireme plan MODEL` says whether one fits this machine.\n",
        "## Families\n",
        "On a CPU `native` is all layers of a stage in one native call, without torch in the process; `torch` is torch around",
        "native kernels, which every family takes with `--tp`. A GPU computes in bfloat16 or float16.\n",
        "| family | `model_type` | GGUF | CPU | NVIDIA GPU | norms | layers |\n|---|---|---|---|---|---|---|",
    ]
    for family in HF_READERS:
        arch = sample_arch(family)
        runtime = choose_runtime(arch, Mesh(1, 1, 1)).value
        lacks = lacks_on_gpu(arch)
        cells = [
            TITLES[family],
            f"`{family}`",
            ", ".join(f"`{name}`" for name in gguf_names.get(family, [])),
            "torch" if runtime == TORCH else "native",
            "no: " + ", ".join(lacks) if lacks else "yes",
            _norms(arch),
            _layers(arch),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "\n## Rotary positions\n",
        "| kind | CPU | NVIDIA GPU, up to the trained length | beyond it |\n|---|---|---|---|",
    ]
    for kind in get_args(RopeKind):
        within, beyond = _rope_on_gpu(kind)
        lines.append(f"| {kind} | yes | {within} | {beyond} |")
    lines += [
        "\n## Weights of GGUF files\n",
        "| type | CPU | NVIDIA GPU |\n|---|---|---|",
    ]
    for kind, _, _ in TENSOR_TYPES.values():
        if kind not in _INTEGERS:
            on_cpu = f"expanded to {LOADED_AS[kind]}" if kind in LOADED_AS else "as stored"
            lines.append(f"| {kind} | {on_cpu} | {_on_gpu(kind)} |")
    lines += [
        "\n## Weights of safetensors checkpoints\n",
        "| weights | CPU | NVIDIA GPU |\n|---|---|---|",
        f"| float32, bfloat16, float16 | as stored, or as `--dtype` says | {_on_gpu('BF16')} |",
        f"| compressed-tensors W8A8, int8 | as stored | {_on_gpu('INT8')} |",
        f"| float8, a scale for the tensor or each output | expanded to 16 bits | {_on_gpu('FP8')} |",
        f"| float8, a scale for each 128 x 128 | expanded to 16 bits | {_on_gpu('FP8_BLOCKS')} |",
    ]
    for packing in (
        Packing("gptq", 4, 128, True),
        Packing("awq", 4, 128, False),
        Packing("pack-quantized", 4, 128, True),
        Packing("gptq", 8, 128, True),
        Packing("gptq", 4, 128, True, is_scattered=True),
    ):
        what = f"{packing.method}, {packing.bits} bits" + (", desc_act" if packing.is_scattered else "")
        what += "" if packing.is_symmetric else ", with zeros"
        lines.append(f"| {what} | {packing.cpu_bytes * 8:g} bits a weight | {_on_gpu(packing.kind)} |")
    choices = next(setting.choices for setting in table() if setting.name == "quantize")
    cpu_schemes = [scheme for scheme in choices if scheme not in FOR_GPUS_ALONE]
    lines += [
        "\nGPT-2, GPT-NeoX, Falcon and the MoE families take dense checkpoints only; the experts of GPT-OSS may be MXFP4,",
        "which a GPU expands to 16 bits.\n",
        f"`--quantize` rounds dense weights at load: {', '.join(cpu_schemes)} on a CPU; {', '.join(SCHEMES)} on a GPU.",
    ]
    return "\n".join(lines) + "\n"


def _norms(arch: ArchSpec) -> str:
    kind = "layer" if arch.norm_kind == "layer" or isinstance(arch.body, GptBody) else "RMS"
    where = {"pre": "before", "post": "after", "both": "before and after", "parallel": "one for both branches"}
    placed = where[arch.norm_placement]
    if isinstance(arch.body, GptBody) and arch.body.parallel:
        placed = "branches side by side"
    heads = {"head": "q and k by head", "wide": "whole q and k", "heads": "q and k, weights for each head"}
    return f"{kind}, {placed}" + (f"; {heads[arch.qk_norm_kind]}" if arch.qk_norm else "")


def _layers(arch: ArchSpec) -> str:
    """What is not the Llama case."""
    body, notes = arch.body, []
    if isinstance(body, GptBody):
        notes.append("no gate")
        notes += ["learned positions"] if body.learned_positions else []
    elif body is not None:
        notes.append(f"experts, {body.router} router")
        notes += ["shared expert"] if body.shared_expert else []
        notes += ["attention sinks"] if body.sinks else []
        notes += ["chunked attention"] if body.attention_chunk else []
    if arch.no_rope_layers or (body is not None and not isinstance(body, GptBody) and body.no_rope_layers):
        notes.append("some layers without rotation")
    notes += ["sliding window"] if arch.sliding_window else []
    notes += ["soft cap of scores"] if arch.attn_softcap else []
    notes += ["soft cap of logits"] if arch.logit_softcap else []
    return ", ".join(notes)


def _rope_on_gpu(kind: Any) -> tuple[str, str]:
    """Whether a GPU rotates so: sequences within the trained length, and longer ones."""
    sample = sample_arch("llama")
    rope = RopeSpec(kind=kind, dim=64, factor=4.0, original_max_position=1024)
    arch = ArchSpec(
        **{name: getattr(sample, name) for name in sample.__struct_fields__ if name not in ("rope", "max_position")},
        rope=rope,
        max_position=4096,
    )
    within, beyond = (not lacks_on_gpu(arch, length) for length in (1024, 4096))
    return "yes" if within else "no", "yes" if beyond else "no"


def _on_gpu(kind: str) -> str:
    """What becomes of a stored matrix, its inputs a multiple of all blocks."""
    form = format_of(kind, 4096, None)
    return "16 bits" if form == "half" else f"as stored, {FORMATS[form].weight * 8:g} bits a weight"


def _default(setting: Setting) -> str:
    if setting.default in (None, ()):
        return ""
    if isinstance(setting.default, bool):
        return "on" if setting.default else "off"
    return ",".join(setting.default) if isinstance(setting.default, tuple) else str(setting.default)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


DOCS: dict[str, Callable[[], str]] = {"cli.md": cli, "metrics.md": metrics, "errors.md": errors, "models.md": models}

if __name__ == "__main__":
    for name, write in DOCS.items():
        (ROOT / "docs" / name).write_text(write())
        print(f"docs/{name}")
