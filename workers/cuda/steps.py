"""The two kinds of steps on a GPU, from the host's columns to sampled tokens that stay on the device: decode steps of one token
per sequence (`decode`, capturable in a CUDA graph), and all others (`mixed`). Used by workers.cuda.runner and workers.cuda.graphs.

Nothing here waits for the device. Legend: P padded batch size, R sequences, T tokens, S sequences that sample, K changed
block-table entries; pieces as in models.cuda.attention.prefill_plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trireme.models.arch.rope import TableRows
from trireme.models.cuda import ops as cuda_ops
from trireme.models.cuda.attention.prefill import Prompts
from trireme.models.cuda.attention.prefill_plan import PromptPlan, Rules, order_prompts, plan_prompts
from trireme.models.cuda.decoder import CudaBatch
from trireme.models.cuda.ops import LOGPROB_WORDS
from trireme.topology.mesh import Mesh
from trireme.workers.batch import Batch
from trireme.workers.cuda.device_state import DeviceRows, Indices, Ints
from trireme.workers.cuda.staging import Upload
from trireme.workers.inputs import StepRows, check_rows, slot_values
from trireme.workers.kv.tensors import independent

COLUMNS = ("rows", "ids", "positions", "slots", "context", "jobs", "at", "blocks")  # of a decode step, each [P]
MOST_BLOCKS = 528  # CTAs of decode attention that a GPU runs concurrently
SHORT = 512  # tokens; contexts up to here are split into at most FEW_SPLITS parts
FEW_SPLITS, MANY_SPLITS = 4, 32
Sample = Callable[..., Tensor]
"""models.cuda.ops.sample_rows."""


class DeviceModel(Protocol):
    """The part of models.cuda.decoder.CudaModel that a step uses."""

    vocab_size: int
    kv_heads: int
    mesh: Mesh
    prompt_attention: Any  # models.cuda.attention.prefill.PromptAttention
    table_rows: TableRows

    def run(self, batch: CudaBatch, kv: list[Any], scratch: Tensor | None = None) -> Tensor: ...

    def scratch_floats(self, rows: int, splits: int) -> int: ...


def choose_splits(rows: int, kv_heads: int, longest: int) -> int:
    """Number of context splits of decode attention: enough to fill the GPU, a power of two."""
    most = min(FEW_SPLITS if longest <= SHORT else MANY_SPLITS, MOST_BLOCKS // max(rows * kv_heads, 1))
    return 1 << max(most, 1).bit_length() - 1


def fill_decode(out: Ints, batch: Batch, step: StepRows, changes: tuple[Indices, Ints], device: DeviceRows) -> None:
    """Writes COLUMNS of a decode step (one token per sequence) into `out` [8, P]; P may exceed the number of sequences.

    Raises EngineError when a sequence lacks the token or block that the plan relies on.
    """
    rows, positions, count = step.rows, step.num_computed, step.rows.size
    at, blocks = changes
    context = positions + np.int32(1)
    check_rows(batch, step, context)
    out[:, count:] = 0
    columns = dict(zip(COLUMNS, out, strict=True))
    columns["rows"][:count], columns["rows"][count:] = rows, device.padding
    columns["ids"][:count] = batch.tokens[rows, positions]
    columns["positions"][:count] = positions  # (as any TableRows has them: who samples has all of its prompt behind it)
    columns["slots"][:count], columns["slots"][count:] = slot_values(batch, rows, positions), -1
    columns["context"][:count] = context
    columns["jobs"][:count], columns["jobs"][count:] = rows, -1
    columns["at"][: at.size], columns["at"][at.size :] = at, device.nowhere
    columns["blocks"][: at.size] = blocks


@dataclass(slots=True)
class PrefillDecodeStep:
    """A step of any kind. On the device sequences with one token come first; sampling ones are in plan order."""

    num_decodes: int
    longest: int  # context of a decoding sequence
    plan: PromptPlan
    columns: list[NDArray[Any]]  # in the order of MIXED

    @property
    def sizes(self) -> list[int]:
        return [column.size for column in self.columns]


STEP_COLUMNS = (
    *("ids", "positions", "slots"),  # of tokens
    *("rows", "contexts"),  # of decodes
    *("places", "firsts", "bounds", "reach", "fresh"),  # of pieces, and the start offsets of packed prompts
    *("last", "asking", "jobs", "asking_at"),  # of sequences that sample
    *("at", "blocks"),
)


def mix(
    batch: Batch,
    step: StepRows,
    changes: tuple[Indices, Ints],
    rules: Rules,
    table_rows: TableRows,
    at_host: NDArray[np.bool_] | None = None,
) -> PrefillDecodeStep:
    """The columns of `step` in the order of MIXED. Sampling slots in `at_host` get no token on the device. Raises EngineError
    like fill_decode."""
    context = step.num_computed + step.num_tokens
    check_rows(batch, step, context)
    is_decode = step.num_tokens == 1
    prompts = np.flatnonzero(~is_decode)
    prompts = prompts[order_prompts(step.num_tokens[prompts], step.num_computed[prompts])]
    order = np.concatenate((np.flatnonzero(is_decode), prompts))
    decodes = int(is_decode.sum())
    counts, contexts, rows = step.num_tokens[order], context[order], step.rows[order]
    if decodes:
        rules = rules.beside_streams()
    plan = plan_prompts(counts[decodes:], step.num_computed[prompts], rules)
    ends = np.cumsum(counts)
    owner = np.repeat(rows, counts)
    positions = (np.arange(int(ends[-1])) + np.repeat(step.num_computed[order] - (ends - counts), counts)).astype(
        np.int32
    )
    turns = table_rows.of(positions, owner, batch.num_prompt)
    last = np.empty_like(ends)
    last[order] = ends - 1
    asking = step.rows[step.sample]
    columns = [
        *(batch.tokens[owner, positions], turns, slot_values(batch, owner, positions)),
        *(rows[:decodes], contexts[:decodes]),
        *(rows[decodes:][plan.piece_row], *plan.columns[1:]),
        *(last[step.sample], asking, asking if at_host is None else np.where(at_host, -1, asking)),
        context[step.sample],
        *changes,
    ]
    return PrefillDecodeStep(decodes, int(contexts[:decodes].max(initial=0)), plan, columns)


def drawn_tensors(
    num_rows: int, device: torch.device, make: Callable[..., Tensor] = torch.zeros
) -> tuple[Tensor, Tensor]:
    """Output tensors for tokens, and for their log-probabilities."""
    tokens, logprobs = (
        make(size, dtype=torch.int32, device=device) for size in ((num_rows,), (num_rows, LOGPROB_WORDS))
    )
    return tokens, logprobs


class Steps:
    """A model, its cache and the slot tables on one device, and how steps are launched over them."""

    def __init__(
        self,
        model: DeviceModel,
        kv: list[Any],
        rows: DeviceRows,
        sample: Sample,
        *,
        max_tokens: int,
        device: torch.device,
        vocab_size: int | None = None,
    ) -> None:
        """`vocab_size`: ids from there on are never sampled; default: the model's."""
        self.device = device
        self._vocab_size = model.vocab_size if vocab_size is None else vocab_size
        self.rows = rows
        self._model, self._kv, self._sample = model, kv, sample
        self.samples, self.num_ranks = model.mesh.is_last_stage, model.mesh.tp
        self._upload = Upload(4 * max_tokens, device)
        most = max(model.scratch_floats(count, self.splits(count, SHORT + 1)) for count in range(1, rows.padding + 1))
        self._scratch = torch.empty(max(most, 1), dtype=torch.float32, device=device)

    @property
    def rules(self) -> Rules:
        """How the prompts of a step are split."""
        found: Rules = self._model.prompt_attention.rules
        return found

    def splits(self, rows: int, longest: int) -> int:
        return choose_splits(rows, self._model.kv_heads, longest)

    def decode(self, inputs: Tensor, tokens: Tensor, splits: int, logprobs: Tensor | None = None) -> None:
        """One token for each slot of `inputs` [8, P]; sampled tokens go to `tokens` [P] and `logprobs` [P, LOGPROB_WORDS].
        Allocates only what a graph may."""
        rows, known, positions, slots, context, jobs, at, blocks = inputs
        table = self.rows
        table.write_blocks(at, blocks)
        batch = CudaBatch(
            token_ids=table.newest(rows, known),
            positions=positions,
            slots=slots,
            context_len=context,
            block_table=table.blocks.index_select(0, rows),
            logits_index=None,
            num_decodes=rows.shape[0],
            splits=splits,
        )
        logits = self._run(batch)
        if self.samples:
            self._sample(logits, table.jobs, context, tokens, slots=jobs, logprobs=logprobs)
            table.keep(rows, tokens)

    def _run(self, batch: CudaBatch) -> Tensor:
        """Logits of the tokens that may be sampled, a view; on other stages the model's output."""
        found = self._model.run(batch, self._kv, self._scratch)
        return found[:, : self._vocab_size] if self.samples else found

    def mix(
        self,
        batch: Batch,
        step: StepRows,
        changes: tuple[Indices, Ints],
        *,
        rules: Rules | None = None,
        at_host: NDArray[np.bool_] | None = None,
    ) -> PrefillDecodeStep:
        """`mix` for this model; prompts are split by `rules`, or by the model's own."""
        return mix(batch, step, changes, rules or self.rules, self._model.table_rows, at_host)

    def mixed(self, step: PrefillDecodeStep) -> tuple[Tensor, Tensor, Tensor]:
        """Launches any step; returns tokens [S], log-probabilities [S, LOGPROB_WORDS] and logits [S, V] of the sequences that
        sample, in plan order."""
        host = self._upload.take(sum(step.sizes))
        np.concatenate(step.columns, out=host, casting="same_kind")
        parts = self._upload.send(host.size).split(step.sizes)
        tokens, logprobs = drawn_tensors(step.columns[STEP_COLUMNS.index("asking")].size, self.device, torch.empty)
        splits = self.splits(step.num_decodes, step.longest)
        return tokens, logprobs, self.launch_mixed(parts, step.plan, tokens, splits, logprobs=logprobs)

    def launch_mixed(
        self,
        parts: Sequence[Tensor],
        plan: PromptPlan,
        tokens: Tensor,
        splits: int,
        *,
        most_queries: int = 0,
        logprobs: Tensor | None = None,
    ) -> Tensor:
        """Launches a step from its columns on the device: fills tokens [S] and logprobs [S, LOGPROB_WORDS], returns logits [S, V].
        Allocates only what a graph may if `plan` has only pieces, of at most `most_queries` queries."""
        ids, positions, slots, rows, contexts, *of_prompts, last, asking, jobs, asking_at, at, blocks = parts
        table, decodes = self.rows, rows.numel()
        if at.numel():
            table.write_blocks(at, blocks)
        if decodes:
            ids[:decodes] = table.newest(rows, ids[:decodes])
        prompts = None
        if decodes < ids.numel():
            prompts = Prompts.of(plan, table.blocks, of_prompts, most_queries=most_queries)
        batch = CudaBatch(
            token_ids=ids,
            positions=positions,
            slots=slots,
            context_len=contexts,
            block_table=table.blocks.index_select(0, rows),
            logits_index=last.long(),
            num_decodes=decodes,
            splits=splits,
            prompts=prompts,
        )
        logits = self._run(batch)
        if asking.numel() and self.samples:
            self._sample(logits, table.jobs, asking_at, tokens, slots=jobs, logprobs=logprobs)
            table.keep(asking, tokens)
        return logits

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies (source, destination) blocks of all layers, as if sequentially."""
        for batch in independent(copies):
            columns = np.array(batch, np.int32).T
            pairs = torch.stack(self.send(*columns), 1)
            for layer in self._kv:
                for side in (layer.k, layer.v):
                    cuda_ops.copy_blocks(side, pairs)

    def change_blocks(self, changes: tuple[Indices, Ints]) -> None:
        """Writes block-table changes separately from a step."""
        at, blocks = changes
        if at.size:
            self.rows.write_blocks(*self.send(at, blocks))

    def tell_tokens(self, rows: NDArray[Any], tokens: NDArray[Any]) -> None:
        """Writes newest tokens that the host has sampled."""
        if rows.size:
            self.rows.keep(*self.send(rows, tokens))

    def write_jobs(self, rows: NDArray[Any], jobs: NDArray[Any]) -> None:
        """Writes sampling jobs of new sequences."""
        words = jobs.view(np.int32)
        at, values = self.send(rows, words)
        self.rows.jobs.view(torch.int32).index_copy_(0, at.long(), values.view(rows.size, -1))

    def send(self, first: NDArray[Any], second: NDArray[Any]) -> tuple[Tensor, Tensor]:
        """Copies both to the device, as int32."""
        host = self._upload.take(first.size + second.size)
        host[: first.size], host[first.size :] = first, second.reshape(-1)
        sent = self._upload.send(host.size)
        return sent[: first.size], sent[first.size :]
