"""What every plugin must do, whatever its kind; the base of every kit.

class TestClip3(LossConformance):
    plugin_name = "clip3"
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from prime_rl.api import Plugin
from prime_rl.configs.base import PluginConfig
from prime_rl.configs.fields import every_path
from prime_rl.configs.former import NAME
from prime_rl.plugins import Registry, scan


class PluginConformance:
    """Subclass a kind's kit, set `plugin_name`, and pytest runs every check below."""

    kind: ClassVar[str]
    """Set by the kind's kit."""
    plugin_name: ClassVar[str]
    """Name, or `distribution:name`, of the installed plugin."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Settings to test with, where the defaults do not do."""

    def registry(self) -> Registry:
        """The plugins of this environment."""
        return scan()

    def plugin_class(self) -> type:
        """The class under test, loaded as a run would load it."""
        return self.registry().load(self.kind, self.plugin_name)

    def config_class(self) -> type[PluginConfig]:
        """Its Config."""
        return self.registry().config_class(self.kind, self.plugin_name)

    def config(self) -> PluginConfig:
        """Its Config with `settings`."""
        return self.config_class()(**{"type": self.plugin_name, **self.settings})

    def plugin(self) -> Any:
        """A new instance of the plugin."""
        return self.plugin_class()(self.config())

    def test_is_a_plugin(self) -> None:
        assert isinstance(self.plugin(), Plugin)

    def test_importing_it_is_light(self) -> None:
        """Listing, validating and help must not wait for torch."""
        record = self.registry().find(self.kind, self.plugin_name)
        child = subprocess.run(
            [sys.executable, "-m", "prime_rl.plugins.check", self.kind, record.qualified_name],
            capture_output=True,
            text=True,
            timeout=120,
        )
        result = json.loads(child.stdout)
        assert not result["error"], result["error"] + "\n" + result["traceback"]
        assert not result["warning"], result["warning"]

    def test_settings_survive_dump_and_load(self) -> None:
        config = self.config()
        assert self.config_class().model_validate(config.model_dump()) == config
        assert self.config_class().model_validate_json(config.model_dump_json()) == config

    def test_unknown_setting_is_refused(self) -> None:
        values = {**self.config().model_dump(), "no_such_setting_": 1}
        try:
            self.config_class().model_validate(values)
        except ValueError as error:
            assert "no_such_setting_" in str(error)
        else:
            raise AssertionError("Config accepts unknown settings: a typing error goes unnoticed")

    def test_every_setting_says_what_it_does(self) -> None:
        properties = self.config_class().model_json_schema().get("properties", {})
        silent = [name for name, field in properties.items() if not field.get("description")]
        assert set(silent) <= {"type"}, f"settings without a line of help: {silent}"

    def test_former_settings_lead_to_present_ones(self) -> None:
        config = self.config_class()
        present = {".".join(path) for path, _, _ in every_path(config, lambda kind, name: None)}
        for key, text in config.former.items():
            assert key not in present, f"`former` names {key}, which is a setting"
            unknown = {name for dot, name in NAME.findall(text) if dot} - present
            assert not unknown, f"`former` leads from {key} to {sorted(unknown)}: no such setting"
