"""Block pool and prefix cache: counts, order of eviction, hash chains, salts."""

from __future__ import annotations

import numpy as np
import pytest

from trireme.engine_core.kv.cache import KVCache
from trireme.engine_core.kv.pool import BlockPool
from trireme.engine_core.scheduling.decode_batch import SlotColumns
from trireme.engine_core.scheduling.request import Request
from trireme.errors import EngineError
from trireme.hashing import block_hashes
from trireme.params import RowParams
from trireme.transport.wire.messages import Submit


def make_request(prompt: list[int], *, salt: bytes = b"", prompt_logprobs: int = -1) -> Request:
    params = RowParams(max_tokens=8, prompt_logprobs=prompt_logprobs)
    request = Request("front", Submit(1, np.array(prompt, np.int32), params, salt), 1, 0.0, 64)
    request.take_slot(0, SlotColumns(1, 4))
    return request


def fill(cache: KVCache, request: Request) -> None:
    """Computes a whole request, as the scheduler would."""
    cache.adopt(request, cache.match(request))
    cache.extend(request, cache.blocks_for(len(request.tokens)) - len(request.table.blocks))
    request.num_computed = len(request.tokens)
    cache.seal(request)


def test_free_blocks_go_before_cached_ones_and_the_oldest_cached_goes_first() -> None:
    pool = BlockPool(3)
    a, b, c = pool.take(), pool.take(), pool.take()
    assert (a, b, c) == (0, 1, 2)
    pool.seal(a, b"A")
    pool.seal(b, b"B")
    pool.release(b)
    pool.release(a)
    pool.release(c)
    assert pool.num_available == 3
    assert pool.take() == c
    assert pool.take() == b
    assert pool.find(b"B") is None
    assert pool.find(b"A") == a


def test_sharing_rescues_a_block_from_eviction() -> None:
    pool = BlockPool(2)
    a = pool.take()
    pool.seal(a, b"A")
    pool.release(a)
    pool.share(a)
    assert pool.num_available == 1
    assert pool.take() != a
    with pytest.raises(EngineError, match="did not ask"):
        pool.take()


def test_double_release_is_an_error() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.release(block)
    with pytest.raises(EngineError, match="released more often"):
        pool.release(block)


def test_equal_content_is_indexed_once_and_the_copy_is_freed_plainly() -> None:
    pool = BlockPool(2)
    a, b = pool.take(), pool.take()
    pool.seal(a, b"A")
    pool.seal(b, b"A")
    pool.release(b)
    assert pool.find(b"A") == a
    assert pool.free == [b]


def test_the_longest_prefix_is_found_and_one_token_is_left_to_compute() -> None:
    cache = KVCache(16, 4)
    first = make_request(list(range(12)))
    fill(cache, first)
    assert cache.match(make_request([*range(12), 99])) == first.table.blocks
    assert cache.match(make_request(list(range(12)))) == first.table.blocks[:2]
    assert cache.match(make_request([*range(8), 77, 78, 79, 80, 81])) == first.table.blocks[:2]
    assert cache.match(make_request([1, *range(12)])) == []


def test_prefixes_of_released_rows_survive_tail_first_eviction() -> None:
    cache = KVCache(4, 4)
    first = make_request(list(range(16)))
    fill(cache, first)
    head = first.table.blocks[:2]
    cache.release(first.table.blocks)
    other = make_request([200, 201, 202, 203, 204])
    fill(cache, other)
    assert cache.match(make_request([*range(16), 99])) == head


def test_salted_prompts_share_with_the_same_salt_only() -> None:
    cache = KVCache(16, 4)
    fill(cache, make_request(list(range(12)), salt=b"one"))
    assert cache.match(make_request(list(range(12)))) == []
    assert cache.match(make_request(list(range(12)), salt=b"two")) == []
    assert len(cache.match(make_request(list(range(12)), salt=b"one"))) == 2


def test_the_chain_is_the_public_one() -> None:
    cache = KVCache(16, 4)
    request = make_request(list(range(10)), salt=b"s")
    fill(cache, request)
    assert [cache.pool.hash_of[block] for block in request.table.blocks[:2]] == block_hashes(
        np.arange(10, dtype=np.int32), 4, salt=b"s"
    )
    assert cache.pool.hash_of[request.table.blocks[2]] is None


def test_a_row_that_owes_prompt_logprobs_reads_no_prefix_it_has_not_scored() -> None:
    cache = KVCache(16, 4)
    fill(cache, make_request(list(range(12))))
    scored = make_request(list(range(12)), prompt_logprobs=0)
    assert cache.match(scored) == []
    scored.stats.num_scored = 9
    assert len(cache.match(scored)) == 2
    scored.stats.num_scored = 11
    assert len(cache.match(scored)) == 2


def test_without_prefix_cache_nothing_is_hashed() -> None:
    cache = KVCache(16, 4, prefix_cache=False)
    request = make_request(list(range(12)))
    fill(cache, request)
    assert cache.match(make_request(list(range(12)))) == []
    cache.release(request.table.blocks)
    assert len(cache.pool.free) == 16


def test_work_lost_counts_what_no_other_row_holds() -> None:
    cache = KVCache(16, 4)
    first, second = make_request(list(range(12))), make_request([*range(8), 50, 51, 52])
    fill(cache, first)
    fill(cache, second)
    assert second.table.blocks[:2] == first.table.blocks[:2]
    assert cache.work_lost(first) == 4
    assert cache.work_lost(second) == 3


def test_distrust_unseals_from_the_failed_chunk_on() -> None:
    cache = KVCache(16, 4)
    request = make_request(list(range(12)))
    fill(cache, request)
    cache.invalidate(request.table.hashes[1:])
    assert cache.match(make_request([*range(12), 99])) == request.table.blocks[:1]
