"""All rank arithmetic: which worker is which stage, which slice of a dimension a rank owns. Nothing else computes ranks.

Workers of one engine are numbered stage-major: worker = pp_rank * tp + tp_rank. Slices may be uneven: 3 KV heads over
tp=2 gives 2 and 1, so that models whose head counts do not divide still run.
"""

from __future__ import annotations

from typing import NamedTuple

from trireme.errors import ConfigError


class Span(NamedTuple):
    """Half-open range [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def split_evenly(total: int, parts: int, part: int, *, unit: int = 1) -> Span:
    """Part `part` of `total` split into `parts` contiguous spans of whole `unit`s; earlier parts get the remainder.

    Raises ConfigError when there are fewer units than parts, or `total` is not a multiple of `unit`.
    """
    if total % unit:
        raise ConfigError(f"cannot split {total} into units of {unit}: {total % unit} left over")
    units = total // unit
    if units < parts:
        raise ConfigError(
            f"cannot split {total} (in units of {unit}: {units}) over {parts} ranks: at most {units} ranks can take part",
            hint=f"use at most {units} ranks",
        )
    base, extra = divmod(units, parts)
    start = part * base + min(part, extra)
    return Span(start * unit, (start + base + (1 if part < extra else 0)) * unit)


class HeadSpans(NamedTuple):
    """Query and KV heads owned by one TP rank. `replicated` when KV heads are shared by several ranks."""

    q: Span
    kv: Span
    replicated: bool


def split_heads(num_heads: int, num_kv_heads: int, tp: int, tp_rank: int) -> HeadSpans:
    """Query and KV heads of one TP rank. Whole GQA groups go to one rank; with fewer KV heads than ranks each KV head is
    replicated over tp / num_kv_heads ranks."""
    group = num_heads // num_kv_heads
    if num_kv_heads >= tp:
        kv = split_evenly(num_kv_heads, tp, tp_rank)
        return HeadSpans(Span(kv.start * group, kv.stop * group), kv, False)
    if tp % num_kv_heads:
        raise ConfigError(f"tp={tp} must be a multiple of the {num_kv_heads} KV heads when it exceeds them")
    share = tp // num_kv_heads
    kv_head = tp_rank // share
    inside = split_evenly(group, share, tp_rank % share)
    base = kv_head * group
    return HeadSpans(Span(base + inside.start, base + inside.stop), Span(kv_head, kv_head + 1), True)


class Mesh(NamedTuple):
    """Position of one worker: its engine (dp rank), and its stage and shard in the engine."""

    dp: int
    pp: int
    tp: int
    dp_rank: int = 0
    pp_rank: int = 0
    tp_rank: int = 0

    @property
    def num_workers(self) -> int:
        """Workers of one engine."""
        return self.pp * self.tp

    @property
    def worker(self) -> int:
        """Index of this worker inside its engine."""
        return self.pp_rank * self.tp + self.tp_rank

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def reports_result(self) -> bool:
        """True for the one worker whose sampled tokens go back to the engine core."""
        return self.is_last_stage and self.tp_rank == 0

    def at_worker(self, worker: int) -> Mesh:
        """The same mesh with the coordinates of worker `worker` of this engine."""
        if not 0 <= worker < self.num_workers:
            raise ConfigError(f"worker {worker} is outside 0..{self.num_workers - 1}")
        return self._replace(pp_rank=worker // self.tp, tp_rank=worker % self.tp)

    def gpu(self, count: int) -> int:
        """Index of this worker's GPU among the `count` visible on its host; workers share GPUs where there are too few."""
        return (self.dp_rank * self.num_workers + self.worker) % count

    def tp_group(self) -> list[int]:
        """Workers that share this worker's stage, in rank order."""
        return [self.pp_rank * self.tp + rank for rank in range(self.tp)]

    def layers(self, num_layers: int) -> Span:
        """Layers of this stage; earlier stages take the remainder."""
        return split_evenly(num_layers, self.pp, self.pp_rank)
