"""A SentencePiece vocabulary as a tokenizer of the tokenizers library, every possible merge spelled out: slow, and the
reference for the native encoder, with which it shares no code."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, normalizers

from trireme.model.gguf_header import read_gguf

META = "\u2581"
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5


def oracle_from_gguf(path: Path) -> Tokenizer:
    """Without BOS and EOS. Merges go by score, then by the longest left and right part, as transformers' converter has it."""
    file = read_gguf(path)
    tokens, scores = file.texts("tokenizer.ggml.tokens"), file.numbers("tokenizer.ggml.scores")
    kinds = [int(kind) for kind in file.numbers("tokenizer.ggml.token_type")]
    plain = {token: i for i, token in enumerate(tokens) if kinds[i] not in (UNKNOWN, CONTROL, USER_DEFINED, UNUSED)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=all_merges(plain, scores),
            unk_token=next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend(META)] if file.flag("tokenizer.ggml.add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", META)])
    for kind in (UNKNOWN, CONTROL):
        named = [token for token, found in zip(tokens, kinds, strict=True) if found == kind]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in named])
    named = [token for token, found in zip(tokens, kinds, strict=True) if found == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in named])
    return tokenizer


def all_merges(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best first."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece, token in ids.items():
        cuts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        local = sorted((ids[left], ids[right], left, right) for left, right in cuts if left in ids and right in ids)
        found += [(scores[token], len(left), len(right), left, right) for _, _, left, right in local]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in found]
