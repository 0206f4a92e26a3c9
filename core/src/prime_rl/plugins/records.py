"""What the scan found: one frozen record per entry point, one per distribution it could not use."""

from __future__ import annotations

import re
from typing import NamedTuple

CORE_DISTRIBUTION = "prime-rl"
"""The distribution whose members are core's own."""

OK = "ok"
DISABLED = "disabled"
INCOMPATIBLE = "incompatible"
CONFLICTING = "conflicting"
UNREADABLE = "unreadable"


class PluginRecord(NamedTuple):
    """One entry point. Nothing of it has been imported."""

    kind: str
    name: str
    """Lower case with underscores."""
    target: str
    """`module:Class`."""
    distribution: str
    """Normalised name of the wheel: lower case with dashes."""
    version: str
    """Version of the wheel; "unknown" when its metadata does not say."""
    location: str
    """Folder the metadata lies in."""
    requires_core: str
    """The wheel's own requirement on prime-rl, such as ">=0.1,<1"; "" when it states none."""
    state: str
    """ok, disabled, incompatible, conflicting or unreadable."""
    reason: str
    """Why the state is not ok; "" when it is."""
    summary: str = ""
    """One line about the wheel, from its metadata."""

    @property
    def qualified_name(self) -> str:
        """`distribution:name`, always unambiguous within a kind."""
        return f"{self.distribution}:{self.name}"

    @property
    def name_in_config(self) -> str:
        """What a configuration writes: the name, qualified when the bare one is not its own."""
        return self.qualified_name if self.state == CONFLICTING else self.name

    @property
    def is_core(self) -> bool:
        """True for what core itself ships."""
        return self.distribution == CORE_DISTRIBUTION

    def describe(self) -> str:
        """`loss clip3 (prime-rl-loss-clip3 0.1.0)`."""
        return f"{self.kind} {self.name} ({self.distribution} {self.version})"


class Problem(NamedTuple):
    """Something wrong with a distribution's metadata; the scan went on without it."""

    distribution: str
    location: str
    reason: str
    is_harmless: bool = False
    """True for a second copy of a distribution, which is merely ignored."""

    def describe(self) -> str:
        """One line for `list`, `doctor` and error messages."""
        return f"{self.distribution} at {self.location}: {self.reason}"


class ScriptClaim(NamedTuple):
    """A distribution that installs a console script called `prime` or `prime-rl`."""

    script: str
    distribution: str
    target: str


def normalise_name(name: str) -> str:
    """A plugin's name as records spell it: dash equals underscore, case does not matter."""
    return name.strip().lower().replace("-", "_")


def normalise_distribution(name: str) -> str:
    """A distribution's name as records spell it (PEP 503): `Acme_Loss.X` -> `acme-loss-x`."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def split_name(name: str) -> tuple[str, str]:
    """(distribution or "", plugin name), both normalised, of `name` or `distribution:name`."""
    distribution, separator, plain = name.rpartition(":")
    if not separator:
        return "", normalise_name(name)
    return normalise_distribution(distribution), normalise_name(plain)
