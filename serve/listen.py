"""The listening socket: bound before anything slow, so that a busy port is known at once."""

from __future__ import annotations

import contextlib
import errno
import socket


class BindError(OSError):
    """The address cannot be listened on; the message names it."""


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet: clients are refused until the server is ready for them.

    `port` 0 takes any free one; a name that has both kinds of addresses gets its IPv4 one. Raises BindError.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise BindError(f"cannot resolve host {host!r}: {error}") from None
    family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # restart without waiting for old connections
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise explained(error, host, port) from None
    return bound


def explained(error: OSError, host: str, port: int) -> BindError:
    """The same failure in words that say what to do."""
    if error.errno == errno.EADDRINUSE:
        return BindError(f"port {port} on {host} is already in use; choose another with --port (0 takes any free one)")
    if error.errno == errno.EACCES:
        return BindError(f"port {port} on {host} may not be used without privileges; choose one above 1023 with --port")
    return BindError(f"cannot listen on {host}, port {port}: {error.strerror or error}")


def address_of(bound: socket.socket) -> str:
    """host:port, an IPv6 address in brackets."""
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_address_of(bound: socket.socket) -> str:
    """An address that a client on this machine can use: the loopback one where we listen on all."""
    host, port = bound.getsockname()[:2]
    return {"0.0.0.0": f"127.0.0.1:{port}", "::": f"[::1]:{port}"}.get(host, address_of(bound))


def raise_open_files_limit(wanted: int) -> None:
    """Lets the process hold `wanted` connections, as far as the system allows: the usual soft limit is 1024 files."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # no such limit on this system, or not ours to change
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < ceiling:
            resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))
