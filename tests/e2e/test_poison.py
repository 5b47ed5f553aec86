"""A request that ends the worker of every engine that runs it: two engines die, no third, and all others get their whole answer."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import Deployment, wait_for
from tests.models.tiny import make_stub

pytestmark = pytest.mark.timeout(180)

POISON = ord("~")


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose worker dies of one token, and otherwise emits a hash of what it has read."""
    directory = make_stub(tmp_path_factory.mktemp("mortal"))
    config = json.loads((directory / "config.json").read_text())
    config["stub"] = {"kind": "hash", "delay_ms": 5.0}
    config["fake"] = {"die_token": POISON}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class Mate(threading.Thread):
    """A streamed completion of 600 tokens."""

    def __init__(self, deployment: Deployment, prompt: str) -> None:
        super().__init__(daemon=True)
        self.deployment, self.prompt, self.text, self.end = deployment, prompt, "", ""
        self.start()

    def run(self) -> None:
        body = {"model": "mortal", "prompt": self.prompt, "max_tokens": 600, "temperature": 0, "ignore_eos": True}
        try:
            for event in self.deployment.stream(body):
                if "error" in event:
                    self.end = event["error"]["code"]
                    return
                self.text += event["choices"][0]["text"]
            self.end = "done"
        except OSError as error:
            self.end = repr(error)


def ask_for_death(deployment: Deployment) -> tuple[int, dict[str, Any]]:
    body = {"model": "mortal", "prompt": "drink ~ this", "max_tokens": 4, "temperature": 0}
    try:
        deployment.post("/v1/completions", body)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]
    raise AssertionError("poison was answered")


def test_poison_ends_with_its_own_error_and_its_mates_go_on(mortal: Path) -> None:
    flags = ("--served-name", "mortal", "--worker", "fake", "--executor", "procs", "--dp", "2")
    with Deployment(mortal, *flags) as deployment:
        names = [f"mate {i}" for i in range(6)]
        alone = [Mate(deployment, name) for name in names]
        wait_for(lambda: all(mate.end for mate in alone), 60, "undisturbed answers")
        mates = [Mate(deployment, name) for name in names]
        wait_for(lambda: all(len(mate.text) > 20 for mate in mates), 20, "streams under way")
        status, error = ask_for_death(deployment)
        assert (status, error["code"]) == (422, "request_quarantined")
        assert "two engines died" in error["message"]
        wait_for(lambda: all(mate.end for mate in mates), 60, "ends of the mates")
        assert [mate.end for mate in mates] == ["done"] * 6
        assert [mate.text for mate in mates] == [mate.text for mate in alone]
        deployment.wait_ready(30)
        time.sleep(1.0)
        assert deployment.metric("trireme_engine_epoch") == 2  # two deaths in all
        assert deployment.metric("trireme_quarantined_total") == 1
