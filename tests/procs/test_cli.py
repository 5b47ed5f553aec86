"""The command line from outside: exit codes, errors last on stderr, data on stdout, settings that reproduce a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trireme import __version__
from trireme.errors import ConfigError, ModelError
from trireme.launch.cli import main
from trireme.launch.options import find_command
from trireme.launch.parse import parse

ROOT = Path(__file__).resolve().parents[2]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("TRIREME_")}


def cli(*words: str, env: dict[str, str] | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trireme.launch.cli", *words],
        cwd=ROOT,
        env=CLEAN | (env or {}),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for name in list(os.environ):
        if name.startswith("TRIREME_"):
            monkeypatch.delenv(name)


def test_version_as_text_and_json(capsys):
    assert main(["--version"]) == 0
    assert main(["version", "--json"]) == 0
    text, document = capsys.readouterr().out.splitlines()
    assert text == f"trireme {__version__}"
    assert json.loads(document) == {"version": __version__}


@pytest.mark.parametrize(
    ("line", "usage"),
    [
        ("", "trireme COMMAND"),
        ("--help", "trireme COMMAND"),
        ("-h", "trireme COMMAND"),
        ("help", "trireme COMMAND"),
        ("serve --help", "trireme serve [MODEL]"),
        ("help serve", "trireme serve [MODEL]"),
        ("--help serve all", "trireme serve [MODEL]"),
        ("bench --help", "trireme bench COMMAND"),
        ("bench -h all", "trireme bench COMMAND"),
        ("help bench", "trireme bench COMMAND"),
        ("models --help", "trireme models COMMAND"),
        ("bench serve -h all", "trireme bench serve [MODEL]"),
        ("bench help serve", "trireme bench serve [MODEL]"),
        ("help bench serve", "trireme bench serve [MODEL]"),
        ("complete x --json --help", "trireme complete [MODEL] [PROMPT]"),
    ],
)
def test_help_goes_to_stdout_and_succeeds(line, usage, capsys):
    assert main(line.split()) == 0
    told = capsys.readouterr()
    assert told.out.startswith(f"usage: {usage} ")
    assert told.err == ""


SWITCHES = [
    (["--prefix-cache"], True),
    (["--no-prefix-cache"], False),
    (["--prefix-cache=true"], True),
    (["--prefix-cache=False"], False),
    (["--prefix-cache=0"], False),
    (["--no-prefix-cache", "--prefix-cache=on"], True),
    (["--prefix-cache=yes", "--no-prefix-cache"], False),
]


@pytest.mark.parametrize(("words", "is_on"), SWITCHES, ids=str)
def test_each_spelling_of_a_switch(words, is_on):
    command, rest = find_command(["serve", *words, "smollm2"])
    config = parse(command, rest, environ={"TRIREME_PREFIX_CACHE": str(not is_on)}).loaded.config
    assert config.cache.prefix_cache is is_on
    assert config.model.model == "smollm2"


@pytest.mark.parametrize(
    ("words", "model", "prompt"),
    [
        (["m", "text"], "m", "text"),
        (["--json", "m", "--seed", "1", "text"], "m", "text"),
        (["m", "--json", "true"], "m", "true"),
        (["m", "--temperature", "1", "--", "--seed"], "m", "--seed"),
        (["--", "-m", "- a text"], "-m", "- a text"),
        (["m", "- a text"], "m", "- a text"),
        (["m", "-12.5"], "m", "-12.5"),
        (["m", "-"], "m", "-"),
        (["m"], "m", "-"),
    ],
    ids=str,
)
def test_words_without_a_flag_may_stand_anywhere(words, model, prompt):
    command, rest = find_command(["complete", *words])
    found = parse(command, rest, environ={})
    assert (found.loaded.config.model.model, found.options["prompt"]) == (model, prompt)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["srve"], "did you mean serve?"),
        (["bench", "latncy"], "did you mean latency?"),
        (["bench"], "latency|throughput"),
        (["help", "srve"], "did you mean serve?"),
        (["help", "bench", "latncy"], "did you mean latency?"),
        (["help", "serve", "tp"], "no help about 'tp'"),
        (["bench", "latncy", "--help"], "did you mean latency?"),
        (["serve", "--prefix-cache", "false"], "--no-prefix-cache, or --prefix-cache=false"),
        (["serve", "--no-prefix-cache", "False", "smollm2"], "--prefix-cache, or --prefix-cache=true"),
        (["complete", "--check", "no", "smollm2", "text"], "--no-check, or --check=false"),
        (["serve", "--prefix-cache=maybe"], "--prefix-cache is 'maybe'; it must be true or false"),
        (["serve", "--prefix-cache="], "it must be true or false"),
        (["serve", "--no-prefix-cache=false"], "--no-prefix-cache takes no value"),
        (["serve", "--no-prefix-cach"], "did you mean --no-prefix-cache?"),
        (["complete", "smollm2", "-x"], "-- TEXT"),
        (["serve", "smollm2", "--api-key", "a", "b"], "what to do with 1 more word"),
        (["serve", "--max-length", "5"], "did you mean --max-len?"),
        (["serve", "--tp"], "expected one argument"),
        (["serve", "--tp", "0"], "--tp is '0'; it must be a whole number 1..64"),
        (["serve", "smollm2", "extra"], "'extra'"),
        (["serve", "--no-port"], "--no-port"),
        (["complete", "--temperature", "hot"], "--temperature is 'hot'"),
        (["doctor", "--tp", "2"], "no flag --tp"),
        (["bench", "serve", "--url", "ftp://x"], "--url"),
        (["bench", "serve", "--url", "http://127.0.0.1:9"], "no server answers"),
        (["bench", "serve", "--url", "http://x", "--concurrency", "two"], "--concurrency is 'two'"),
    ],
)
def test_a_mistake_is_one_error_on_stderr(words, message, capsys):
    assert main(words) in (ConfigError.exit_code, 1)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ")
    assert message in told.err
    assert "Traceback" not in told.err


def test_a_model_that_is_not_there(capsys):
    assert main(["serve", "/nowhere/model"]) == ModelError.exit_code
    told = capsys.readouterr().err
    assert told.startswith("error: no model '/nowhere/model'")
    assert "  try   trireme serve smollm2" in told


def test_print_config_writes_a_file_that_reproduces_itself(tmp_path, capsys):
    assert main(["serve", "smollm2", "--dp", "2", "--no-prefix-cache", "--api-key", "secret", "--print-config"]) == 0
    first = capsys.readouterr().out
    assert "secret" not in first
    file = tmp_path / "run.yaml"
    file.write_text(first)
    assert main(["serve", "--config", str(file), "--print-config"]) == 0
    assert capsys.readouterr().out == first
    assert "dp: 2" in first
    assert "prefix_cache: false" in first


def test_flag_over_environment_over_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("max_len: 64\nblock_size: 4\nport: 1\n")
    env = {"TRIREME_CONFIG": str(file), "TRIREME_MAX_LEN": "128", "TRIREME_BLOCK_SIZE": "8"}
    shown = cli("serve", "smollm2", "--max-len", "256", "--print-config", env=env).stdout
    assert "max_len: 256" in shown
    assert "block_size: 8" in shown
    assert "port: 1" in shown


def test_a_wrong_environment_name_is_an_error_of_every_command_with_settings():
    done = cli("serve", "--print-config", env={"TRIREME_MAXLEN": "1"})
    assert done.returncode == ConfigError.exit_code
    assert "did you mean TRIREME_MAX_LEN?" in done.stderr
    assert cli("version", env={"TRIREME_MAXLEN": "1"}).returncode == 0


def test_doctor_finds_this_installation_fit(capsys):
    assert main(["doctor", "--json"]) == 0
    findings = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["native extension"]["state"] == "ok"
    assert findings["model smollm2"]["state"] == "ok"
    assert "cores" in findings["processor"]["found"]


def test_a_reader_that_leaves_is_no_error():
    command = f"{sys.executable} -m trireme.launch.cli serve --help all | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=CLEAN, capture_output=True, text=True, timeout=30)
    assert done.stdout.startswith("usage:")
    assert done.stderr == ""


def test_the_terminal_is_not_needed_and_not_painted():
    done = cli("serve", "/nowhere", env={"TERM": "xterm-256color"})
    assert "\x1b" not in done.stderr
