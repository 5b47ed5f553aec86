"""The set-up script: steps run once, again when an input changes or a result is gone, and say what to type when stuck."""

from __future__ import annotations

import threading

import pytest

from scripts import bootstrap
from scripts.bootstrap import Step, plan_steps, run_step, run_steps


@pytest.fixture(autouse=True)
def stamps(tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "STAMPS", tmp_path / "stamps")
    monkeypatch.setattr(bootstrap, "LOG", tmp_path / "setup.log")


def test_a_step_is_done_once_and_again_when_its_inputs_change():
    done = []
    step = Step("model package", "v1", lambda: done.append(1))
    assert run_step(step, "[1/1]")
    assert not run_step(step, "[1/1]")
    assert run_step(step._replace(inputs="v2"), "[1/1]")
    assert len(done) == 2


def test_a_step_whose_result_is_gone_is_done_again():
    done = []
    step = Step("native extension", "v1", lambda: done.append(1), lambda: False)
    assert run_step(step, "[1/1]")
    assert run_step(step, "[1/1]")
    assert len(done) == 2


def test_a_failed_step_leaves_no_stamp():
    def fail():
        raise SystemExit(2)

    step = Step("torch", "v1", fail)
    with pytest.raises(SystemExit):
        run_step(step, "[1/1]")
    done = []
    assert run_step(step._replace(action=lambda: done.append(1)), "[1/1]")
    assert done


def test_steps_come_from_the_projects_own_files():
    names = [step.name for step in plan_steps(want_dev=True)]
    assert names.index("libraries") < names.index("native extension") < names.index("trireme command")
    assert "test tools" in names
    assert "test tools" not in [step.name for step in plan_steps(want_dev=False)]


def test_the_compiler_works_beside_the_downloads():
    downloads, done = threading.Event(), []
    steps = [
        Step("libraries", "v1", lambda: done.append("libraries")),
        Step("native extension", "v1", lambda: done.append(downloads.wait(10)), compiles=True),
        Step("torch", "v1", downloads.set),
        Step("trireme command", "v1", lambda: done.append("command")),
    ]
    assert run_steps(steps)
    assert done == ["libraries", True, "command"]
    assert not run_steps(steps)


def test_a_failed_compiler_ends_the_setup():
    def fail():
        raise SystemExit(2)

    steps = [Step("native extension", "v1", fail, compiles=True), Step("trireme command", "v1", lambda: None)]
    with pytest.raises(SystemExit):
        run_steps(steps)


def test_output_goes_to_the_log_and_a_failure_shows_its_end(capsys):
    assert bootstrap.run(["bash", "-c", "echo one; echo two >&2; exit 3"]) == 3
    with pytest.raises(SystemExit):
        bootstrap.die_with_log("it broke")
    told = capsys.readouterr().err
    assert "  | one" in told
    assert "  | two" in told
    assert told.splitlines()[-1].startswith("error: it broke")


def test_a_missing_compiler_names_the_package(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit):
        bootstrap.build_native()
    assert "apt-get install -y g++" in capsys.readouterr().err


def test_pinned_versions_are_tried_first_then_ranges(monkeypatch):
    tried = []
    monkeypatch.setattr(bootstrap, "run", lambda command: tried.append(command) or len(tried) == 1)
    bootstrap.pip_install("msgspec>=0.21")
    assert "--constraint" in tried[0]
    assert "--constraint" not in tried[1]


def test_torch_falls_back_from_the_cpu_build_to_any_recent_one(monkeypatch):
    tried = []
    monkeypatch.setattr(bootstrap, "run", lambda command: tried.append(command[-1]) or 1)
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: None)
    monkeypatch.setattr(bootstrap, "die_with_log", lambda text: tried.append("gave up"))
    bootstrap.install_torch("torch>=2.11", "")
    assert [need.split("==")[-1].count("+cpu") for need in tried] == [1, 0, 0, 0]
    assert tried[-2:] == ["torch>=2.11", "gave up"]
