"""Rebuilds a tokenizer from the vocabulary in a GGUF header: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

Called by serving.tokens only. The pre-tokenizer is chosen by the name in the file from a table; an unknown name is an
error, because a wrong one gives plausible but wrong ids.
"""

from __future__ import annotations

import functools
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from trireme.errors import ModelError
from trireme.gguf import GgufFile, read_gguf

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_META = "\u2581"

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITAL = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED}|{_CAPITAL}|\p{{N}}|{_REST}"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = rf"{_CASED}{_SHORT}|{_CAPITAL}{_SHORT}|\p{{N}}{{1,3}}|{_REST}"

# tokenizer.ggml.pre -> how text is cut before merging: "gpt2", "digits" (each digit alone, then gpt2), or a pattern
_PRE: dict[str, str] = {
    "default": "gpt2",
    "gpt-2": "gpt2",
    "phi-2": "gpt2",
    "olmo": "gpt2",
    "jina-en": "gpt2",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "command-r": "digits",
    "codeshell": "digits",
    "exaone": "digits",
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "dbrx": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
}
_IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken", "gpt-4o", "llama4"}
_NFC = {"qwen2", "deepseek-r1-qwen", "stablelm2"}


def tokenizer_from_gguf(path: Path) -> tuple[Tokenizer, dict[str, str], str | None]:
    """The tokenizer, its named special tokens (bos_token, ...), and the chat template of a GGUF file."""
    file = read_gguf(path)
    if "tokenizer.ggml.model" not in file.metadata:
        raise ModelError(f"{path} carries no tokenizer", hint="--tokenizer DIR names a directory with tokenizer.json")
    kind = file.text("tokenizer.ggml.model")
    tokens = file.texts("tokenizer.ggml.tokens")
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(file, tokens)
    else:
        raise ModelError(
            f"{path} has a tokenizer of kind {kind!r}; gpt2 (byte-level BPE) and llama (SentencePiece) can be rebuilt",
            hint="--tokenizer DIR names a directory with tokenizer.json",
        )
    _add_tokens(tokenizer, file, tokens)
    special = _named_tokens(file, tokens)
    _add_ends(tokenizer, file, special, bos_by_default=kind == "llama")
    template = file.metadata.get("tokenizer.chat_template")
    return tokenizer, special, template if isinstance(template, str) else None


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    pre = file.text("tokenizer.ggml.pre", "default")
    rule = _PRE.get(pre)
    if rule is None:
        raise ModelError(
            f"{file.path} names the pre-tokenizer {pre!r}; known are {', '.join(sorted(_PRE))}",
            hint="--tokenizer DIR names a directory with tokenizer.json",
        )
    merges = []
    has_merges = "tokenizer.ggml.merges" in file.metadata
    for line in file.texts("tokenizer.ggml.merges") if has_merges else ():
        left, space, right = line[1:].partition(" ")  # a piece may itself begin with a space
        if not space or not right:
            raise ModelError(f"{file.path}: the merge {line!r} is not two pieces")
        merges.append((line[0] + left, right))
    tokenizer = _build(file, tokens, merges, ignore_merges=pre in _IGNORE_MERGES)
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    prefix = file.flag("tokenizer.ggml.add_space_prefix", False)
    if rule == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    elif rule == "digits":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=prefix)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(rule), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelError(f"{file.path}: {len(tokens)} tokens but {len(scores)} scores")
    kinds = _kinds(file, tokens)
    unknown = next((tokens[i] for i, kind in enumerate(kinds) if kind == _UNKNOWN), None)
    plain = {token: i for i, token in enumerate(tokens) if kinds[i] not in (_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED)}
    merges = _merges_from_scores(plain, scores)
    tokenizer = _build(file, tokens, merges, unknown=unknown, byte_fallback=True)
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_META)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _META)])
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_META, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return tokenizer


def _merges_from_scores(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best score first: the merge list SentencePiece leaves implicit.

    Ties go to the smaller ids of the parts, as in the converter that writes tokenizer.json files.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for piece, token in ids.items():
        local = []
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                local.append((ids[left], ids[right], left, right))
        found += [(scores[token], len(left), len(right), left, right) for _, _, left, right in sorted(local)]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in found]


def _build(
    file: GgufFile,
    tokens: list[str],
    merges: list[tuple[str, str]],
    *,
    unknown: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        repeated = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise ModelError(f"{file.path}: the token {repeated!r} appears twice in the vocabulary")
    try:
        model = models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=unknown,
            fuse_unk=byte_fallback,
            byte_fallback=byte_fallback,
            ignore_merges=ignore_merges,
        )
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file.path}: the vocabulary and merges do not fit together: {error}") from error
    return Tokenizer(model)


def _kinds(file: GgufFile, tokens: list[str]) -> list[int]:
    if "tokenizer.ggml.token_type" not in file.metadata:
        return [1] * len(tokens)
    kinds = [int(kind) for kind in file.numbers("tokenizer.ggml.token_type")]
    if len(kinds) != len(tokens):
        raise ModelError(f"{file.path}: {len(tokens)} tokens but {len(kinds)} token types")
    return kinds


def _add_tokens(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    kinds = _kinds(file, tokens)
    # one list in id order: the library gives new ids to tokens it does not find in the vocabulary, and all are in it
    special = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == _CONTROL
    ]
    user = [
        AddedToken(t, special=False, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == _USER_DEFINED
    ]
    unknown = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == _UNKNOWN
    ]
    tokenizer.add_special_tokens(unknown + special)
    tokenizer.add_tokens(user)


def _named_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {}
    for name, key in names.items():
        key = f"tokenizer.ggml.{key}_token_id"
        if key in file.metadata:
            token = file.whole(key)
            if not 0 <= token < len(tokens):
                raise ModelError(f"{file.path}: {key} is {token}; the vocabulary has {len(tokens)} tokens")
            special[name] = tokens[token]
    return special


def _add_ends(tokenizer: Tokenizer, file: GgufFile, special: dict[str, str], *, bos_by_default: bool) -> None:
    """BOS and EOS around a text, as the file's flags say (a Llama vocabulary has BOS unless told otherwise)."""
    pre = file.metadata.get("tokenizer.ggml.pre")
    begin = file.flag(
        "tokenizer.ggml.add_bos_token", bos_by_default or pre in ("llama-bpe", "llama3", "llama-v3", "tekken")
    )
    end = file.flag("tokenizer.ggml.add_eos_token", False)
    bos = special.get("bos_token") if begin else None
    eos = special.get("eos_token") if end else None
    if bos is None and eos is None:
        return
    find = functools.partial(_id_of, tokenizer)
    single = " ".join(part for part in (f"{bos}:0" if bos else "", "$A:0", f"{eos}:0" if eos else "") if part)
    pair = " ".join(part for part in (single, f"{bos}:1" if bos else "", "$B:1", f"{eos}:1" if eos else "") if part)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(text, find(text)) for text in dict.fromkeys((bos, eos)) if text]
    )


def _id_of(tokenizer: Tokenizer, text: str) -> int:
    token = tokenizer.token_to_id(text)
    assert token is not None
    return token
