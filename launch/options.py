"""The commands of `trireme`, their flags and their help, as one table; launch/parse.py and docs/cli.md are derived from it.

Engine settings come from trireme/settings.py; only flags of a single command are written here. Imports nothing heavy:
`--help` must answer in a quarter of a second.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from trireme.errors import ConfigError
from trireme.settings import Loaded, Setting, nearest, table

CONFIG = Setting("", "config", "text", None, "YAML file of settings; flags and environment win over it", optional=True)
JSON = Setting("", "json", "switch", False, "print the result as JSON")
URL = Setting(
    "", "url", "text", None, "address of a running server; default: start one, and stop it after", optional=True
)
MAX_TOKENS = Setting("", "max_tokens", "whole", None, "most tokens of an answer", optional=True, low=1)
MOST_TOKENS, MOST_REQUESTS = 10_000_000, 1_000_000  # upper bounds of what a benchmark makes prompts for
TEMPERATURE = Setting("", "temperature", "real", 0.7, "0 takes the likeliest token", low=0, high=100)
SEED = Setting("", "seed", "whole", None, "number that makes sampling repeatable", optional=True, low=-(2**63))
SYSTEM = Setting("", "system", "text", None, "system message at the start of the conversation", optional=True)
INPUT_LEN = Setting("", "input_len", "whole", 128, "prompt length, tokens", low=1, high=MOST_TOKENS)
OUTPUT_LEN = Setting("", "output_len", "whole", 128, "tokens generated per request", low=1, high=MOST_TOKENS)
REPEATS = Setting("", "repeats", "whole", 3, "measured runs, each with fresh prompts", low=1, high=10_000)
NUM_REQUESTS = Setting(
    "",
    "num_requests",
    "whole",
    None,
    "requests per row; default: 3 per client",
    optional=True,
    low=1,
    high=MOST_REQUESTS,
)
PEER = Setting(
    "",
    "peer",
    "text",
    None,
    "a second server (or several, with commas) to load in turn with the same requests",
    optional=True,
)

SLO = Setting(
    "",
    "slo",
    "list",
    (),
    "latencies that a good request keeps, as ttft=1s,itl=50ms,e2e=20s or some of these: first token within ttft, the "
    "request's own p99 gap between tokens within itl, last token within e2e; adds goodput (good requests per second) and "
    "attainment (their share)",
)
ATTAINMENT = Setting(
    "",
    "attainment",
    "real",
    0.9,
    "share of requests that must be good at the rate that is searched",
    low=0.01,
    high=1,
)

COMMON_ENGINE = ("max_len", "kv_memory", "dp", "tp", "pp", "threads", "log_level")


class Command(NamedTuple):
    """One command. `module` has `run(invocation) -> exit status`; `options` are the flags of this command only; `common` names
    the engine settings that `--help` shows (none: the command takes no settings)."""

    name: str
    summary: str
    module: str
    positionals: tuple[Setting, ...]
    options: tuple[Setting, ...]
    examples: tuple[str, ...]
    common: tuple[str, ...] = ()


class Invocation(NamedTuple):
    """A parsed command line. `options` has every positional and option of the command, with defaults filled in."""

    command: Command
    options: dict[str, Any]
    loaded: Loaded


_MODEL = next(s for s in table() if s.name == "model")

COMMANDS: tuple[Command, ...] = (
    Command(
        "serve",
        "serve a model over HTTP with the OpenAI API",
        "trireme.launch.processes.parts",
        (_MODEL,),
        (
            CONFIG,
            Setting("", "print_config", "switch", False, "write the resolved settings as YAML and exit"),
        ),
        (
            "trireme serve smollm2",
            "trireme serve FILE.gguf --port 8001 --max-len 4096",
            "trireme serve DIR --dp 2 --tp 2",
        ),
        ("host", "port", "api_key", "api_servers", *COMMON_ENGINE),
    ),
    Command(
        "chat",
        "chat with a model in the terminal",
        "trireme.launch.commands.chat",
        (_MODEL,),
        (SYSTEM, TEMPERATURE, MAX_TOKENS, SEED, URL, CONFIG),
        ("trireme chat smollm2", "trireme chat FILE.gguf --temperature 0", "trireme chat --url http://127.0.0.1:8000"),
        COMMON_ENGINE,
    ),
    Command(
        "complete",
        "continue a text and print the completion",
        "trireme.launch.commands.complete",
        (
            _MODEL,
            Setting("", "prompt", "text", "-", "text to continue; - reads standard input"),
        ),
        (
            TEMPERATURE,
            MAX_TOKENS._replace(
                help="maximum tokens of the completion; default: all that fits, and with --url the API's 16"
            ),
            SEED,
            JSON,
            URL,
            CONFIG,
        ),
        (
            "trireme complete smollm2 'The capital of France is' --max-tokens 8",
            "trireme complete smollm2 - < draft.txt",
            "trireme complete smollm2 'Once' --json",
        ),
        COMMON_ENGINE,
    ),
    Command(
        "control",
        "put a running server to sleep, wake it, pause it or resume it",
        "trireme.launch.commands.control",
        (Setting("", "action", "text", "state", "sleep, wake, pause, resume, or state, which changes nothing"),),
        (
            Setting("", "level", "whole", 1, "level of a sleep: 1 keeps the weights in host memory, 2 drops them"),
            Setting(
                "",
                "mode",
                "text",
                "wait",
                "what a pause does with running requests: abort, wait (until they end), keep",
            ),
            Setting("", "dir", "text", None, "directory of the server's sockets, if there are several", optional=True),
            URL._replace(
                help="address of the server, whose --admin-key is needed; default: this user's, by its sockets"
            ),
            JSON,
            CONFIG,
        ),
        ("trireme control", "trireme control sleep --level 2", "trireme control pause --url http://127.0.0.1:8000"),
        ("admin_key",),
    ),
    Command(
        "plan",
        "show whether a model fits, its memory shares and the flags to use; loads nothing",
        "trireme.launch.commands.plan",
        (_MODEL,),
        (JSON, CONFIG),
        ("trireme plan smollm2", "trireme plan DIR --tp 2 --max-len 32768", "trireme plan FILE.gguf --json"),
        (*COMMON_ENGINE[:-1], "kv_dtype", "max_num_seqs"),
    ),
    Command(
        "models inspect",
        "show what is in a model's files: shape, tensor types, tokenizer, template",
        "trireme.launch.commands.inspect_model",
        (_MODEL,),
        (JSON,),
        ("trireme models inspect smollm2", "trireme models inspect DIR", "trireme models inspect FILE.gguf --json"),
    ),
    Command(
        "bench latency",
        "time one request at a time: first token, each next token",
        "trireme.launch.bench.offline",
        (_MODEL,),
        (INPUT_LEN, OUTPUT_LEN, REPEATS, JSON, CONFIG),
        (
            "trireme bench latency smollm2",
            "trireme bench latency smollm2 --input-len 2048 --output-len 1",
            "trireme bench latency smollm2 --json",
        ),
        COMMON_ENGINE,
    ),
    Command(
        "bench throughput",
        "time many requests in flight at once, without HTTP",
        "trireme.launch.bench.offline",
        (_MODEL,),
        (
            Setting("", "num_requests", "whole", 64, "requests, all in flight", low=1, high=MOST_REQUESTS),
            INPUT_LEN._replace(default=272, help="mean prompt length, tokens; lengths are spread evenly around it"),
            OUTPUT_LEN,
            REPEATS,
            JSON,
            CONFIG,
        ),
        (
            "trireme bench throughput smollm2",
            "trireme bench throughput smollm2 --num-requests 16 --input-len 512",
            "trireme bench throughput smollm2 --tp 2 --json",
        ),
        COMMON_ENGINE,
    ),
    Command(
        "bench serve",
        "load an HTTP server with closed loops and measure what clients see",
        "trireme.launch.bench.serve",
        (_MODEL,),
        (
            Setting("", "concurrency", "list", ("1", "8", "32"), "clients at once; several values give several rows"),
            SLO,
            NUM_REQUESTS,
            INPUT_LEN,
            OUTPUT_LEN,
            REPEATS._replace(default=1),
            URL,
            PEER,
            JSON,
            CONFIG,
        ),
        (
            "trireme bench serve smollm2",
            "trireme bench serve --url http://127.0.0.1:8000 --concurrency 1,4,16 --slo ttft=1s,itl=50ms",
            "trireme bench serve smollm2 --peer http://127.0.0.1:8080 --json",
        ),
        COMMON_ENGINE,
    ),
    Command(
        "bench sweep",
        "raise the load on an HTTP server step by step, or find the highest rate that keeps objectives",
        "trireme.launch.bench.serve",
        (_MODEL,),
        (
            Setting(
                "",
                "concurrency",
                "list",
                (),
                "the steps, as clients at once; default: 1,2,4,8,16,32, or with --slo the highest rate is searched",
            ),
            Setting(
                "",
                "rate",
                "list",
                (),
                "the steps, as requests per second with random arrivals (open loop); with --slo a single value is where the "
                "search starts (default: an estimate): doubling, then bisection to within 5 %",
            ),
            SLO,
            ATTAINMENT,
            NUM_REQUESTS._replace(
                help="requests per row; default: 3 per client, 20 s of arrivals at a rate, at least 20 in a search"
            ),
            INPUT_LEN,
            OUTPUT_LEN,
            REPEATS._replace(default=1),
            URL,
            PEER,
            JSON,
            CONFIG,
        ),
        (
            "trireme bench sweep smollm2",
            "trireme bench sweep --url http://127.0.0.1:8000 --slo ttft=1s,itl=50ms",
            "trireme bench sweep --url http://127.0.0.1:8000 --rate 0.5,1,2,4",
            "trireme bench sweep smollm2 --json > A.json && trireme report A.json",
        ),
        COMMON_ENGINE,
    ),
    Command(
        "bench ipc",
        "time the path between a frontend and a worker, without a model",
        "trireme.launch.bench.ipc",
        (),
        (
            Setting("", "running", "list", ("1", "64", "256", "1024", "4096"), "requests at once; a row for each"),
            OUTPUT_LEN,
            JSON,
        ),
        (
            "trireme bench ipc",
            "trireme bench ipc --running 256,1024 --output-len 64",
            "trireme bench ipc --json",
        ),
    ),
    Command(
        "bench balance",
        "compare routing policies in virtual time: spread of a burst, cache hits of conversations",
        "trireme.launch.bench.balance",
        (),
        (
            Setting("", "fronts", "list", ("1", "4", "16"), "HTTP processes; a row for each"),
            Setting("", "num_requests", "whole", 400, "requests of the burst", low=1, high=100_000),
            JSON,
        ),
        (
            "trireme bench balance",
            "trireme bench balance --fronts 64 --num-requests 1000",
            "trireme bench balance --json > A.json && trireme report A.json",
        ),
    ),
    Command(
        "bench startup",
        "time a start up to the first served token, and measure the processes' memory",
        "trireme.launch.bench.startup",
        (_MODEL,),
        (REPEATS, JSON, CONFIG),
        (
            "trireme bench startup smollm2",
            "trireme bench startup FILE.gguf --repeats 5",
            "trireme bench startup DIR --tp 2 --json",
        ),
        COMMON_ENGINE,
    ),
    Command(
        "report",
        "draw the JSON results of benchmarks as one HTML page, alone or two compared",
        "trireme.launch.commands.report",
        (
            Setting("", "a", "text", "", "file that a benchmark wrote with --json"),
            Setting("", "b", "text", None, "a second one, to compare with", optional=True),
        ),
        (Setting("", "output", "text", "report.html", "file to write; - is standard output"),),
        (
            "trireme report A.json",
            "trireme report before.json after.json",
            "trireme report A.json B.json --output -",
        ),
    ),
    Command(
        "doctor",
        "check what this machine and this installation support",
        "trireme.launch.commands.doctor",
        (),
        (JSON,),
        ("trireme doctor", "trireme doctor --json"),
    ),
    Command(
        "version",
        "print the version",
        "trireme.launch.commands.version",
        (),
        (JSON,),
        ("trireme version", "trireme version --json"),
    ),
)


def find_command(words: Sequence[str]) -> tuple[Command, list[str]]:
    """The command named by the first words, and the rest. Raises ConfigError with the nearest name."""
    by_name = {command.name: command for command in COMMANDS}
    for count in (2, 1):
        name = " ".join(words[:count])
        if len(words) >= count and name in by_name:
            return by_name[name], list(words[count:])
    if kinds := [command.name.split()[1] for command in group_of(words[0])]:
        hint = f"trireme {words[0]} " + "|".join(kinds)
        if len(words) == 1:
            raise ConfigError(f"trireme {words[0]} needs the name of one of its commands", hint=hint)
        raise ConfigError(f"there is no command {words[0]} {words[1]}{nearest(words[1], kinds)}", hint=hint)
    firsts = dict.fromkeys(name.split()[0] for name in by_name)
    raise ConfigError(f"there is no command {words[0]}{nearest(words[0], firsts)}", hint="trireme --help")


def group_of(word: str) -> list[Command]:
    """The commands with two words whose first is this one."""
    return [command for command in COMMANDS if command.name.startswith(word + " ")]


def flags_of(command: Command) -> list[Setting]:
    """Its own options, then the engine settings it takes (except positional ones)."""
    places = {positional.name for positional in command.positionals}
    engine = table() if command.common else ()
    return [*command.options, *(s for s in engine if s.name not in places)]


# ---------------------------------------------------------------- help

_WIDTH = 100
SWITCHES = "A switch is turned on by --name or --name=true, and off by --no-name or --name=false. "


def help_about(words: Sequence[str]) -> str:
    """Help for these words: nothing, a group of commands, or a command (with `all`: all its flags). Raises ConfigError."""
    everything = words[-1:] == ["all"]
    words = words[:-1] if everything else words
    if not words:
        return overview()
    if len(words) == 1 and group_of(words[0]):
        return help_of_group(words[0])
    command, rest = find_command(words)
    if rest:
        raise ConfigError(
            f"trireme {command.name} has no help about {rest[0]!r}", hint=f"trireme help {command.name} all"
        )
    return help_of(command, everything=everything)


def help_of_group(word: str) -> str:
    """Help of a group: the first word of several commands."""
    commands = group_of(word)
    width = max(len(c.name) for c in commands) + 2
    lines = [f"usage: trireme {word} COMMAND [flags]", "", "commands:"]
    for command in commands:
        first, *more = textwrap.wrap(command.summary, _WIDTH - width - 2)
        lines += [f"  {command.name:<{width}}{first}", *(" " * (width + 2) + line for line in more)]
    lines += ["", "examples:", *(f"  {command.examples[0]}" for command in commands)]
    return "\n".join([*lines, "", f"trireme {word} COMMAND --help shows the flags of one."])


def overview() -> str:
    """Help of `trireme` itself."""
    width = max(len(c.name) for c in COMMANDS) + 2
    lines = [
        "usage: trireme COMMAND [MODEL] [flags]",
        "",
        "examples:",
        "  trireme chat smollm2                        chat with a model here",
        "  trireme serve FILE.gguf --port 8001         serve it over HTTP with the OpenAI API",
        "  trireme bench serve smollm2                 measure what clients will see",
        "",
        "commands:",
        *(f"  {c.name:<{width}}{c.summary}" for c in COMMANDS),
        "",
        "trireme COMMAND --help, or trireme help COMMAND, shows the flags of a command. MODEL is a packaged",
        "name (smollm2), a GGUF file, or a directory of safetensors.",
    ]
    return "\n".join(lines)


def help_of(command: Command, *, everything: bool = False) -> str:
    """Help of one command: examples first, then the common flags or all of them."""
    places = " ".join(f"[{p.name.upper()}]" for p in command.positionals)
    lines = [f"usage: trireme {command.name} {places} [flags]".replace("  ", " "), "", command.summary, "", "examples:"]
    lines += [f"  {example}" for example in command.examples]
    lines += ["", "flags:"]
    shown = flags_of(command)
    if not everything:
        shown = [s for s in shown if not s.group or s.name in command.common]
        shown.sort(key=lambda s: (*command.common, s.name).index(s.name))
    group = ""
    for setting in shown:
        if everything and setting.group != group:
            group = setting.group
            lines += ["", f"{group}:"]
        lines += _flag_lines(setting)
    if command.common:
        last = (
            "Every flag but those of the command itself is also TRIREME_NAME in the environment and a key of --config."
        )
        more = "" if everything else f"trireme {command.name} --help all shows every flag. "
        lines += ["", *textwrap.wrap(more + SWITCHES + last, _WIDTH)]
    return "\n".join(lines)


def off_flag(setting: Setting) -> str:
    """The flag that turns a switch off."""
    return "--no-" + setting.flag[2:]


def spellings(setting: Setting) -> list[str]:
    """The flag, and for a switch also the one that turns it off."""
    return [setting.flag, off_flag(setting)] if setting.kind == "switch" else [setting.flag]


def flag_text(setting: Setting) -> str:
    """The flag and its placeholder: `--port N`; both flags of a switch that a file or the environment may have turned on."""
    if setting.kind == "switch" and setting.group:
        return ", ".join(spellings(setting))
    return f"{setting.flag} {setting.metavar}".rstrip()


def _flag_lines(setting: Setting) -> list[str]:
    left = f"  {flag_text(setting)}"
    default = "" if setting.default in (None, (), False) else f" [{_default_text(setting.default)}]"
    text = textwrap.wrap(setting.help + default, _WIDTH - 28)
    first = [f"{left:<28}{text.pop(0)}"] if len(left) < 28 else [left]
    return first + [" " * 28 + line for line in text]


def _default_text(value: Any) -> str:
    if value is True:
        return "on"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
