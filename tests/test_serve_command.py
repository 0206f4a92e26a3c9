"""`prime serve` by hand and as a run starts it: discovery, endings, refusals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from prime_rl.cli.main import main
from prime_rl.configs.base import ValidationContext
from prime_rl.configs.model import FreshModelConfig, ModelConfig
from prime_rl.models.fresh import make_fresh_model
from prime_rl.plugins import scan
from prime_rl.testing.served_engine import serve_engine

ARCHITECTURE = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 40,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("serve") / "model"
    registry = scan()
    context = ValidationContext(registry.config_class)
    section = ModelConfig.model_validate({"name": str(directory)}, context=context)
    make_fresh_model(FreshModelConfig(architecture=ARCHITECTURE), section, directory, registry)
    return directory


def serve(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and standard error of a command that ends by itself."""
    code = main(["serve", *map(str, arguments)])
    return code, capsys.readouterr().err


def test_a_directory_is_served_under_its_own_name_and_length(model: Path) -> None:
    with serve_engine(model) as engine:
        (card,) = engine.get("/v1/models")["data"]
        assert (card["id"], card["max_model_len"]) == ("model", 40)
        assert len(engine.generate([1, 2], max_tokens=3, ignore_eos=True)["token_ids"]) == 3


def test_a_signal_ends_it_with_a_request_running(model: Path, tmp_path: Path) -> None:
    url_file = tmp_path / "engine.url"
    command = [sys.executable, "-m", "prime_rl.cli.main", "serve", str(model), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--url-file", str(url_file)], stderr=subprocess.PIPE, text=True
    )
    while not url_file.exists():
        assert process.poll() is None
        time.sleep(0.02)
    url = url_file.read_text().strip()
    httpx.post(f"{url}/pause?mode=keep", trust_env=False)
    address = url.removeprefix("http://").split(":")
    body = json.dumps({"token_ids": [1], "sampling_params": {}}).encode()
    with socket.create_connection((address[0], int(address[1]))) as client:
        head = f"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        time.sleep(0.2)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        answer = b""
        while part := client.recv(10000):
            answer += part
        _, errors = process.communicate(timeout=10)
    assert time.monotonic() - started < 20
    assert answer.startswith(b"HTTP/1.1 503") and b"shutting down" in answer
    assert process.returncode == 0
    assert "Traceback" not in errors, errors


def test_a_taken_port_is_said_so(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        code, errors = serve(capsys, model, "--port", port)
    assert code == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in errors


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give a model directory"),
        (["nowhere"], "config.json"),
        (["MODEL", "--engine", "no_such"], "no_such"),
        (["nowhere", "--config", "run.json"], "not both"),
        (["--config", "no_run.json"], "no_run.json"),
    ],
)
def test_wrong_arguments_are_one_error(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    words = [str(model) if word == "MODEL" else word for word in arguments]
    code, errors = serve(capsys, *words)
    assert code == 1
    assert errors.count("error: ") == 1 and text in errors


def test_binding_beyond_loopback_is_warned_about_loudly(model: Path, tmp_path: Path) -> None:
    url_file = tmp_path / "engine.url"
    command = [sys.executable, "-m", "prime_rl.cli.main", "serve", str(model), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--host", "0.0.0.0", "--url-file", str(url_file)],
        stderr=subprocess.PIPE,
        text=True,
    )
    while not url_file.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    _, errors = process.communicate(timeout=10)
    assert "THE ENGINE LISTENS ON 0.0.0.0" in errors
