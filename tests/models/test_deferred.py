"""The part of torch that workers set aside: absent from a worker's start, there at once when it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import workers.worker, sys, torch
part = sys.modules["torch._meta_registrations"]
assert "__getattr__" in vars(part), "it was executed at import"
torch.nn.functional.softmax(torch.ones(3, 4) @ torch.ones(4, 4), 0).sum()
assert "__getattr__" in vars(part), "it was executed by ordinary arithmetic"
assert not hasattr(part, "__nothing__")
assert callable(part.register_meta)
assert len(vars(part)) > 100
assert torch.ones(3, device="meta").cumsum(0).shape == (3,)
"""


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="with a GPU nothing is set aside")
def test_shape_rules_are_executed_when_asked_for_and_not_before():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
