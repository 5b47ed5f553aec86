"""Rough step costs of a model on this machine before anything runs, for `trireme plan`. Engines learn the real ones (step_time).

Rates are what the kernels reach, not what the hardware could: two Ice Lake cores (AVX-512 VNNI) read 17 GB/s and compute about 550
int8 GOP/s in linears and 130 GFLOP/s in attention (docs/benchmarks/roofline.md); an H200 about 3 TB/s, 500 and 250 TFLOP/s.
"""

from __future__ import annotations

from typing import NamedTuple

from trireme.machine.device import DeviceFacts
from trireme.machine.memory_budget import num_params
from trireme.model.spec import ArchSpec
from trireme.step_time import StepCosts, StepShape


class MachineRates(NamedTuple):
    """Per second: bytes read, operations of linears, operations of attention (two per multiply-add)."""

    read: float
    linear: float
    attention: float


GPU = MachineRates(3e12, 5e14, 2.5e14)
PER_CORE = {
    "amx_int8": MachineRates(8e9, 8e11, 7e10),
    "avx512_vnni": MachineRates(8e9, 2.7e11, 6.5e10),
    "avx_vnni": MachineRates(8e9, 1.3e11, 3.5e10),
}
ANY_CORE = MachineRates(7e9, 7e10, 3e10)
LAUNCH_S = 0.0003  # of a step, besides


def rates_of(device: DeviceFacts, *, is_on_gpu: bool) -> MachineRates:
    """Of one GPU, or of all cores together."""
    if is_on_gpu:
        return GPU
    one = next((rates for flag, rates in PER_CORE.items() if flag in device.isa), ANY_CORE)
    return MachineRates(*(device.cores * rate for rate in one))


def rough_costs(
    arch: ArchSpec, weight_bytes: int, token_bytes: int, num_workers: int, rates: MachineRates
) -> StepCosts:
    """Of a model with `weight_bytes` and `token_bytes` of KV a token on each of `num_workers` workers that share it."""
    heads = arch.num_layers * arch.num_heads * arch.head_dim / num_workers
    return StepCosts(
        step_s=LAUNCH_S + weight_bytes / rates.read,
        token_s=2 * num_params(arch) / num_workers / rates.linear,
        context_s=token_bytes / rates.read,
        pair_s=4 * heads / rates.attention,
    )


class ExpectedSteps(NamedTuple):
    """Seconds: a step of one sequence and of as many as fit at 1,024 tokens each, and a prompt of 2,048 tokens alone."""

    one: float
    full: float
    num_full: int
    prompt: float


def expected_steps(costs: StepCosts, num_rows: int, step_tokens: int) -> ExpectedSteps:
    """What to expect of steps with up to `num_rows` sequences and `step_tokens` tokens."""
    prompt = sum(
        costs.seconds(StepShape().plus(min(step_tokens, 2048 - start), start)) for start in range(0, 2048, step_tokens)
    )
    return ExpectedSteps(
        costs.seconds(StepShape(1, 1024)), costs.seconds(StepShape(num_rows, 1024 * num_rows)), num_rows, prompt
    )
