"""Keys of a running server: they open its door and stand in nothing that others can read."""

from __future__ import annotations

import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from tests.e2e.deployment import Deployment
from tests.models.tiny import make_stub
from tests.procs.supervised import MODULES, config_for
from trireme import Client, SamplingParams
from trireme.launch.processes.hide import key_places
from trireme.launch.processes.supervisor import Supervisor

KEYS = ("sesame-of-the-flag", "sesame-of-the-same-word", "sesame,of the file", "sesame-of-the-admin")


class Served(NamedTuple):
    """A server and the directory of its sockets."""

    deployment: Deployment
    run_dir: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_text(f"\n{KEYS[2]}\n")
    (folder / "admin").write_text(KEYS[3])
    short = tempfile.mkdtemp(prefix="t-")  # unix socket paths are short
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", short)
        patch.setattr(tempfile, "tempdir", short)
        flags = ["--worker", "fake", "--dp", "2", "--log-level", "debug", "--api-key", KEYS[0], f"--api-key={KEYS[1]}"]
        flags += ["--api-key-file", str(folder / "keys"), "--admin-key-file", str(folder / "admin")]
        with Deployment(make_stub(folder), *flags) as deployment:
            (run_dir,) = Path(short).glob("trireme-*")
            yield Served(deployment, run_dir)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens_the_door(served: Served, key: str) -> None:
    request = urllib.request.Request(served.deployment.url + "/v1/models", headers={"x-api-key": key})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(served.deployment.url + "/v1/models", timeout=10)
    with refused.value as answer:
        assert answer.code == 401


def test_no_process_shows_a_key_in_its_command_line(served: Served) -> None:
    pids = [served.deployment.process.pid, *served.deployment.family()]
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
    assert any(b"--api-key\0*" in line for line in lines)
    assert not any(b"sesame" in line for line in lines)


def test_no_file_and_no_line_of_the_log_has_a_key(served: Served) -> None:
    files = [path for path in served.run_dir.rglob("*") if path.is_file()]
    assert "client.pass" in {file.name for file in files}
    assert [file for file in files if b"sesame" in file.read_bytes()] == []
    assert "sesame" not in served.deployment.output()


def test_only_front_ends_are_told_the_keys(tmp_path: Path) -> None:
    config = config_for(tmp_path, dp=2, fronts=2)
    serving = msgspec.structs.replace(config.serving, api_key=KEYS[:2], admin_key=KEYS[3:])
    supervisor = Supervisor(msgspec.structs.replace(config, serving=serving), lambda event: None, modules=MODULES)
    try:
        supervisor.start()
        told = {part.name: part.child.boot.config for part in supervisor.parts if part.child is not None}
    finally:
        supervisor.close()
    assert {name for name, config in told.items() if b"sesame" in config} == {"front-0", "front-1"}
    assert len(told) == 5


def test_a_client_of_the_same_user_joins_without_a_key(served: Served) -> None:
    with Client(served.run_dir) as client:
        assert client.config.serving.api_key == ()
        assert client.generate("hello", SamplingParams(max_tokens=3)).outputs[0].token_ids


@pytest.mark.parametrize(
    ("words", "hidden"),
    [
        (("serve", "--api-key", "k1", "--admin-key=k2", "-x"), ["k1", "k2"]),
        (("--api-key", "--api-key", "--api-key", "a=b"), ["--api-key", "a=b"]),
        (("--api-key", ""), []),
        (("--api-key",), []),
        (("--api-key-file", "f", "--api-keys=x", "x--api-key=x"), []),
    ],
)
def test_where_the_keys_of_a_command_line_are(words: tuple[str, ...], hidden: list[str]) -> None:
    line = "".join(word + "\0" for word in words).encode()
    assert [line[at : at + size].decode() for at, size in key_places(line)] == hidden
