"""URLs: which paths are some, what may be shown of them, and what of them names a file."""

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from ..errors import ConfigurationError

__all__ = ["RemoteFile", "identity", "is_remote", "protocol_of", "scrubbed", "shown"]

_PROTOCOL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_CHAINED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://[^?#]*)?::[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_SIGNATURES = re.compile(
    "x-(amz|goog|oss|ms)-.*|awsaccesskeyid|googleaccessid|key-pair-id|signature|sig|token|access_token", re.IGNORECASE
)
_BESIDE_ONE = re.compile("expires|policy|s[etprv]|spr|sip|sk[teosv]|skoid|sktid", re.IGNORECASE)
"""Parameters of a query that let somebody in for a while and do not say which file is meant; those of CloudFront and
Azure that may mean something else where nothing is signed."""


@dataclass(frozen=True)
class RemoteFile:
    """A file behind a URL, as it was when it was looked up.

    url: as the caller gave it. size: bytes. version: its ETag, checksum or time as the file system says, "" where it
    says nothing: a file that has another one when it is read has changed. content: the fingerprint that a manifest says
    of a file without a version: a copy of another content is another copy.
    """

    url: str
    size: int
    version: str
    content: str = ""

    def __repr__(self) -> str:  # in errors and logs
        return f"RemoteFile(url={shown(self.url)!r}, size={self.size}, version={self.version!r})"


def is_remote(path: str) -> bool:
    """Whether a path has a protocol that is not file://. Raises ConfigurationError for chained URLs."""
    if "::" in path and _CHAINED.match(path):
        protocol_of(path)
    return _PROTOCOL.match(path) is not None and protocol_of(path) not in ("file", "local")


def protocol_of(url: str) -> str:
    """The protocol, in small letters; "file" for a path without one. Raises ConfigurationError for chained URLs."""
    head = url.partition("://")[0]
    if "::" in head or _CHAINED.match(url):
        front = head.partition("::")[0]
        raise ConfigurationError(
            f"{shown(url.rpartition('::')[2])}: chained URLs are not read ({front!r} in front of another); the URL of "
            "the file itself would do: whole files are cached anyhow"
        )
    return head.lower() if _PROTOCOL.match(url) else "file"


def shown(url: str) -> str:
    """The URL without what may be a secret in it: user and password, query, fragment."""
    protocol, mark, rest = re.split(r"[?#]", url, maxsplit=1)[0].partition("://")
    if not mark:
        return protocol
    host, slash, path = rest.partition("/")
    if "@" in host:
        host = host.rpartition("@")[2]
    elif "@" in path and ":" in host and not host.rpartition(":")[2].isdigit():
        return f"{protocol}://{rest.rpartition('@')[2]}"  # a secret with a slash in it
    return f"{protocol}://{host}{slash}{path}"


def scrubbed(text: str, url: str = "") -> str:
    """A message of a driver's on one line, its URLs as they are shown, without the secrets of this one."""
    text = " ".join(text.replace(url, shown(url)).split() if url else text.split())
    text = _URL.sub(lambda found: shown(found[0]), text)
    for secret in _secrets(url):
        text = text.replace(secret, "…")
    return text if len(text) <= 300 else f"{text[:300]}…"


def _secrets(url: str) -> "list[str]":
    """The parts of a URL that are not shown, the longest first; of three letters none is a secret."""
    front = re.split("[?#]", url, maxsplit=1)[0]
    user = front.removesuffix(shown(front).partition("://")[2]).partition("://")[2].rstrip("@")
    query = url[len(front) + 1 :]
    values = [value for _, value in parse_qsl(query)] + [pair.partition("=")[2] for pair in query.split("&")]
    return sorted(
        {part for part in (query, user, *user.split(":", 1), *values) if len(part) > 3}, key=len, reverse=True
    )


def identity(url: str) -> str:
    """What says which file is meant: the URL without user and password, of the web without signatures in its query."""
    front = re.split("[?#]", url, maxsplit=1)[0]
    rest = url[len(front) :]
    if protocol_of(url) not in ("http", "https"):  # where these are letters of a name like others
        return f"{shown(front)}{rest}"
    pairs = parse_qsl(rest.partition("#")[0].removeprefix("?"), keep_blank_values=True)
    kept = [pair for pair in pairs if not _SIGNATURES.fullmatch(pair[0])]
    if any(name.lower() in ("signature", "sig") for name, _ in pairs):
        kept = [pair for pair in kept if not _BESIDE_ONE.fullmatch(pair[0])]
    return f"{shown(front)}?{urlencode(kept)}" if kept else shown(front)
