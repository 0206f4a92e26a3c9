"""Finds plugins, names their wheel, loads one by name. Importing this loads no plugin.

registry = scan(Switches.read(deny=["slow_router"]))
registry.names("loss")                   # ["ipo"]
Loss = registry.load("loss", "ipo")      # class, checked against prime_rl.api.Loss
Config = registry.config_class("loss", "ipo")
run.plugins = registry.table()           # saved with the run; workers call verify_table
"""

from prime_rl.errors import PluginError
from prime_rl.plugins.kinds import COMMAND, GROUPS, HOOK, KINDS, Kind
from prime_rl.plugins.records import PluginRecord, Problem
from prime_rl.plugins.registry import Registry
from prime_rl.plugins.scan import scan
from prime_rl.plugins.switches import Switches

__all__ = [
    "COMMAND",
    "GROUPS",
    "HOOK",
    "KINDS",
    "Kind",
    "PluginError",
    "PluginRecord",
    "Problem",
    "Registry",
    "Switches",
    "scan",
]
