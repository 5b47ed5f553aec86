"""Conservation laws of an engine core, checked as a whole: when idle in production, after every event in tests.

Called by core. Only reads. A broken law raises IntegrityError with the numbers; it means a bug here, never a bad request.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from engine_core.request import Request, State
from engine_core.scheduler import Scheduler
from trireme.errors import EngineError


class IntegrityError(EngineError):
    code = "integrity_error"


class Audit(msgspec.Struct, frozen=True):
    """Where every block and every row is. free + cached + owned = total."""

    num_free: int
    num_cached: int
    num_owned: int
    num_fenced: int  # of the owned ones: held for a step in flight only
    num_blocks: int
    num_waiting: int
    num_running: int
    num_in_flight: int


def audit(scheduler: Scheduler, requests: dict[tuple[str, int], Request]) -> Audit:
    """Checks every law and returns the counts. Raises IntegrityError."""
    scheduler.drop_ended()
    _check_rows(scheduler, requests)
    _check_tables(scheduler)
    return _check_blocks(scheduler)


def _check(true: bool, law: str) -> None:
    if not true:
        raise IntegrityError(f"broken law: {law}")


def _check_rows(scheduler: Scheduler, requests: dict[tuple[str, int], Request]) -> None:
    running, waiting = scheduler.running, list(scheduler.waiting)
    _check(
        {id(row) for row in requests.values()} == {id(row) for row in (*running, *waiting)},
        f"{len(requests)} live requests = {len(running)} running + {len(waiting)} waiting",
    )
    _check(all(row.state is State.RUNNING for row in running), f"running rows are RUNNING: {running}")
    _check(
        all(row.state in (State.WAITING, State.PREEMPTED) for row in waiting), f"queued rows are not running: {waiting}"
    )
    _check(all(not row.blocks and row.row < 0 for row in waiting), f"queued rows own nothing: {waiting}")
    slots = [row.row for row in running]
    total = scheduler.limits.max_num_seqs
    _check(
        sorted(slots + scheduler.free_rows) == list(range(total)),
        f"slots: {sorted(slots)} used + {len(scheduler.free_rows)} free = {total}",
    )
    tokens = sum(len(row.tokens) for row in waiting)
    _check(scheduler.waiting.num_tokens == tokens, f"queued tokens: {scheduler.waiting.num_tokens} counted, {tokens}")
    keys = [scheduler.policy.key(row) for row in running]
    _check(keys == sorted(keys), f"running rows are in policy order: {keys}")


def _check_tables(scheduler: Scheduler) -> None:
    """Every running row has exactly the blocks that its computed tokens need."""
    cache = scheduler.cache
    for row in scheduler.running:
        _check(0 <= row.num_computed <= len(row.tokens), f"computed tokens within known ones: {row}")
        _check(row.capacity == len(row.blocks) * cache.block_size, f"capacity of {len(row.blocks)} blocks: {row}")
        needed = cache.blocks_for(row.num_computed)
        _check(len(row.blocks) == needed, f"{row} holds {len(row.blocks)} blocks and needs {needed}")
        _check(len(set(row.blocks)) == len(row.blocks), f"no block twice in a table: {row} {row.blocks}")
        is_decoding = row.unsent >= 0
        _check(not is_decoding or row.num_left == 1, f"a row that just sampled lacks one token: {row}")


def _check_blocks(scheduler: Scheduler) -> Audit:
    pool = scheduler.cache.pool
    fenced = [block for draft in scheduler.in_flight for block in draft.fenced]
    held = Counter(block for row in scheduler.running for block in row.blocks)
    owners = held + Counter(fenced)
    counts = {block: count for block, count in enumerate(pool.counts) if count}
    _check(counts == dict(owners), f"block counts {counts} = tables and fences {dict(owners)}")
    free, cached = set(pool.free), set(pool.cached)
    _check(len(free) == len(pool.free), f"free blocks are listed once: {pool.free}")
    places = len(free) + len(cached) + len(owners)
    _check(
        places == pool.num_blocks and len(free | cached | set(owners)) == places,
        f"blocks: {len(free)} free + {len(cached)} cached + {len(owners)} owned = {pool.num_blocks}",
    )
    known = {content: block for block, content in enumerate(pool.hash_of) if content is not None}
    _check(known == pool.index, f"hash index of {len(pool.index)} = sealed blocks {len(known)}")
    _check(all(pool.hash_of[block] is None for block in free), "free blocks have no content")
    _check(all(pool.hash_of[block] is not None for block in cached), "cached blocks have content")
    only_fenced = len(set(fenced) - set(held))
    return Audit(
        num_free=len(free),
        num_cached=len(cached),
        num_owned=len(owners),
        num_fenced=only_fenced,
        num_blocks=pool.num_blocks,
        num_waiting=len(scheduler.waiting),
        num_running=len(scheduler.running),
        num_in_flight=len(scheduler.in_flight),
    )
