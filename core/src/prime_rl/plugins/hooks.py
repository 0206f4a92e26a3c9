"""Tells listeners what happens (pluggy); a bad listener is dropped and named, never fatal.

hooks = load_hooks(registry)
hooks.tell("step_metrics", step=3, metrics={"loss": 0.1}, role="trainer")
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import pluggy

from prime_rl import hookspecs
from prime_rl.errors import PluginError
from prime_rl.plugins.kinds import HOOK
from prime_rl.plugins.load import load_object
from prime_rl.plugins.records import OK, PluginRecord
from prime_rl.plugins.registry import Registry
from prime_rl.plugins.unknown import near_matches

logger = logging.getLogger("prime_rl.plugins")


class DroppedListener(NamedTuple):
    """A listener that is not, or no longer, called."""

    record: PluginRecord
    reason: str


class Hooks:
    """The listeners of this process."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager("prime_rl")
        self._manager.add_hookspecs(hookspecs)
        self._records: dict[str, PluginRecord] = {}
        self.dropped: list[DroppedListener] = []
        """Every listener that was refused or has failed, with the reason."""

    @property
    def listeners(self) -> list[PluginRecord]:
        """Records of the listeners that are called."""
        return list(self._records.values())

    def add(self, record: PluginRecord, listener: Any) -> bool:
        """Register a module, class or object. False when it does not fit; then nothing remains."""
        try:
            if isinstance(listener, type):
                listener = listener()
            self._check_names(listener)
            self._manager.register(listener, record.qualified_name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # PluginValidationError, or whatever its constructor raises
            if self._manager.has_plugin(record.qualified_name):
                self._manager.unregister(name=record.qualified_name)
            self._drop(record, f"{type(error).__name__}: {' '.join(str(error).split())}")
            return False
        self._records[record.qualified_name] = record
        return True

    def tell(self, event: str, /, **arguments: Any) -> None:
        """Call every listener of `event`, each on its own: one that raises is dropped.

        Raises TypeError when `event` is unknown or the arguments are not exactly its own: that is
        core's mistake, not a listener's.
        """
        caller = getattr(self._manager.hook, event, None)
        if caller is None or caller.spec is None:
            raise TypeError(f"no hook is called {event!r}")
        if set(caller.spec.argnames) != set(arguments):
            raise TypeError(
                f"hook {event} takes {sorted(caller.spec.argnames)}, found {sorted(arguments)}"
            )
        if not self._records:
            return
        names = [implementation.plugin_name for implementation in caller.get_hookimpls()]
        for name in dict.fromkeys(reversed(names)):
            others = [p for n, p in self._manager.list_name_plugin() if n != name]
            alone = self._manager.subset_hook_caller(event, others)
            try:
                alone(**arguments)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a listener must not end a run, SystemExit included
                logger.warning("listener %s failed in %s", name, event, exc_info=True)
                self._manager.unregister(name=name)
                self._drop(self._records.pop(name), f"{event}: {type(error).__name__}: {error}")

    def _check_names(self, listener: Any) -> None:
        """Refuse a function marked as a hook that this core does not have."""
        known = [name for name in vars(self._manager.hook) if not name.startswith("_")]
        for name in dir(listener):
            options = self._manager.parse_hookimpl_opts(listener, name)
            if options is None:
                continue
            wanted = options.get("specname") or name
            if wanted not in known and not options.get("optionalhook"):
                close = near_matches(wanted, known)
                hint = f"; did you mean {' or '.join(close)}?" if close else ""
                raise PluginError(f"this core has no hook {wanted!r}{hint}")

    def _drop(self, record: PluginRecord, reason: str) -> None:
        self.dropped.append(DroppedListener(record, reason))
        logger.warning("%s is disabled: %s", record.describe(), reason)


def load_hooks(registry: Registry) -> Hooks:
    """Import and register every listener that the registry allows. Never raises for one of them."""
    hooks = Hooks()
    for record in registry.of_kind(HOOK):
        if record.state != OK:
            continue
        try:
            listener = load_object(record)
        except PluginError as error:
            hooks._drop(record, str(error).splitlines()[0])
            continue
        if hooks.add(record, listener):
            registry.remember_hook(record)
    return hooks
