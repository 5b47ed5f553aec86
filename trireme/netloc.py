"""Hosts and ports as they are written in URLs and Host headers, where an IPv6 address stands in brackets. Pure."""

from __future__ import annotations

import ipaddress


def netloc(host: str, port: int) -> str:
    """`host:port`, or `[host]:port` for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def without_brackets(host: str) -> str:
    """`::1` for `[::1]`; anything else as it is."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def without_port(text: str) -> str:
    """The host of a `host[:port]`, in its brackets if it has any."""
    host, colon, port = text.rpartition(":")
    return host if colon and (port.isdigit() or not port) and (":" not in host or host.endswith("]")) else text


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach what listens on `host`, with or without brackets."""
    plain = without_brackets(host).partition("%")[0]
    try:
        address = ipaddress.ip_address(plain)
    except ValueError:
        name = plain.lower().removesuffix(".")
        return name == "localhost" or name.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_address(host: str) -> bool:
    """Whether `host` is an IPv4 address, or an IPv6 one in brackets: no name that somebody could point elsewhere."""
    try:
        if host.startswith("["):
            return host.endswith("]") and bool(ipaddress.IPv6Address(host[1:-1]))
        return bool(ipaddress.IPv4Address(host))
    except ValueError:
        return False
