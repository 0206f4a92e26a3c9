"""An engine process and a client of it, for tests: `with serve_engine(model_dir) as engine: ...`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0


class EngineClient:
    """Speaks vLLM's HTTP interface to one engine."""

    def __init__(self, url: str) -> None:
        import httpx

        self.url = url
        self.http: httpx.Client = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def generate(self, token_ids: Sequence[int], **sampling: Any) -> dict[str, Any]:
        """The first choice of an answer; raises AssertionError with the engine's words."""
        choice: dict[str, Any] = self.answer(token_ids, **sampling)["choices"][0]
        return choice

    def answer(self, token_ids: Sequence[int], **sampling: Any) -> dict[str, Any]:
        """A whole answer of /inference/v1/generate."""
        body = {"token_ids": list(token_ids), "sampling_params": {"logprobs": 1, **sampling}}
        response = self.http.post("/inference/v1/generate", json=body)
        assert response.status_code == 200, f"HTTP {response.status_code}: {response.text[:500]}"
        content: dict[str, Any] = response.json()
        return content

    def post(self, path: str, body: Any = None) -> Any:
        """A POST that must succeed."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, f"{path}: HTTP {response.status_code}: {response.text}"
        return response.json() if response.content else None

    def get(self, path: str) -> Any:
        """A GET that must succeed."""
        response = self.http.get(path)
        assert response.status_code == 200, f"{path}: HTTP {response.status_code}: {response.text}"
        return response.json() if response.content else None

    def metric(self, name: str) -> float:
        """A number from /metrics."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith((name + "{", name + " ")):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"/metrics has no {name}")


@contextmanager
def serve_engine(model_dir: Path, *arguments: str) -> Iterator[EngineClient]:
    """`prime serve MODEL_DIR ARGUMENTS` in a process of its own, ended on leaving."""
    with TemporaryDirectory(prefix="prime-engine-") as name:
        folder = Path(name)
        url_file, log = folder / "engine.url", folder / "engine.log"
        command = [sys.executable, "-m", "prime_rl.cli.main", "serve", str(model_dir)]
        command += ["--port", "0", "--url-file", str(url_file), "--threads", "1", *arguments]
        with log.open("wb") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=stream)
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not url_file.exists():
                ended = process.poll() is not None
                assert not ended and time.monotonic() < deadline, (
                    f"the engine did not start: {log.read_text(errors='replace')[-2000:]}"
                )
                time.sleep(0.02)
            client = EngineClient(url_file.read_text().strip())
            yield client
            client.http.close()
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
