"""Conservation laws of an engine core, checked as a whole: when idle in production, after every event in tests.

Called by core. Only reads. A broken law raises IntegrityError with the numbers; it means a bug here, never a bad request.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

import msgspec

from trireme.engine_core.scheduling.decode_batch import NOTHING
from trireme.engine_core.scheduling.request import Request, State
from trireme.engine_core.scheduling.scheduler import Scheduler
from trireme.errors import EngineError


class IntegrityError(EngineError):
    code = "integrity_error"


class Audit(msgspec.Struct, frozen=True):
    """Where every block and every sequence is: free + cached + owned = total."""

    num_free: int
    num_cached: int
    num_owned: int
    num_fenced: int  # of the owned ones: held only for a step in flight
    num_blocks: int
    num_waiting: int
    num_running: int
    num_in_flight: int


def audit(scheduler: Scheduler, requests: dict[tuple[str, int], Request]) -> Audit:
    """Checks every law and returns the counts. Raises IntegrityError."""
    _check_rows(scheduler, requests)
    _check_tables(scheduler)
    return _check_blocks(scheduler)


def check_idle(scheduler: Scheduler) -> None:
    """The laws of an idle engine (nothing is held), cheap even for a large pool."""
    pool = scheduler.cache.pool
    num_available, num_slots = pool.num_available, len(scheduler.free_rows)
    if num_available != pool.num_blocks or any(pool.counts) or len(pool.index) != len(pool.cached):
        raise _broken(f"idle blocks: {len(pool.free)} free + {len(pool.cached)} cached = {pool.num_blocks}")
    if num_slots != scheduler.limits.max_num_seqs or scheduler.running or scheduler.waiting.num_tokens:
        raise _broken(f"idle slots: {num_slots} free = {scheduler.limits.max_num_seqs}; nobody runs or waits")


def _broken(law: str) -> IntegrityError:
    return IntegrityError(f"broken law: {law}")


def _check_rows(scheduler: Scheduler, requests: dict[tuple[str, int], Request]) -> None:
    """Every live request is in exactly one place, and the batch slots add up."""
    running, waiting = scheduler.running, list(scheduler.waiting)
    live = set(map(id, requests.values()))
    if len(running) + len(waiting) != len(live) or live != set(map(id, running + waiting)):
        raise _broken(f"{len(live)} live requests = {len(running)} running + {len(waiting)} waiting")
    for row in running:
        if row.state is not State.RUNNING:
            raise _broken(f"running sequences are RUNNING: {row}")
    for row in waiting:
        if row.state not in (State.WAITING, State.PREEMPTED) or row.table.blocks or row.row >= 0:
            raise _broken(f"queued sequences own nothing: {row} {row.table.blocks}")
    slots, total = [row.row for row in running], scheduler.limits.max_num_seqs
    if sorted(slots + scheduler.free_rows) != list(range(total)):
        raise _broken(f"slots: {sorted(slots)} used + {len(scheduler.free_rows)} free = {total}")
    num_tokens = sum(row.num_tokens for row in waiting)
    if scheduler.waiting.num_tokens != num_tokens:
        raise _broken(f"queued tokens: {scheduler.waiting.num_tokens} counted = {num_tokens}")
    keys = [row.key for row in running]
    if keys != sorted(keys):
        raise _broken(f"running sequences are in policy order: {keys}")


def _check_tables(scheduler: Scheduler) -> None:
    """Every running sequence has exactly the blocks that its computed tokens need."""
    cache = scheduler.cache
    for row in scheduler.running:
        num_coming = sum(pending.asks(row.row) for pending in scheduler.in_flight) if scheduler.ahead else 0
        if not 0 <= row.num_computed <= row.num_tokens + num_coming:
            raise _broken(f"computed tokens within known ones: {row}")
        begun = row.num_tokens % scheduler.columns.tail.shape[1]
        if scheduler.columns.tail[row.row, :begun].tolist() != row.tokens[row.num_tokens - begun :].tolist():
            raise _broken(f"the columns hold the newest tokens of {row}")
        blocks = row.table.blocks
        if len(blocks) != cache.blocks_for(row.num_computed) or row.capacity != len(blocks) * cache.block_size:
            raise _broken(f"{row} holds {len(blocks)} blocks, capacity {row.capacity}")
        if len(set(blocks)) != len(blocks):
            raise _broken(f"no block twice in a table: {row} {blocks}")
        if row.is_decoding and scheduler.columns.token[row.row] != NOTHING and row.num_left + num_coming != 1:
            raise _broken(f"a decoding sequence lacks one token: {row}, {num_coming} to come")


def _check_blocks(scheduler: Scheduler) -> Audit:
    """Reference counts equal owners, and free + cached + owned = total, with each block in one place."""
    pool = scheduler.cache.pool
    held = Counter(chain.from_iterable(row.table.blocks for row in scheduler.running))
    fenced = Counter(chain.from_iterable(pending.fenced for pending in scheduler.in_flight))
    owners = held + fenced if fenced else held
    counts = {block: count for block, count in enumerate(pool.counts) if count}
    if counts != owners:
        raise _broken(f"block counts {counts} = tables and fences {dict(owners)}")
    places = [*pool.free, *pool.cached, *owners]
    if len(places) != pool.num_blocks or len(set(places)) != pool.num_blocks:
        sums = f"{len(pool.free)} free + {len(pool.cached)} cached + {len(owners)} owned = {pool.num_blocks}"
        raise _broken(f"blocks: {sums}")
    known = {content: block for block, content in enumerate(pool.hash_of) if content is not None}
    if known != pool.index:
        raise _broken(f"hash index of {len(pool.index)} = {len(known)} sealed blocks")
    if any(pool.hash_of[block] is not None for block in pool.free):
        raise _broken("free blocks have no content")
    if any(pool.hash_of[block] is None for block in pool.cached):
        raise _broken("cached blocks have content")
    return Audit(
        num_free=len(pool.free),
        num_cached=len(pool.cached),
        num_owned=len(owners),
        num_fenced=len(fenced.keys() - held.keys()),
        num_blocks=pool.num_blocks,
        num_waiting=len(scheduler.waiting),
        num_running=len(scheduler.running),
        num_in_flight=len(scheduler.in_flight),
    )
