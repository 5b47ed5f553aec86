"""Who may find whose prompts in the prefix cache: callers with other keys never, unless the operator says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import make_stub
from tests.serving.deployment import Served, serve_model
from trireme.config import ServingConfig
from trireme.hashing import cache_salt
from trireme.serving.admission.admission import Admission

PROMPT = "a prompt that fills several blocks of the cache, word by word by word by word"
KEYS = {"api_key": ("ann", "bob"), "admin_key": "boss", "worker": "fake"}


async def cached(served: Served, key: str = "", **fields: Any) -> int:
    """Prompt tokens that were found in the prefix cache, as the caller with `key` is told."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body: dict[str, Any] = {"model": "stub", "prompt": PROMPT, "max_tokens": 2, **fields}
    path = "/v1/completions"
    if "messages" in fields:
        path = "/v1/chat/completions"
        del body["prompt"]
    status, _, answer = await served.request("POST", path, body, headers)
    assert status == 200, answer
    return int(json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_nobody_finds_what_another_key_has_asked(tmp_path: Path) -> None:
    async with serve_model(make_stub(tmp_path / "m"), **KEYS) as served:
        talk = [{"role": "user", "content": PROMPT}]
        for key in ("ann", "bob", "boss"):
            assert await cached(served, key) == 0, "not even an admin: cached_tokens would tell"
            assert await cached(served, key, messages=talk) == 0
            assert await cached(served, key, cache_salt="mine") == 0, "a salt of its own comes on top"
        for key in ("ann", "bob", "boss"):
            assert await cached(served, key) > 0
            assert await cached(served, key, messages=talk) > 0
            assert await cached(served, key, cache_salt="mine") > 0
            assert await cached(served, key, cache_salt="") > 0, "an empty one is none"


async def test_keys_share_when_the_operator_says_so(tmp_path: Path) -> None:
    async with serve_model(make_stub(tmp_path / "m"), share_prefixes=True, **KEYS) as served:
        assert await cached(served, "ann") == 0
        assert await cached(served, "bob") > 0
        assert await cached(served, "bob", cache_salt="mine") == 0
        assert await cached(served, "ann", cache_salt="mine") > 0


async def test_without_keys_all_callers_share(tmp_path: Path) -> None:
    async with serve_model(make_stub(tmp_path / "m"), worker="fake", admin_key="boss") as served:
        assert await cached(served) == 0
        assert await cached(served) > 0
        assert await cached(served, "whatever") > 0, "a key that nobody asks for is nobody's"


def test_the_salt_is_a_keyed_digest_that_outlives_the_process() -> None:
    """Another front end, or the next life of this one, makes the same of the same key; neither key nor salt can be read."""
    salts = []
    for _ in range(2):
        admission = Admission(ServingConfig(api_key=("ann",)), queue_s=0.0)
        caller = admission.caller({"state": {"key": bytes(range(32))}, "client": ("10.0.0.1", 1)})
        salts.append(cache_salt(caller.scope, "mine"))
    assert salts[0] == salts[1]
    assert salts[0] not in (cache_salt(b"", "mine"), bytes(range(32)))
    assert len({cache_salt(scope, salt) for scope in (b"", b"a", b"b") for salt in (None, "x", "y")}) == 9
    assert cache_salt(b"", None) == b""


@pytest.mark.parametrize("salt", ["x" * 100, "\ud800"])
def test_any_salt_is_hashed_to_one_size(salt: str) -> None:
    assert len(cache_salt(b"key", salt)) == len(cache_salt(b"", salt)) == 32
