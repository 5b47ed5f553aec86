"""What nobody should type, and streams as nobody should hand them over: one clear error, never a traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.deployment import ROOT, wait_for
from tests.models.tiny import make_stub
from trireme.launch.cli import main

LONG = "a" * 5000
RESULT = '{"command":"bench serve","model":"m","rows":[{"name":"a","clients":1,"output_tok_s":5.0}]}'
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("TRIREME_")} | {"NO_COLOR": "1"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present directory, with files that are not what they seem."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("TRIREME_")]:
        monkeypatch.delenv(name)
    (tmp_path / "dir").mkdir()
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "cut.gguf").write_bytes(b"GG")
    (tmp_path / "noise.json").write_bytes(b'{"command":"\xff\xfe"}')
    (tmp_path / "deep.json").write_text('{"command":"a","model":"b","rows":[],"machine":{"a":' + "[" * 50_000)
    (tmp_path / "good.json").write_text(RESULT)
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "gone/model.safetensors").symlink_to("nowhere")
    return tmp_path


@pytest.mark.parametrize(
    "command", ["plan", "models inspect", "serve --print-config", "bench latency", "bench startup"]
)
@pytest.mark.parametrize(
    "model",
    ["", " ", "/", "dir", "file.txt", "cut.gguf", "gone", "~nobody-of-that-name/x", LONG, "/dev/zero", "\udcff", "\0"],
)
def test_a_model_that_is_none(command: str, model: str, capfd: pytest.CaptureFixture[str]) -> None:
    status = main([*command.split(), model])
    assert_one_error(status, (2, 3), capfd)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("report dir", "Is a directory"),
        ("report /dev/zero", "more than"),
        ("report noise.json", "not the JSON result"),
        ("report deep.json", "not the JSON result"),
        ("report good.json --output dir", "cannot be written: Is a directory"),
        ("report good.json --output nowhere/x", "cannot be written: No such file"),
        ("report good.json --output=", "cannot be written: No such file"),
        ("report good.json --output /dev/full", "cannot be written: No space left"),
        ("serve --config=", "--config names no file"),
        ("serve --config dir", "Is a directory"),
        ("serve --config noise.json", "not UTF-8"),
        ("serve --api-key-file=", "--api-key-file names no file"),
        ("serve --admin-key-file=", "--admin-key-file names no file"),
        ("serve --quotas=", "--quotas names no file"),
        ("serve --kv-memory " + "9" * 5000, "below 8 EiB"),
        ("serve --max-len " + "9" * 5000, "--max-len is '999"),
        ("serve --host ..", "no host name"),
        ("serve --host " + LONG, "no host name"),
        ("serve --host 300.1.1.1 --port 0", "--host 127.0.0.1"),
        ("chat --url=", "--url is ''"),
        ("complete x y --url=", "--url is ''"),
        ("bench serve --url=", "--url is ''"),
        ("bench serve --url http://[::1", "--url is no address"),
        ("bench serve --url http://..:1", "--url is no address"),
        ("bench serve --slo ttft=1s,itl=50", "itl is '50'; it must be a time with its unit"),
        ("bench sweep --slo=", "it takes ttft, itl, e2e"),
        ("bench sweep --slo ttft=1s --attainment 0", "--attainment is '0'; it must be a number 0.01..1"),
        ("bench sweep --rate 1,2 --slo ttft=1s --attainment 0.5", "--attainment is of a search"),
        ("bench sweep --rate 20000 --slo ttft=1s", "--rate is 20000; a search starts at 10000 at most"),
        ("control --url http://" + LONG, "--url is no address"),
        ("chat --url http://me:sesame@127.0.0.1:1", "--url has a user name or a password"),
        ("chat --url http://127.0.0.1:99999", "--url is no address"),
        ("control --dir dir", "no server keeps its sockets"),
        ("bench latency --input-len 9999999999", "1..10000000"),
        ("bench throughput --num-requests 9999999999", "1..1000000"),
        ("bench serve --repeats 9999999999", "1..10000"),
    ],
)
def test_words_that_mean_nothing(line: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    text = assert_one_error(main(line.split(" ")), (2,), capfd)
    assert words in text
    assert "sesame" not in text


def assert_one_error(status: int, expected: tuple[int, ...], capfd: pytest.CaptureFixture[str]) -> str:
    told = capfd.readouterr()
    assert status in expected
    assert told.out == ""
    assert told.err.count("error: ") == 1
    assert "Traceback" not in told.err
    assert len(told.err) < 8000
    return told.err


# ---------------------------------------------------------------- whoever answers


@contextmanager
def answering(answer: bytes, to_post: bytes | None = None) -> Iterator[str]:
    """The address of something that sends `answer` to everybody, or `to_post` to a POST."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    is_post = connection.recv(65536).startswith(b"POST")
                    connection.sendall(to_post if is_post and to_post is not None else answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


OK = b"HTTP/1.1 200 OK\r\n"
ODD = {
    "nothing": b"",
    "another protocol": b"SSH-2.0-x\r\n\r\n",
    "no status": b"HTTP/1.1\r\n\r\n",
    "a status in words": b"HTTP/1.1 fine\r\n\r\n",
    "a length in words": OK + b"Content-Length: x\r\n\r\n{}",
    "a length below nothing": OK + b"Content-Length: -5\r\n\r\n{}",
    "less than its length": OK + b"Content-Length: 99\r\n\r\n{}",
    "a piece in words": OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a piece below nothing": OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabc",
    "an object of something else": OK + b"\r\n{}",
    "a list": OK + b"\r\n[1]",
    "no models": OK + b'\r\n{"data":[]}',
    "models without names": OK + b'\r\n{"data":[{"id":5}]}',
    "noise": OK + b"\r\n\xff\xfe",
    "depth": OK + b"\r\n" + b"[" * 50_000,
    "a refusal": b"HTTP/1.1 404 Not Found\r\n\r\n<html>",
}


@pytest.mark.parametrize("answer", ODD.values(), ids=ODD)
def test_a_server_that_is_none(answer: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    for line in ("complete m text", "control", "control sleep", "bench serve --num-requests 1 --concurrency 1"):
        with answering(answer) as url:
            assert_one_error(main([*line.split(), "--url", url]), (1,), capfd)


@pytest.mark.parametrize("event", [b"5", b"{", b'{"choices":[5]}', b'{"choices":{"a":1}}', b""])
@pytest.mark.parametrize("line", ["complete m text", "bench serve --num-requests 1 --concurrency 1"])
def test_a_stream_that_is_none(event: bytes, line: str, capfd: pytest.CaptureFixture[str]) -> None:
    with answering(OK + b'\r\n{"data":[{"id":"m"}]}', OK + b"\r\ndata: " + event + b"\n\n") as url:
        status = main([*line.split(), "--url", url])
    told = capfd.readouterr()
    assert status == 1
    assert "Traceback" not in told.err
    assert "server" in told.err


# ---------------------------------------------------------------- standard streams


def shell(line: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = f'set -o pipefail; trireme() {{ {sys.executable} -m trireme.launch.cli "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=CLEAN, input=stdin, capture_output=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("trireme version >&-", 0),
        ("trireme version <&- >&- 2>&-", 0),
        ("trireme plan smollm2 <&- >&- 2>&-", 0),
        ("trireme srve <&- >&- 2>&-", 2),
        ("trireme serve /nowhere <&- >&- 2>&-", 3),
        ("trireme srve 2>/dev/full", 2),
        ("trireme version >/dev/full", 1),
        ("trireme plan smollm2 >/dev/full", 1),
        ("trireme serve --help all >/dev/full", 1),
        ("trireme plan smollm2 | true", 141),
        ("trireme serve --help all | true", 141),
    ],
)
def test_streams_that_are_closed_full_or_left(line: str, status: int) -> None:
    done = shell(line)
    assert done.returncode == status, done
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr
    if status == 1:
        assert done.stderr == b"error: cannot write the output: No space left on device\n"


def test_input_that_is_no_text() -> None:
    for line in (
        "trireme complete nowhere -",
        "PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 LC_ALL=C trireme complete nowhere -",
    ):
        done = shell(line, b"\xff\xfe")
        assert done.returncode == 1
        assert done.stderr.startswith(b"error: standard input is not UTF-8")
        assert b"Traceback" not in done.stderr


def test_a_server_serves_without_streams_and_with_a_full_disk_for_its_log(tmp_path: Path) -> None:
    """No socket of its may take the number of a closed stream, and what it says must not end it."""
    stub = make_stub(tmp_path / "stub")
    for redirect in ("<&- >&- 2>&-", ">/dev/full 2>&1"):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        serve = f"serve {stub} --worker fake --drain-notice 0 --port {port}"
        command = f"exec {sys.executable} -m trireme.launch.cli {serve} {redirect}"
        process = subprocess.Popen(["bash", "-c", command], cwd=ROOT, env=CLEAN)
        try:
            wait_for(lambda port=port: is_ready(port), 60, f"ready with {redirect}")
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) in (
                0,
                128 + signal.SIGTERM,
            )  # the front end is ready a moment before the supervisor knows
        finally:
            process.kill()
            process.wait()


def is_ready(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            connection.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False
