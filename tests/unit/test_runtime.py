"""Which models run without torch, and what a worker then weighs."""

from __future__ import annotations

import msgspec
import pytest

from trireme.config import EngineConfig, ParallelConfig
from trireme.machine.memory_budget import TORCH_LIBRARY, memory_shares
from trireme.machine.runtime import TORCH, choose_runtime
from trireme.model.bodies import GptBody
from trireme.model.reader import ArchSpec
from trireme.topology.mesh import Mesh

LLAMA = ArchSpec(
    family="llama", num_layers=4, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn=128, vocab_size=320
)


@pytest.mark.parametrize(
    ("changes", "pp", "tp", "because"),
    [
        ({}, 1, 1, ""),
        ({"qk_norm": True, "qk_norm_kind": "wide", "norm_placement": "post"}, 1, 1, ""),
        ({}, 2, 1, ""),
        ({}, 1, 2, "2 workers share each layer"),
        ({"family": "stablelm", "norm_kind": "layer"}, 1, 1, "norms of stablelm"),
        ({"family": "cohere", "norm_placement": "parallel"}, 1, 1, "norms of cohere"),
        ({"family": "stablelm", "qk_norm": True, "qk_norm_kind": "heads"}, 1, 1, "norms of stablelm"),
        ({"family": "gpt2", "body": GptBody()}, 1, 1, "layers of gpt2"),
    ],
)
def test_torch_is_for_what_the_native_stage_does_not_know(changes, pp, tp, because):
    chosen = choose_runtime(msgspec.structs.replace(LLAMA, **changes), Mesh(1, pp, tp))
    assert (chosen.value == TORCH) == bool(because)
    assert because in chosen.because


@pytest.mark.parametrize(("shape", "more"), [({}, 0), ({"tp": 2}, TORCH_LIBRARY), ({"pp": 2}, TORCH_LIBRARY)])
def test_a_worker_weighs_torch_only_where_it_has_it(shape, more):
    def program(**parallel):
        config = EngineConfig(parallel=ParallelConfig(**parallel))
        return next(share.each for share in memory_shares(config, LLAMA, 1000, 1000) if share.what == "worker program")

    assert program(**shape) - program() == more
