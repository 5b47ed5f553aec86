"""A small HTTP server in a process of its own that answers, refuses, stalls or breaks off.

`python -m tests.procs.peer_server MODE` prints its port.
`GET /seen` tells how many requests and connections it had; `POST /mode/NAME` changes what it does.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STATE = {"mode": sys.argv[1] if len(sys.argv) > 1 else "ok", "requests": 0, "connections": 0}
BROKEN_OFF = {
    "fail": {"message": "out of words"},
    "fail in words": "out of words",
}  # error events, as servers write them
STATUS = {"refuse": 503, "quota": 429, "error": 500, "bad": 400}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        STATE["connections"] += 1

    def do_GET(self) -> None:
        self.answer(200, STATE)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path.startswith("/mode/"):
            STATE["mode"] = self.path[6:]
            return self.answer(200, STATE)
        STATE["requests"] += 1
        mode = STATE["mode"]
        if mode == "stall":
            time.sleep(60)
        if mode == "slow":
            time.sleep(1)
        if mode == "endless":
            return self.endless()
        if mode in STATUS:
            return self.answer(STATUS[mode], {"error": {"message": mode}}, **{"retry-after": "1"})
        if json.loads(body).get("stream"):
            return self.stream(mode)
        return self.answer(200, {"port": self.server.server_port})

    def endless(self) -> None:
        """More than anybody wants, as long as somebody reads."""
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(ConnectionError):
            while True:
                self.wfile.write(b"x" * 100_000)

    def stream(self, mode: str) -> None:
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        if mode == "break first":
            self.close_connection = True
            return
        for i in range(5):
            if mode in BROKEN_OFF and i == 3:
                self.wfile.write(b"data: %s\n\n" % json.dumps({"error": BROKEN_OFF[mode]}).encode())
            if (mode == "break" or mode in BROKEN_OFF) and i == 3:
                self.close_connection = True
                return
            self.wfile.write(b'data: {"i": %d, "port": %d}\n\n' % (i, self.server.server_port))
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def answer(self, status: int, value: object, **headers: str) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
