"""The command line as a contract: a frozen list of flags, help in a quarter of a second, docs that match the table."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from trireme.launch.options import COMMANDS, flags_of, group_of, help_of, help_of_group, overview
from trireme.settings import table

ROOT = Path(__file__).resolve().parents[2]

# A new flag is a promise: add it here, in its own commit, with a line in docs/decisions/0001-flags.md that says why.
ENGINE_FLAGS = """
--served-name --tokenizer --chat-template --dtype --quantize --load-format --max-len --kv-memory --gpu-memory --kv-dtype
--block-size --prefix-cache --share-prefixes --num-blocks --dp --tp --pp --ep --sequence-parallel --device --share-gpus
--graph-sizes --threads --pin-cores --executor --worker --max-num-seqs --max-num-tokens --chunk --itl-target
--ttft-target --max-waiting
--max-waiting-tokens --policy --aging --queue-timeout --max-wait --async-steps --check
--host --port --api-servers --api-key --api-key-file --admin-key --admin-key-file --cors-origins --quotas --requests-per-minute
--tokens-per-minute --target-wait --request-timeout
--body-limit --default-max-tokens --drain-notice --drain-timeout --migration-limit --engine-wait --stream-buffer
--balance --load-balancing --work-stealing --engine-weights --engine-labels --front-labels --transport
--log-level --log-format --start-timeout
--step-timeout
"""
COMMAND_FLAGS = {
    "serve": "--config --print-config",
    "chat": "--system --temperature --max-tokens --seed --url --config",
    "complete": "--temperature --max-tokens --seed --json --url --config",
    "control": "--level --mode --dir --url --json --config",
    "plan": "--json --config",
    "models inspect": "--json",
    "bench latency": "--input-len --output-len --repeats --json --config",
    "bench throughput": "--num-requests --input-len --output-len --repeats --json --config",
    "bench serve": "--concurrency --slo --num-requests --input-len --output-len --repeats --url --peer --json --config",
    "bench sweep": "--concurrency --rate --slo --attainment --num-requests --input-len --output-len --repeats --url --peer "
    "--json --config",
    "bench ipc": "--running --output-len --json",
    "bench balance": "--fronts --num-requests --json",
    "bench startup": "--repeats --json --config",
    "report": "--output",
    "doctor": "--json",
    "version": "--json",
}


def test_engine_flags_are_the_frozen_ones():
    assert [s.flag for s in table() if s.name != "model"] == ENGINE_FLAGS.split()


def test_command_flags_are_the_frozen_ones():
    assert {c.name: [s.flag for s in c.options] for c in COMMANDS} == {k: v.split() for k, v in COMMAND_FLAGS.items()}


def test_no_command_flag_hides_an_engine_flag():
    for command in COMMANDS:
        flags = [s.flag for s in flags_of(command)]
        assert len(flags) == len(set(flags)), command.name


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.name)
def test_help_leads_with_examples_and_hides_nothing_behind_all(command):
    short, full = help_of(command), help_of(command, everything=True)
    assert short.index("examples:") < short.index("flags:")
    for example in command.examples:
        assert f"  {example}" in short
    for setting in flags_of(command):
        assert setting.flag in full
    for name in command.common:
        assert "--" + name.replace("_", "-") in short
    assert max(map(len, full.splitlines())) <= 100


def test_serve_help_shows_three_examples_and_the_twelve_common_flags():
    serve = COMMANDS[0]
    assert len(serve.examples) == 3
    assert len(serve.common) + 1 == 12  # and --config


def test_overview_names_every_command():
    for command in COMMANDS:
        assert f"  {command.name} " in overview()


@pytest.mark.parametrize("group", ["bench", "models"])
def test_help_of_a_group_names_its_commands_and_an_example_of_each(group):
    text = help_of_group(group)
    assert max(map(len, text.splitlines())) <= 100
    for command in COMMANDS:
        assert (f"  {command.name} " in text) == command.name.startswith(group + " ")
    assert len(group_of(group)) == text.count(f"\n  trireme {group} ")


def test_both_flags_of_a_switch_are_in_help_and_docs():
    docs = (ROOT / "docs/cli.md").read_text()
    shown = {line.strip().split("  ")[0] for line in help_of(COMMANDS[0], everything=True).splitlines()}
    switches = [s for s in table() if s.kind == "switch"]
    assert len(switches) >= 7
    for setting in switches:
        off = "--no-" + setting.flag[2:]
        assert f"{setting.flag}, {off}" in shown
        assert f"| `{setting.flag}` `{off}` |" in docs
    assert "--name=false" in " ".join(help_of(COMMANDS[0]).split())
    assert "--name=false" in docs


HELPS = [["--help"], ["--version"], ["help", "serve"], ["bench", "--help"], ["serve", "--help", "all"]]


@pytest.mark.parametrize("words", [*HELPS, *([*c.name.split(), "--help"] for c in COMMANDS)], ids=" ".join)
def test_help_comes_in_a_quarter_of_a_second(words):
    """Processor time, best of several, so that a busy machine does not fail it."""
    command = [sys.executable, "-m", "trireme.launch.cli", *words]
    assert any(cpu_seconds(command) < 0.25 for _ in range(3))


def cpu_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_docs_are_those_the_tables_give():
    """`make docs` writes four pages in docs/; this fails when a table changed and they were not written."""
    from scripts.make_docs import DOCS

    for name, write in DOCS.items():
        assert (ROOT / "docs" / name).read_text() == write(), f"docs/{name} is old: make docs"
