"""Random and mutated configurations: only ConfigError or PluginError may come out, and no hang."""

from __future__ import annotations

import copy
import random
import tomllib

import pytest
import tomli_w

from prime_rl.configs.load import load_run
from prime_rl.configs.toml import parse_toml
from prime_rl.errors import ConfigError, PluginError

WORDS = [
    "model", "trainer", "orchestrator", "train", "source", "env", "taskset", "id", "name", "type",
    "stages", "optim", "lr", "loss", "eps", "max_steps", "seq-len", "ckpt", "interval", "run", "dir",
    "fresh", "architecture", "model_type", "moe", "layers", "backend", "0", "1", "-1", "x", "no-flag",
    "flag", "plugins", "deny", "resume", "step", "eval", "algo", "sampling", "group_size", "options",
    "probe", "data", "router", "table", "pair", "inner", "é", "a b", "",
]  # fmt: skip
VALUES = [
    "None", "true", "false", "0", "-1", "1e400", "nan", "3", "2.5", "probe", "probe_other", "auto", "{}",
    "[]", '{"a": 1}', "[1, 2", "sft", "rl", "rll", "", " ", "\0", "é", "@", "--", "-x", "x" * 300,
    "9" * 5000, "../..", "[[[[", '{"a":NaN}', "probe_broken", "acme-probes:probe",
]  # fmt: skip
PLAIN_VALUES = [
    True, False, None, 0, -1, 2**70, 1.5, float("nan"), float("inf"), "", "None", "probe", "rl", [], {},
    [1, "a"], [{}], {"type": "probe"}, {"type": 3}, {"type": "None"}, [[1]], {"": {}}, "x" * 1000,
]  # fmt: skip


def mutated_text(generator: random.Random, text: str) -> str:
    """Delete, double, swap or overwrite a few pieces of a recipe's text."""
    for _ in range(generator.randint(1, 4)):
        lines = text.splitlines(keepends=True)
        here = generator.randrange(len(lines) or 1)
        kind = generator.randrange(6)
        if kind == 0 and lines:
            del lines[here]
        elif kind == 1 and lines:
            lines.insert(generator.randrange(len(lines)), lines[here])
        elif kind == 2 and lines:
            there = generator.randrange(len(lines))
            lines[here], lines[there] = lines[there], lines[here]
        elif kind == 3:
            key = ".".join(generator.choices(WORDS, k=generator.randint(1, 4)))
            lines.insert(here, f"{key} = {generator.choice(VALUES)}\n")
        elif kind == 4:
            lines.insert(here, f"[{generator.choice(WORDS)}.{generator.choice(WORDS)}]\n")
        text = "".join(lines)
        if kind == 5 and text:
            at = generator.randrange(len(text))
            text = text[:at] + generator.choice("[]{}=\"\n.#,'\\0tn") + text[at + 1 :]
    return text


def mutated_tree(generator: random.Random, text: str) -> str:
    """Replace, remove or add values anywhere in a recipe."""
    document = tomllib.loads(text)
    for _ in range(generator.randint(1, 4)):
        node = document
        while generator.random() < 0.8:
            inner = list(node.values()) if isinstance(node, dict) else list(node)
            inner = [one for one in inner if isinstance(one, (dict, list)) and one]
            if not inner:
                break
            node = generator.choice(inner)
        value = copy.deepcopy(generator.choice(PLAIN_VALUES))
        if isinstance(node, list):
            node[generator.randrange(len(node))] = value
        elif generator.random() < 0.5 and node:
            node[generator.choice(sorted(node))] = value
        elif generator.random() < 0.5 and node:
            del node[generator.choice(sorted(node))]
        else:
            node[generator.choice(WORDS)] = value
    return tomli_w.dumps(writable(document))


def writable(value):
    """TOML has no null: it is left out."""
    if isinstance(value, dict):
        return {key: writable(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [writable(one) for one in value if one is not None]
    return value


def random_words(generator: random.Random) -> list[str]:
    """Words of a command line: sensible shapes with odd contents."""
    words: list[str] = []
    for _ in range(generator.randint(0, 5)):
        key = "--" + ".".join(generator.choices(WORDS, k=generator.randint(1, 5)))
        shape = generator.randrange(5)
        if shape == 0:
            words.append(key)
        elif shape == 1:
            words.append(f"{key}={generator.choice(VALUES)}")
        elif shape == 2:
            options = ["--plugin", "--no-plugin", "--resume", "--clean", "--dry-run", "@", "--help"]
            words.append(generator.choice(options))
        else:
            words += [key, generator.choice(VALUES)]
    return words


def attempt(seed: int, folder, registry, recipes: list[str]) -> bool:
    """Load one mutated configuration; True when it is valid."""
    generator = random.Random(seed)
    base = generator.choice(recipes)
    kind = seed % 3
    text = base if kind == 2 else (mutated_text, mutated_tree)[kind](generator, base)
    recipe = folder / "recipe.toml"
    recipe.write_text(text, errors="surrogatepass")
    words = random_words(generator) if kind == 2 or generator.random() < 0.3 else []
    try:
        loaded = load_run([str(recipe), *words], registry)
    except (ConfigError, PluginError) as error:
        assert str(error).strip(), "an error without a text"
        return False
    assert loaded.run is not None or loaded.arguments.help
    return True


def run_seeds(seeds: range, folder, registry, recipes: list[str]) -> int:
    """Number of valid configurations; a failure names its seed."""
    valid = 0
    for seed in seeds:
        try:
            valid += attempt(seed, folder, registry, recipes)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return valid


def test_random_configurations(tmp_path, registry, flat, staged):
    valid = run_seeds(range(300), tmp_path, registry, [flat, staged])
    assert 20 < valid < 250, "the mutations are too wild, or too tame, to test anything"


@pytest.mark.slow
def test_two_thousand_random_configurations(tmp_path, registry, flat, staged):
    run_seeds(range(1000, 3000), tmp_path, registry, [flat, staged])


def test_line_of_every_key_is_a_line_that_has_the_key(flat, staged):
    """Whatever document tomllib accepts: the scanner knows each of its keys, at the right line."""
    checked = 0
    for seed in range(300):
        generator = random.Random(seed)
        text = mutated_text(generator, generator.choice([flat, staged]))
        try:
            tree = parse_toml(text, "x")
        except ConfigError:
            continue
        lines = text.split("\n")
        stack = [tree]
        while stack:
            node = stack.pop()
            inner = node.value if node.is_list else node.value.values() if node.is_table else []
            stack += inner
            keys = [key for key in node.origin.path if isinstance(key, str)]
            if keys:
                assert keys[-1] in lines[node.origin.line - 1]
                checked += 1
    assert checked > 1000
