"""The listening sockets of the frontends. Bound by the supervisor, so that an address in use is known before anything starts and
stays bound while frontends are restarted."""

from __future__ import annotations

import socket

from trireme.config import EngineConfig
from trireme.errors import ConfigError
from trireme.netloc import without_brackets


class Listeners:
    """One socket for all frontends, or one for each where an outside balancer chooses among them."""

    def __init__(self) -> None:
        self.address: tuple[str, int] | None = None  # the first; kept after `close`
        self._sockets: list[socket.socket] = []

    def open(self, config: EngineConfig) -> None:
        """Binds all of them. Raises ConfigError when an address is unavailable."""
        serving, is_shared = config.serving, config.coordinator.load_balancing == "internal"
        for i in range(1 if is_shared else serving.api_servers):
            self._sockets.append(listen(serving.host, serving.port + i if serving.port else 0))
        self.address = self.addresses[0]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where frontends listen."""
        return [listener.getsockname()[:2] for listener in self._sockets]

    def fileno(self, index: int) -> int:
        """The socket of a frontend; -1: there is none."""
        return self._sockets[index % len(self._sockets)].fileno() if self._sockets else -1

    def close(self) -> None:
        """May be called twice."""
        for listener in self._sockets:
            listener.close()
        self._sockets.clear()


_EVERYWHERE = ("::", "*", "")


def listen(host: str, port: int) -> socket.socket:
    """The listening socket of the HTTP port; for ::, * or no host on every address, IPv4 included. Raises ConfigError when it is
    taken or not allowed."""
    name = without_brackets(host)
    try:
        if name in _EVERYWHERE and socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, backlog=2048, dualstack_ipv6=True)
        wanted = None if name in ("*", "") else name
        found = socket.getaddrinfo(wanted, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address, family=family, backlog=2048)  # with its scope id
    except (OSError, UnicodeError) as error:
        is_of_host = isinstance(error, socket.gaierror | UnicodeError)
        reason = "this is no host name" if isinstance(error, UnicodeError) else error.strerror or error
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}",
            hint="--host 127.0.0.1, or 0.0.0.0 for all addresses"
            if is_of_host
            else f"--port {port + 1 if port < 65535 else 0}, or --port 0 for a free one",
        ) from error
