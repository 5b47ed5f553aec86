"""Constants about an engine's sleep, shared by engines, frontends and workers."""

from __future__ import annotations

LEVELS = (1, 2)
RESTING = ("state", "sleep_level", "pause")  # of an engine's statistics
NO_SLEEP = "an engine on a CPU has no sleep: its weights are where a sleep would put them; --device cuda has one"
