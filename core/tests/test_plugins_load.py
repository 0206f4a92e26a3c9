"""Loading: whatever a plugin does wrong becomes one error that names it; names and configs."""

import os
import sys

import pytest
from pydantic import ValidationError

from prime_rl import __version__
from prime_rl.api import Loss
from prime_rl.configs.base import BaseConfig, ValidationContext, defaults, plugin_section
from prime_rl.errors import PluginError
from prime_rl.plugins import Registry, Switches, scan
from prime_rl.testing.distributions import LOSS_MODULE, write_distribution, write_loss

LOSSES = "prime_rl.losses"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a loss made of the given source and return the registry that sees it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def installed(name: str, source: str, target: str = "Plugin") -> Registry:
        entries = {LOSSES: {name: f"module_{name}:{target}"}}
        modules = {f"module_{name}": source}
        write_distribution(tmp_path, f"wheel-{name}", entry_points=entries, modules=modules)
        return scan(Switches(), refresh=True)

    yield installed
    for module in set(sys.modules) - before:
        if module.startswith(("module_", "acme_")):
            del sys.modules[module]


BROKEN = {
    "import_error": ("import a_library_nobody_has", "a_library_nobody_has"),
    "syntax_error": ("def broken(:\n", "SyntaxError"),
    "assertion": ("assert False, 'not on this machine'", "not on this machine"),
    "system_exit": ("import sys\nsys.exit('giving up')", "SystemExit: giving up"),
    "system_exit_zero": ("raise SystemExit(0)", "SystemExit"),
    "missing_attribute": ("x = 1", "has no attribute 'Plugin'"),
    "runtime_error": ("raise RuntimeError('no device')", "RuntimeError: no device"),
    "generator_exit": ("raise GeneratorExit", "GeneratorExit"),
    "own_base_exception": ("class E(BaseException): ...\nraise E('odd')", "odd"),
    "recursion": ("def f(): f()\nf()", "RecursionError"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_plugin_is_one_error_with_everything_in_it(install, how):
    """BL-109: stevedore alone lets AssertionError and SystemExit through."""
    source, expected = BROKEN[how]
    registry = install(f"load_{how}", source)
    with pytest.raises(PluginError) as caught:
        registry.load("loss", f"load_{how}")
    error = caught.value
    assert (error.kind, error.name) == ("loss", f"load_{how}")
    assert error.distribution == f"wheel-load-{how}".replace("_", "-")
    assert error.version == "1.0"
    assert error.target == f"module_load_{how}:Plugin"
    assert expected in str(error)
    assert "--no-plugin" in str(error)
    assert expected.rpartition(": ")[2] in error.original_traceback
    assert isinstance(error.__cause__, BaseException)


def test_broken_plugin_does_not_harm_others(install):
    install("load_bad", "raise SystemExit(3)")
    registry = install("load_good", LOSS_MODULE.format(name="load_good", class_name="Plugin"))
    with pytest.raises(PluginError):
        registry.load("loss", "load_bad")
    assert issubclass(registry.load("loss", "load_good"), Loss)


def test_keyboard_interrupt_passes(install):
    registry = install("load_interrupt", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        registry.load("loss", "load_interrupt")


WRONG = {
    "function": ("def Plugin(): ...", "expected a class that subclasses prime_rl.api.loss.Loss"),
    "instance": ("Plugin = 3", "found int 3"),
    "other_class": ("class Plugin: ...", "found class Plugin, expected a class that subclasses"),
    "other_kind": (
        "from prime_rl.api import Router\nclass Plugin(Router): ...",
        "expected a class that subclasses prime_rl.api.loss.Loss",
    ),
    "incomplete": (
        "from prime_rl.api import Loss\nclass Plugin(Loss): ...",
        "does not implement: compute",
    ),
    "config_of_another_class": (
        "from prime_rl.api import Loss\nclass Plugin(Loss):\n    class Config: ...\n"
        "    def compute(self, inputs): ...",
        "expected a class that subclasses PluginConfig",
    ),
    "config_of_another_name": (
        LOSS_MODULE.format(name="copied", class_name="Plugin"),
        "has type 'copied', expected 'load_config_of_another_name'",
    ),
}


@pytest.mark.parametrize("how", WRONG)
def test_wrong_object_is_refused(install, how):
    source, expected = WRONG[how]
    registry = install(f"load_{how}", source)
    with pytest.raises(PluginError) as caught:
        registry.load("loss", f"load_{how}")
    assert expected in str(caught.value)
    assert "wheel-load-" in str(caught.value)


def test_a_failed_load_is_tried_again(install, tmp_path):
    registry = install("load_mended", "raise ImportError('not yet')")
    with pytest.raises(PluginError):
        registry.load("loss", "load_mended")
    text = LOSS_MODULE.format(name="load_mended", class_name="Plugin")
    (tmp_path / "module_load_mended.py").write_text(text + "\n# longer than the cached version\n")
    assert registry.load("loss", "load_mended").__name__ == "Plugin"
    assert registry.load("loss", "load_mended") is registry.load("loss", "load_mended")


def test_unknown_name_tells_near_matches_and_what_is_known(install, tmp_path):
    write_loss(tmp_path, "load_clipped", version="2.5")
    registry = install("load_other", "x = 1")
    with pytest.raises(PluginError) as caught:
        registry.load("loss", "load_cliped")
    text = str(caught.value)
    assert "Did you mean 'load_clipped'?" in text
    assert "load_clipped (acme-load-clipped 2.5)" in text
    assert "load_other (wheel-load-other 1.0)" in text


def test_name_of_another_kind_is_said():
    with pytest.raises(PluginError, match="A launcher has that name"):
        scan(Switches()).load("router", "local")


def test_unknown_kind():
    with pytest.raises(PluginError, match="no plugin kind 'looss'; kinds: model, loss"):
        scan(Switches()).load("looss", "ipo")


@pytest.mark.parametrize(
    ("kind", "name", "extra"),
    [
        ("moe_backend", "sonic", "sonic-moe"),
        ("moe_backend", "sonicmoe", ""),
        ("dsa_backend", "flash_mla", "flash-mla"),
        ("model", "tiny3_moe", "small"),
        ("loss", "tiny3", ""),
    ],
)
def test_install_line_comes_from_cores_own_extras(tmp_path, monkeypatch, kind, name, extra):
    requires = [
        'prime-rl-model-tiny3>=1; extra == "big"',
        'prime-rl-loss-many>=1; extra == "big"',
        'prime-rl-model-tiny3>=1 ; extra == "small"',
        'prime-rl-moe-sonic ; extra == "sonic-moe"',
        "prime-rl-dsa-flash-mla ; python_version > '3' and extra == 'flash-mla'",
    ]
    write_distribution(tmp_path, "prime-rl", version="0.1.0", requires=requires)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError) as caught:
        scan(Switches()).load(kind, name)
    if extra:
        assert f"pip install 'prime-rl[{extra}]'" in str(caught.value)
    else:
        assert "pip install" not in str(caught.value)


def test_extras_of_the_real_core_name_its_own_wheels():
    from prime_rl.plugins.unknown import extra_with

    assert extra_with("loss", "ipo") == "quickstart"
    assert extra_with("model", "qwen3_moe") == "quickstart"
    assert extra_with("loss", "nobody") == ""


def test_dash_equals_underscore_and_names_can_be_qualified(install, tmp_path):
    write_loss(tmp_path, "load_two_words", distribution="Two.Words")
    registry = install("load_x", "x = 1")
    plain = registry.load("loss", "load_two_words")
    assert registry.load("loss", "load-two-words") is plain
    assert registry.load("loss", "Load-Two_Words") is plain
    assert registry.load("loss", "two-words:load_two_words") is plain
    assert registry.load("loss", "Two_Words:load-two-words") is plain
    with pytest.raises(PluginError, match="no loss plugin is called 'other:load_two_words'"):
        registry.load("loss", "other:load_two_words")


def test_config_accepts_the_name_it_was_asked_for(install, tmp_path):
    """A saved configuration must still say which of two wheels was meant."""
    write_loss(tmp_path, "load_pick", distribution="picked")
    registry = install("load_y", "x = 1")
    own = registry.config_class("loss", "load_pick")
    assert own is registry.load("loss", "load_pick").Config
    assert registry.config_class("loss", "load-pick") is own
    qualified = registry.config_class("loss", "Picked:load-pick")
    assert qualified is registry.config_class("loss", "picked:load_pick")
    config = qualified(strength=2.0)
    assert isinstance(config, own)
    assert config.model_dump() == {"type": "picked:load_pick", "strength": 2.0}
    assert qualified.model_validate(config.model_dump()) == config
    assert registry.load("loss", "picked:load_pick")(config).config is config
    with pytest.raises(ValidationError):
        qualified(type="load_pick")


def test_config_that_serves_two_names_is_pinned_to_the_one_that_was_asked_for(install):
    source = LOSS_MODULE.format(name='load_fam", "load_fam_two', class_name="Plugin")
    source = source.replace('= "load_fam", "load_fam_two"', '= "load_fam_two"')
    registry = install("load_fam", source)
    assert registry.config_class("loss", "load_fam")().type == "load_fam"
    with pytest.raises(ValidationError):
        registry.config_class("loss", "load_fam")(type="load_fam_two")


def test_plugin_without_settings_gets_its_name_pinned(install):
    source = "from prime_rl.api import Loss\nclass Plugin(Loss):\n    def compute(self, i): ...\n"
    registry = install("load_plain", source)
    config = registry.config_class("loss", "load_plain")
    assert config().type == "load_plain"
    registry.load("loss", "load_plain")(config())
    with pytest.raises(ValidationError):
        config(type="other")
    with pytest.raises(ValidationError):
        config(no_such=1)


def test_table_names_what_was_loaded_and_workers_verify_it(install, tmp_path):
    write_loss(tmp_path, "load_first", version="1.5")
    write_loss(tmp_path, "load_unused")
    registry = install("load_z", "x = 1")
    registry.load("loss", "load_first")
    table = registry.table()
    assert [row["name"] for row in table] == ["prime-rl", "load_first"]
    assert table[1]["distribution"] == "acme-load-first"
    assert table[1]["version"] == "1.5"
    registry.verify_table(table)
    with pytest.raises(PluginError) as caught:
        registry.verify_table(
            [
                {**table[0], "version": "9.9"},
                {**table[1], "version": "1.4"},
                {**table[1], "name": "load_gone", "distribution": "gone"},
            ]
        )
    text = str(caught.value)
    assert "prime-rl 9.9" in text
    assert "acme-load-first 1.4, this process finds 1.5" in text
    assert "gone 1.5, this process finds none" in text


def test_worker_that_has_the_plugin_switched_off_refuses(install, tmp_path):
    write_loss(tmp_path, "load_off")
    registry = install("load_w", "x = 1")
    registry.load("loss", "load_off")
    elsewhere = scan(Switches(deny=("load_off",)), refresh=True)
    with pytest.raises(PluginError, match="this process finds none"):
        elsewhere.verify_table(registry.table())


def test_loading_leaves_no_cache_on_the_disk(install, tmp_path, monkeypatch):
    """OWN-2: stevedore writes its own listing below the cache folder unless it never lists."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    registry = install("load_c", LOSS_MODULE.format(name="load_c", class_name="Plugin"))
    registry.load("loss", "load_c")
    assert not os.path.exists(tmp_path / "cache")


def test_open_section_takes_every_spelling_and_keeps_every_field(install, tmp_path):
    """BL-063 and OWN-6: the section is the plugin's own model, whole, in the dump too."""

    class Section(BaseConfig):
        loss: plugin_section("loss", default="load_sect") = defaults()  # type: ignore[valid-type]

    write_loss(tmp_path, "load_sect", distribution="sect-wheel")
    registry = install("load_v", "x = 1")
    context = ValidationContext(config_class=registry.config_class)

    def validate(values: dict) -> Section:
        return Section.model_validate(values, context=context)

    assert validate({}).loss.type == "load_sect"
    for written, stored in {
        "load_sect": "load_sect",
        "load-sect": "load_sect",
        "Sect.Wheel:load-sect": "sect-wheel:load_sect",
    }.items():
        section = validate({"loss": {"type": written, "strength": 3.0}})
        assert section.model_dump() == {"loss": {"type": stored, "strength": 3.0}}
        assert validate(section.model_dump()) == section
    with pytest.raises(ValidationError, match="strenght"):
        validate({"loss": {"type": "load_sect", "strenght": 3.0}})
    with pytest.raises(PluginError, match="Did you mean 'load_sect'"):
        validate({"loss": {"type": "load_sekt"}})


def test_incompatible_or_unreadable_plugin_is_refused_without_an_import(tmp_path, monkeypatch):
    entries = {LOSSES: {"load_future": "module_future:Plugin"}}
    modules = {"module_future": "raise SystemExit('imported')"}
    write_distribution(
        tmp_path, "future", entry_points=entries, modules=modules, requires=["prime-rl>=99"]
    )
    damaged = f"[{LOSSES}]\nload_damaged = module_future:Plugin\nno equals sign\n".encode()
    write_distribution(tmp_path, "damaged", entry_points_bytes=damaged)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = scan(Switches())
    with pytest.raises(PluginError) as caught:
        registry.load("loss", "load_future")
    text = str(caught.value)
    assert "loss load_future (future 1.0) is incompatible" in text
    assert f"needs prime-rl>=99, this is prime-rl {__version__}" in text
    assert "pip install -U future" in text
    with pytest.raises(PluginError, match="load_damaged .* is unreadable: entry_points.txt line 3"):
        registry.load("loss", "load_damaged")
    assert "module_future" not in sys.modules


def test_first_of_two_copies_is_the_one_that_loads(tmp_path, monkeypatch):
    """BL-107: metadata and module come from the same place."""
    for folder, version in (("a", "1.0"), ("b", "2.0")):
        write_loss(tmp_path / folder, "load_copy", version=version)
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    registry = scan(Switches())
    plugin = registry.load("loss", "load_copy")
    assert registry.find("loss", "load_copy").version == "2.0"
    assert sys.modules[plugin.__module__].__file__.startswith(str(tmp_path / "b"))
    del sys.modules[plugin.__module__]
