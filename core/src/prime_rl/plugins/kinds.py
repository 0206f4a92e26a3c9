"""The kinds of plugin there are. Adding a kind is adding one entry to KINDS."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """One kind of plugin; frozen."""

    name: str
    """Used in commands, errors and the saved run: `loss`."""
    group: str
    """Entry-point group of its members."""
    contract: str
    """Class every member subclasses, as `module:Class`."""
    config_field: str
    """Where a configuration chooses it; dotted path."""
    word: str
    """The word in distribution names: `prime-rl-<word>-<name>`."""


_KINDS = (
    Kind("model", "prime_rl.models", "prime_rl.api:Model", "model.plugin", "model"),
    Kind("loss", "prime_rl.losses", "prime_rl.api:Loss", "trainer.loss", "loss"),
    Kind(
        "algorithm",
        "prime_rl.algorithms",
        "prime_rl.api:Algorithm",
        "orchestrator.train.algo",
        "algorithm",
    ),
    Kind(
        "moe_backend",
        "prime_rl.moe_backends",
        "prime_rl.api:MoEBackend",
        "model.moe.backend",
        "moe",
    ),
    Kind(
        "dsa_backend",
        "prime_rl.dsa_backends",
        "prime_rl.api:DSABackend",
        "model.dsa_backend",
        "dsa",
    ),
    Kind(
        "attention_backend",
        "prime_rl.attention_backends",
        "prime_rl.api:AttentionBackend",
        "model.attention",
        "attention",
    ),
    Kind(
        "weight_transport",
        "prime_rl.weight_transports",
        "prime_rl.api:WeightTransport",
        "weight_broadcast",
        "transport",
    ),
    Kind("router", "prime_rl.routers", "prime_rl.api:Router", "router", "router"),
    Kind("engine", "prime_rl.engines", "prime_rl.api:Engine", "inference.engine", "engine"),
    Kind("launcher", "prime_rl.launchers", "prime_rl.api:Launcher", "launcher", "launcher"),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _KINDS}
"""Every kind by name."""

HOOK = "hook"
"""Kind name of listeners in the scan's records; they are told, not chosen, so they are no Kind."""
COMMAND = "command"
"""Kind name of extra commands in the scan's records."""

GROUPS: dict[str, str] = {
    **{kind.group: kind.name for kind in _KINDS},
    "prime_rl.hooks": HOOK,
    "prime_rl.commands": COMMAND,
}
"""Entry-point group -> kind name, of everything the scan looks for."""
