"""Writes docs/cli.md and docs/metrics.md from the tables of the code (`make docs`); tests compare them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trireme.launch.options import COMMANDS, SWITCHES, flag_text, overview, spellings  # noqa: E402
from trireme.metrics import METRICS  # noqa: E402
from trireme.settings import Setting, table  # noqa: E402

_NOTE = "<!-- Written by `make docs` from the code. Do not edit. -->\n"


_STATUS = (
    ("0", "done; of `serve`: a signal came, and what ran has ended (the drain)"),
    (
        "1",
        "something failed: an engine, a server at `--url`, a request of a benchmark; `plan`: it does not fit; `doctor`: unfit",
    ),
    ("2", "the command line, the environment or the file of settings is wrong"),
    ("3", "a model's file is missing, broken or unsupported"),
    (
        "130, 143",
        "SIGINT (Ctrl-C) or SIGTERM ended it at once: before `serve` was ready, or as the second signal while it drained",
    ),
    ("141", "whoever read the output has left"),
)


def cli() -> str:
    """The command-line reference: every command, and every setting in its three spellings."""
    parts = [
        "# Command line\n",
        _NOTE,
        "```\n" + overview() + "\n```\n",
        "Settings can be given as a flag, in the environment, or in a YAML file named by `--config` or `TRIREME_CONFIG`.",
        "A flag wins over the environment, the environment over the file, the file over the default. File keys may be",
        "grouped (`cache: {block_size: 16}`) or flat (`block-size: 16`). `trireme serve --print-config` writes a file",
        "that reproduces a run, without keys. An unknown name is an error that says the nearest one.\n",
        SWITCHES.strip() + " In the environment and in a file its value is true or false.",
        "Values in a file are taken as they stand there (`served-name: 1.10` is that text), and the kind of the setting",
        "says what they mean; a plain `null`, `~` or nothing is the default. A setting that stands there twice is an error.",
        "Addresses that Kubernetes puts into the environment for a service called `trireme` or `trireme-...`",
        "(`TRIREME_SERVICE_HOST`, `TRIREME_PORT=tcp://...`) are no settings and are left alone.\n",
        "## Exit status\n",
        "| status | meaning |\n|---|---|",
        *(f"| {status} | {meaning} |" for status, meaning in _STATUS),
        "",
    ]
    for command in COMMANDS:
        places = " ".join(f"[{p.name.upper()}]" for p in command.positionals)
        parts.append(f"## trireme {command.name} {places}".rstrip() + "\n")
        parts.append(command.summary[0].upper() + command.summary[1:] + ".\n")
        parts.append("```\n" + "\n".join(command.examples) + "\n```\n")
        parts.append("| flag | default | meaning |\n|---|---|---|")
        parts += [f"| `{flag_text(s)}` | {_default(s)} | {_cell(s.help)} |" for s in command.options]
        if command.common:
            parts.append("\nand all settings below.")
        parts.append("")
    parts.append("## Settings\n")
    group = ""
    for setting in table():
        if setting.group != group:
            group = setting.group
            parts.append(
                f"\n### {group}\n\n| flag | environment, key | default | limits | meaning |\n|---|---|---|---|---|"
            )
        flag = "by position" if setting.name == "model" else " ".join(f"`{flag}`" for flag in spellings(setting))
        parts.append(
            f"| {flag} | `{setting.env}` `{setting.key}` | {_default(setting)} | {_cell(setting.limits)} | {_cell(setting.help)} |"
        )
    return "\n".join(parts) + "\n"


def metrics() -> str:
    """The metrics reference."""
    rows = [
        f"| {'**' if m.decisive else ''}`{m.exported}`{'**' if m.decisive else ''} | {m.kind} | {', '.join(m.labels)} | {m.help} |"
        for m in METRICS
    ]
    head = (
        "# Metrics\n\n" + _NOTE + "\nServed at `/metrics` in the Prometheus text form. The decisive ones are bold.\n\n"
    )
    return head + "| name | kind | labels | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _default(setting: Setting) -> str:
    if setting.default in (None, ()):
        return ""
    if isinstance(setting.default, bool):
        return "on" if setting.default else "off"
    return ",".join(setting.default) if isinstance(setting.default, tuple) else str(setting.default)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


DOCS: dict[str, Callable[[], str]] = {"cli.md": cli, "metrics.md": metrics}

if __name__ == "__main__":
    for name, write in DOCS.items():
        (ROOT / "docs" / name).write_text(write())
        print(f"docs/{name}")
