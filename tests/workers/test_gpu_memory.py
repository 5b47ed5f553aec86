"""What fits on a card: the arithmetic, the refusal that names what would, and the step that is measured."""

from __future__ import annotations

import numpy as np
import pytest

from trireme.errors import ConfigError
from trireme.machine.memory_budget import GPU_GRAPHS as GRAPHS
from trireme.sizes import GIB, MIB
from trireme.workers.cuda.memory import GpuMemory, check_weights, largest_step

CARD = GpuMemory("cuda:0 (H100)", 80 * GIB, 1 * GIB, 15 * GIB, 3 * GIB, 0.5)
TOKEN = 128 << 10


def test_the_cache_gets_what_is_left_under_the_share() -> None:
    assert CARD.left == 40 * GIB - 19 * GIB - GRAPHS
    CARD.check(CARD.left // TOKEN, TOKEN)


def test_a_length_that_does_not_fit_is_refused_with_two_ways_out() -> None:
    most = CARD.left // TOKEN
    with pytest.raises(ConfigError, match=r"cuda:0 \(H100\) has 20.4 GiB left of 40 GiB") as caught:
        CARD.check(most + 1, TOKEN)
    assert "weights 15.0   activations 3.0   graphs 0.6   driver and other processes 1.0 GiB" in caught.value.message
    shorter, larger = caught.value.hint.split("\n")
    assert shorter.split()[:2] == ["--max-len", str(most)]
    assert larger.split()[:2] == ["--gpu-memory", "0.97"]


def test_a_full_card_has_no_cure_but_another_device() -> None:
    full = GpuMemory("cuda:0", 16 * GIB, 0, 16 * GIB, GIB, 0.9)
    assert full.left == 0
    with pytest.raises(ConfigError) as caught:
        full.check(1, TOKEN)
    assert caught.value.hint.startswith("--device cpu")
    with pytest.raises(ConfigError, match="the weights take 16 GiB;"):
        check_weights("cuda:0", 16 * GIB, 15 * GIB)
    check_weights("cuda:0", 15 * GIB, 15 * GIB + MIB)


@pytest.mark.parametrize(("tokens", "max_len", "lengths"), [(10, 100, [10]), (10, 4, [4, 4, 2]), (8, 4, [4, 4])])
def test_the_largest_step_is_as_few_prompts_as_can_be(tokens: int, max_len: int, lengths: list[int]) -> None:
    step = largest_step(tokens, max_len, 3, 4)
    assert np.diff(step.query_start).tolist() == step.context_len.tolist() == lengths
    assert len(set(step.slots.tolist())) == tokens  # no two tokens share a place
    assert step.logits_index.tolist() == [tokens - 3, tokens - 2, tokens - 1]
