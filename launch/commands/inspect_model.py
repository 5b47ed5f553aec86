"""`trireme models inspect`: the contents of a model's files: shape, tensor types and bytes, tokenizer, chat template.

Reads headers only and imports no tensor library. Files are untrusted: every displayed text is truncated.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trireme.errors import ModelError
from trireme.launch.options import Invocation
from trireme.model.files import ModelFiles, find_model, read_json
from trireme.model.gguf_header import GgufFile, read_gguf
from trireme.model.reader import read_arch
from trireme.model.stored import read_header
from trireme.sizes import format_bytes

MAX_SHOWN = 24  # largest tensors, and metadata entries
MAX_TEXT = 200
MAX_TEMPLATE = 4000


class Tensor(NamedTuple):
    """One tensor as its file names it; the shape is in the file's own order."""

    name: str
    kind: str
    shape: tuple[int, ...]
    nbytes: int


class Tokens(NamedTuple):
    """Tokenizer facts in the files. Ids are None where the files do not name one."""

    kind: str
    size: int
    special: dict[str, Any]
    template: str | None


def run(invocation: Invocation) -> int:
    """Prints the facts; an unsupported family is a fact, not a failure."""
    files = find_model(invocation.options["model"])
    facts = inspect_files(files)
    if invocation.options["json"]:
        print(json.dumps(facts, indent=1))
    else:
        _print(facts)
    return 0


def inspect_files(files: ModelFiles) -> dict[str, Any]:
    """All facts as plain data, of bounded size. Raises ModelError for broken files."""
    tensors, tokens, metadata = _of_gguf(read_gguf(files.path)) if files.kind == "gguf" else _of_directory(files.path)
    try:
        arch, refusal = _cut(msgspec.to_builtins(read_arch(files))), ""
    except ModelError as error:
        arch, refusal = {}, error.message
    tensors.sort(key=lambda tensor: (-tensor.nbytes, tensor.name))
    return {
        "name": files.name,
        "kind": files.kind,
        "path": str(files.path),
        "supported": not refusal,
        "refusal": _short(refusal, 500),
        "shape": arch,
        "num_tensors": len(tensors),
        "num_params": sum(math.prod(tensor.shape) for tensor in tensors),
        "nbytes": sum(tensor.nbytes for tensor in tensors),
        "types": _by_type(tensors),
        "largest": [{**t._asdict(), "name": _short(t.name)} for t in tensors[:MAX_SHOWN]],
        "tokenizer": {"kind": _short(tokens.kind), "size": tokens.size, "special": _cut(tokens.special)},
        "template": _template_facts(tokens.template),
        "metadata": _cut(dict(list(metadata.items())[:MAX_SHOWN])),
    }


def _by_type(tensors: list[Tensor]) -> list[dict[str, Any]]:
    found: dict[str, list[int]] = {}
    for tensor in tensors:
        row = found.setdefault(tensor.kind, [0, 0, 0])
        for i, amount in enumerate((1, math.prod(tensor.shape), tensor.nbytes)):
            row[i] += amount
    rows = [
        {"type": kind, "tensors": n, "params": count, "nbytes": size, "bits": round(8 * size / max(count, 1), 3)}
        for kind, (n, count, size) in found.items()
    ]
    return sorted(rows, key=lambda row: -int(str(row["nbytes"])))


def _template_facts(template: str | None) -> dict[str, Any] | None:
    if template is None:
        return None
    digest = hashlib.sha256(template.encode()).hexdigest()
    return {"characters": len(template), "sha256": digest, "text": _short(template, MAX_TEMPLATE)}


# ---------------------------------------------------------------- files


def _of_gguf(file: GgufFile) -> tuple[list[Tensor], Tokens, dict[str, Any]]:
    meta = file.metadata
    tensors = [Tensor(t.name, t.kind, t.shape, t.nbytes) for t in file.tensors.values()]
    pieces, template = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.chat_template")
    ids = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in meta.items()
        if key.startswith("tokenizer.ggml.") and not isinstance(value, list | str)
    }
    kind = f"{meta.get('tokenizer.ggml.model', 'none')} {meta.get('tokenizer.ggml.pre', '')}".strip()
    size = len(pieces) if isinstance(pieces, list) else 0
    tokens = Tokens(kind, size, ids, template if isinstance(template, str) else None)
    return (
        tensors,
        tokens,
        {k: v for k, v in meta.items() if not k.startswith("tokenizer.") and not isinstance(v, list)},
    )


def _of_directory(path: Path) -> tuple[list[Tensor], Tokens, dict[str, Any]]:
    tensors = [tensor for file in sorted(path.glob("*.safetensors")) for tensor in read_safetensors(file)]
    rules, told = read_json(path / "tokenizer.json"), read_json(path / "tokenizer_config.json")
    model = rules.get("model") if isinstance(rules.get("model"), dict) else {}
    assert isinstance(model, dict)
    vocab, added = model.get("vocab"), rules.get("added_tokens")
    ids = (
        {a["content"]: a.get("id") for a in added if isinstance(a, dict) and isinstance(a.get("content"), str)}
        if isinstance(added, list)
        else {}
    )
    size = (len(vocab) if isinstance(vocab, dict | list) else 0) + sum(
        1 for text in ids if not (isinstance(vocab, dict) and text in vocab)
    )
    own, template = path / "chat_template.jinja", told.get("chat_template")
    if own.is_file() and own.stat().st_size <= 1 << 20:
        template = own.read_text(encoding="utf-8", errors="replace")
    special = {key: told[key] for key in ("bos_token", "eos_token", "pad_token", "unk_token") if told.get(key)}
    special |= dict(list(ids.items())[:MAX_SHOWN])
    tokens = Tokens(str(model.get("type", "none")), size, special, template if isinstance(template, str) else None)
    config = read_json(path / "config.json")
    return tensors, tokens, {k: v for k, v in config.items() if not isinstance(v, dict | list)}


def read_safetensors(path: Path) -> list[Tensor]:
    """The header of one safetensors file, checked against the file's size. Raises ModelError."""
    entries = read_header(path).entries.items()
    return [Tensor(n, e.dtype, tuple(e.shape), e.data_offsets[1] - e.data_offsets[0]) for n, e in entries]


# ---------------------------------------------------------------- truncating and printing


def _short(text: str, most: int = MAX_TEXT) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _cut(value: Any) -> Any:
    """Plain data with its texts and lists truncated."""
    if isinstance(value, str):
        return _short(value)
    if isinstance(value, dict):
        return {_short(str(key)): _cut(inner) for key, inner in list(value.items())[: 4 * MAX_SHOWN]}
    if isinstance(value, list | tuple):
        cut = [_cut(inner) for inner in value[:MAX_SHOWN]]
        return [*cut, f"... ({len(value)} items)"] if len(value) > MAX_SHOWN else cut
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print(facts: dict[str, Any]) -> None:
    from trireme.launch.console import Console

    console = Console(sys.stdout)
    amount = f"{facts['num_params'] / 1e6:.4g} M parameters in {facts['num_tensors']} tensors, {format_bytes(facts['nbytes'])}"
    console.title(f"{facts['name']}  ({facts['kind']}, {amount})")
    console.say(f"  {facts['path']}")
    if facts["refusal"]:
        console.say(f"  not supported: {facts['refusal']}", style="yellow")
    shape = [(key, value) for key, value in facts["shape"].items() if value not in (None, [], {}, "", False, 0)]
    console.say("")
    for key, value in shape:
        console.say(f"  {key:<22}{_plain(value)}")
    console.say("")
    rows = [
        [r["type"], str(r["tensors"]), str(r["params"]), format_bytes(r["nbytes"]), str(r["bits"])]
        for r in facts["types"]
    ]
    console.table(["tensor type", "tensors", "parameters", "bytes", "bits each"], rows)
    console.say("")
    rows = [
        [t["name"], t["kind"], " x ".join(map(str, t["shape"])), format_bytes(t["nbytes"])]
        for t in facts["largest"][:8]
    ]
    console.table(["largest tensors", "type", "shape", "bytes"], rows)
    tokens, template = facts["tokenizer"], facts["template"]
    console.say("")
    console.say(f"tokenizer  {tokens['kind']}, {tokens['size']} tokens  {_plain(tokens['special'])}")
    if template is None:
        console.say("template   none")
        return
    console.say(f"template   {template['characters']} characters, sha256 {template['sha256'][:16]}")
    for line in template["text"].splitlines()[:12]:
        console.say(f"  {_short(line, 160)}", style="dim")


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _short(text, 120)
