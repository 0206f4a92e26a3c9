"""URLs and headers in a configuration: checked when it is read, with no network and no HTTP library."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

EXPECTED = "expected http://HOST:PORT or https://HOST"
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")
_FOUR_NUMBERS = re.compile(r"[0-9]+(\.[0-9]+)*\.?")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"([!-~]([ -~\t]*[!-~])?)?")


def base_url(url: str) -> str:
    """The URL without a trailing `/` or `/v1`. Raises ValueError when no request could be sent."""
    if reason := _unusable(url):
        raise ValueError(f"found {url!r}, {EXPECTED}: {reason}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


BaseUrl = Annotated[str, AfterValidator(base_url)]
"""Type of a field that holds the URL of a server."""


def _unusable(url: str) -> str:
    """Why no request can go there; "" when one can."""
    if not url.startswith(("http://", "https://")):
        return "it begins with neither http:// nor https://"
    if not url.isascii() or not url.isprintable() or " " in url:
        return "only printable ASCII without spaces can stand in it"
    try:
        parts = urlsplit(url)
    except ValueError as error:  # an open bracket, an address in brackets that is none
        return str(error)
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        return "the paths of requests are put behind it, so it has neither ? nor #"
    if reason := _unusable_host(parts.hostname or "", "[" in parts.netloc):
        return reason
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0 or parts.netloc.endswith(":"):
        return "the port must be a number from 1 to 65535"
    return ""


def _unusable_host(host: str, is_bracketed: bool) -> str:
    if not host:
        return "it names no host"
    try:
        if is_bracketed:
            ipaddress.IPv6Address(host)
        elif _FOUR_NUMBERS.fullmatch(host):
            ipaddress.IPv4Address(host)
    except ValueError:
        return f"{host!r} is no address"
    if not is_bracketed and not _HOST.fullmatch(host):
        return f"{host!r} is no name of a host"
    return ""


def headers(given: dict[str, str]) -> dict[str, str]:
    """The headers unchanged. Raises ValueError for one that HTTP cannot carry."""
    for name, value in given.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(
                f"found the name {name!r}, expected ASCII letters, digits and - for a header's name"
            )
        if not can_be_header(value):
            raise ValueError(
                f"{name}: found {value!r}, expected printable ASCII in one line, without spaces at "
                "its ends"
            )
    return given


def can_be_header(value: str) -> bool:
    """Whether HTTP can carry the text as a header's value."""
    return _HEADER_VALUE.fullmatch(value) is not None


Headers = Annotated[dict[str, str], AfterValidator(headers)]
"""Type of a field that holds headers of requests."""
