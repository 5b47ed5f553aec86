"""Logging for every process: one line per life-cycle event, to stderr, as text or JSON. Standard library only.

`configure` is called once by each process main. Facts go into the message as key=value after a plain sentence; the
process tag comes first. Nothing here may block or raise on the path of a request.
"""

from __future__ import annotations

import json
import logging
import sys
import time

_SHORT = {"DEBUG": "debug", "INFO": "info ", "WARNING": "warn ", "ERROR": "error", "CRITICAL": "fatal"}


class _Text(logging.Formatter):
    def __init__(self, tag: str) -> None:
        super().__init__()
        self.tag = tag

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = _SHORT.get(record.levelname, record.levelname)
        line = f"{clock} {level} {self.tag:<12} {record.getMessage()}"
        return line + "\n" + self.formatException(record.exc_info) if record.exc_info else line


class _Json(logging.Formatter):
    def __init__(self, tag: str) -> None:
        super().__init__()
        self.tag = tag

    def format(self, record: logging.LogRecord) -> str:
        """One record as a JSON object on one line."""
        fields: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "process": self.tag,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def configure(tag: str, *, level: str = "info", form: str = "text") -> None:
    """Sends all records of this process to stderr under `tag` (`engine-0`). May be called again to change the tag or the
    format."""
    out = logging.StreamHandler(sys.stderr)
    out.setFormatter(_Json(tag) if form == "json" else _Text(tag))
    root = logging.getLogger()
    root.handlers[:] = [out]
    root.setLevel(level.upper())


def facts(**values: object) -> str:
    """`key=value` pairs in the given order, floats to three significant digits: the tail of a log line."""
    return " ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())
