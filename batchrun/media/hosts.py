"""The hosts that images may come from: allowed by name, and by where the name leads."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from yarl import URL

from batchrun.media.images import ImageError

MAX_URL_CHARS = 4_096
SHOWN_CHARS = 80
"""So much of an address is repeated to whoever sent it."""
_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: Address) -> bool:
    """Whether an address belongs to the internet at large, also where it holds an IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if int(address) >> 32 in _IPV4_PREFIXES:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        if not all(is_public(held) for held in inner if held is not None):
            return False
        if address.ipv4_mapped is not None:
            return True
    is_reserved = address.is_multicast or any(address in each for each in _RESERVED)
    return address.is_global and not is_reserved


_IPV4_PREFIXES = frozenset(
    int(ipaddress.IPv6Address(prefix)) >> 32 for prefix in ("::", "64:ff9b::", "::ffff:0:0:0")
)
"""IPv6 addresses that begin so end with an IPv4 address: compatible, NAT64, translated."""
_RESERVED = [
    ipaddress.ip_network(each) for each in ("64:ff9b:1::/48", "fec0::/10", "5f00::/16", "3fff::/20")
]
"""Local NAT64, site-local, segment routing, documentation: public for some versions of Python."""


class ImageHosts:
    """The hosts that images may come from: `HOST` or `HOST:PORT` each; none by default.

    A name leads to public addresses only, or to an address and port that are on the list
    themselves.
    """

    def __init__(self, entries: Iterable[str] = ()) -> None:
        self._places = {_host_and_port(entry) for entry in entries}
        self._addresses = {(_address_in(host), port) for host, port in self._places}

    def check(self, url: str) -> URL:
        """The address, if it is allowed. Raises ImageError."""
        shown = url[:SHOWN_CHARS]
        if len(url) > MAX_URL_CHARS or not url.isprintable() or " " in url or "\\" in url:
            raise ImageError(f"the image's address {shown!r} is no URL")
        try:
            parsed = URL(url)
            host, port, scheme = parsed.raw_host, parsed.port, parsed.scheme
        except ValueError:
            raise ImageError(f"the image's address {shown!r} is no URL") from None
        if scheme not in _PORTS or not host:
            raise ImageError(f"an image comes from http:// or https:// (got {shown!r})")
        if parsed.user is not None or parsed.password is not None:
            raise ImageError(f"the image's address {shown!r} must not hold a user or a password")
        named = host.rstrip(".").lower()
        if not {(named, port), (named, None if port == _PORTS[scheme] else -1)} & self._places:
            raise ImageError(
                f"images may not come from {named[:SHOWN_CHARS]!r}, which is not among the "
                "`image_hosts` of batchrun.yaml"
            )
        return parsed.with_host(named)

    def allows(self, address: str, port: int) -> bool:
        """Whether a connection may go to this port of an IP address."""
        parsed = _address_in(address)
        if parsed is None:
            return False
        ports = {port, None} if port in _PORTS.values() else {port}
        return is_public(parsed) or any((parsed, each) in self._addresses for each in ports)


def checked_host(entry: str) -> str:
    """The entry of a list of hosts. Raises ValueError for what is neither HOST nor HOST:PORT."""
    _host_and_port(entry)
    return entry


def _host_and_port(entry: str) -> tuple[str, int | None]:
    """Raises ValueError for what is neither HOST nor HOST:PORT."""
    if "*" in entry:
        raise ValueError(f"{entry!r}: no pattern of hosts is possible: name each as HOST[:PORT]")
    no_host = f"{entry!r} is not HOST or HOST:PORT"
    bare = _address_in(entry)
    try:
        parsed = URL(
            f"http://[{entry}]" if bare is not None and bare.version == 6 else f"http://{entry}"
        )
    except ValueError:
        raise ValueError(no_host) from None
    host, port = (parsed.raw_host or "").rstrip(".").lower(), parsed.explicit_port
    others = (parsed.user, parsed.query_string, parsed.fragment, parsed.path.strip("/"))
    is_host = _NAME.fullmatch(host) or _address_in(host)
    if not is_host or any(others) or port == 0 or len(entry.split()) != 1:
        raise ValueError(no_host)
    return host, port


def _address_in(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
