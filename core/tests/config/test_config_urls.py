"""URLs and headers are refused when the recipe is read, not when the first request is sent."""

from __future__ import annotations

import httpx
import pytest
from pydantic import ValidationError

from prime_rl.configs.frozen import FrozenModelConfig
from prime_rl.errors import ConfigError


@pytest.mark.parametrize("url, kept", [
    ("http://127.0.0.1:8001", "http://127.0.0.1:8001"),
    ("https://models.example.org/v1/", "https://models.example.org"),
    ("http://localhost:8001/teacher/v1", "http://localhost:8001/teacher"),
    ("http://engine_0.local:1", "http://engine_0.local:1"),
    ("http://[::1]:8001", "http://[::1]:8001"),
    ("http://me:secret@10.0.0.1:65535", "http://me:secret@10.0.0.1:65535"),
])  # fmt: skip
def test_urls(url, kept):
    assert FrozenModelConfig(base_url=url).base_url == kept
    httpx.URL(kept)


BAD = [
    "", "127.0.0.1:8001", "ftp://x", "http://", "https://", "http:///v1", "http://:80", "http://[::1",
    "http://[::z]:1", "http://127.0.0.1:99999", "http://127.0.0.1:abc", "http://127.0.0.1:0",
    "http://127.0.0.1:", "http://127.0.0.1:-1", "http://a b:1", "http://x\n", "http://1.2.3", "http://1.2.3.4.5",
    "http://256.0.0.1", "http://x?y=1", "http://x#y", "http://x?", "http://bücher", "http://a..b",
    "http://-x", "http://a*b",
]  # fmt: skip


@pytest.mark.parametrize("url", BAD)
def test_unusable_urls(url):
    with pytest.raises(ValidationError, match="expected http://HOST:PORT or https://HOST"):
        FrozenModelConfig(base_url=url)


@pytest.mark.parametrize("key", ["inference.base_url", "orchestrator.train.algo.teacher.base_url"])
def test_every_url_of_a_recipe(load, flat, key):
    words = ["--orchestrator.train.algo", "opd"] if "teacher" in key else []
    with pytest.raises(ConfigError, match=f"{key}: found 'http://h:99999', .*from 1 to 65535"):
        load(flat, *words, f"--{key}", "http://h:99999")


@pytest.mark.parametrize("name, value", [
    ("", "x"), ("Ü", "x"), ("a b", "x"), ("a:", "x"), ("a\n", "x"),
    ("X", "ü"), ("X", "a\nb"), ("X", " a"), ("X", "a "), ("X", "a\0"),
])  # fmt: skip
def test_unusable_headers(name, value):
    with pytest.raises(ValidationError, match="headers\n.*found .*expected"):
        FrozenModelConfig(base_url="http://x", headers={name: value})


def test_headers():
    given = {"X-Team": "a b", "Empty": "", "x_y": "1"}
    assert FrozenModelConfig(base_url="http://x", headers=given).headers == given
