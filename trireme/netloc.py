"""Hosts and ports as written in URLs and Host headers, where IPv6 addresses are in brackets. Pure."""

from __future__ import annotations

import ipaddress


def netloc(host: str, port: int) -> str:
    """`host:port`, or `[host]:port` for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def without_brackets(host: str) -> str:
    """`::1` for `[::1]`; anything else unchanged."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def without_port(text: str) -> str:
    """The host of a `host[:port]`, in its brackets if it has any."""
    host, colon, port = text.rpartition(":")
    return host if colon and (port.isdigit() or not port) and (":" not in host or host.endswith("]")) else text


def is_loopback(host: str) -> bool:
    """Whether `host`, with or without brackets, is reachable only from this machine."""
    plain = without_brackets(host).partition("%")[0]
    try:
        address = ipaddress.ip_address(plain)
    except ValueError:
        name = plain.lower().removesuffix(".")
        return name == "localhost" or name.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_address(host: str) -> bool:
    """Whether `host` is an IPv4 address or a bracketed IPv6 one, not a DNS name that could be pointed elsewhere."""
    try:
        if host.startswith("["):
            return host.endswith("]") and bool(ipaddress.IPv6Address(host[1:-1]))
        return bool(ipaddress.IPv4Address(host))
    except ValueError:
        return False
