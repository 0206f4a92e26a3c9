"""Episodes per second through one env server process, against an engine that answers at once.

python tests/benchmarks/bench_environment.py --episodes 1000 --concurrency 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TASKSET = {"id": "prime_rl_environment_reverse_text", "num_tasks": 256}
REPLY_IDS = [5, 6, 7, 8, 9, 10, 11]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def serve(config: dict[str, Any], addresses: Any, parent: Connection) -> None:
    """The env server's process; it ends when the benchmark does."""
    from verifiers.v1.serve.pool import serve_env

    serve_env(
        max_workers=1,
        config_data=config,
        address="tcp://127.0.0.1:0",
        address_queue=addresses,
        death_pipe=parent,
    )


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The engine: seven letters and the end token for every prompt."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            lengths = [ln for ln in head.lower().split(b"\r\n") if ln.startswith(b"content-length")]
            body = await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
            reply: dict[str, Any] = {"data": [{"id": "tiny", "max_model_len": 512}]}
            if b"/generate" in head:
                ids = [*REPLY_IDS, json.loads(body)["sampling_params"]["stop_token_ids"][0]]
                content = [{"token": f"token_id:{i}", "logprob": -1.0} for i in ids]
                choice = {"index": 0, "token_ids": ids, "finish_reason": "stop"}
                reply = {"choices": [{**choice, "logprobs": {"content": content}}]}
            data = json.dumps(reply).encode()
            writer.write(HEAD % len(data) + data)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionResetError):
        pass
    finally:
        writer.close()


async def measure(episodes: int, concurrency: int, tokenizer: Path) -> None:
    """Start the server, warm it up with one episode, then time `episodes`."""
    import verifiers.v1 as vf
    from verifiers.v1.serve.client import EnvClient
    from verifiers.v1.serve.pool import env_config_data
    from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

    from prime_rl.models.renderers import renderer_settings

    engine = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = engine.sockets[0].getsockname()[1]
    agent = {"runtime": {"type": "subprocess"}}
    config = resolve_env_config({"taskset": TASKSET, "agent": agent})
    context = multiprocessing.get_context("spawn")
    addresses, (ours, theirs) = context.Queue(), context.Pipe()
    server = context.Process(
        target=serve, args=(env_config_data(config), addresses, theirs), daemon=True
    )
    server.start()
    theirs.close()
    environment = EnvClient(await asyncio.to_thread(addresses.get))
    await environment.wait_for_server_startup(timeout=120, interval=0.1)
    client = vf.TrainClientConfig(
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key_var="PRIME_RL_API_KEY",
        renderer=renderer_settings("chatml"),
        renderer_model_name=str(tokenizer),
    )
    sampling = vf.SamplingConfig(temperature=1.0, max_tokens=16)
    tasks = [task.data.model_dump(mode="json") for task in load_taskset(config.taskset)]
    gate = asyncio.Semaphore(concurrency)

    async def play(index: int) -> None:
        async with gate:
            data = tasks[index % len(tasks)]
            episode = await environment.run(client, "tiny", sampling, data)
            assert episode.ok, episode.traces[0].errors

    await play(0)
    started, client_cpu_s = time.perf_counter(), time.process_time()
    server_cpu_s = cpu_s(server.pid)
    await asyncio.gather(*(play(index) for index in range(episodes)))
    wall_s = time.perf_counter() - started
    server_ms = 1000 * (cpu_s(server.pid) - server_cpu_s) / episodes
    client_ms = 1000 * (time.process_time() - client_cpu_s) / episodes
    sys.stdout.write(
        f"{episodes / wall_s:.0f} episodes/s, {server_ms:.1f} ms CPU each in the env server, "
        f"{client_ms:.1f} ms in this process (client and engine)\n"
    )
    await environment.close()
    ours.close()
    await asyncio.to_thread(server.join)
    engine.close()


def cpu_s(pid: int | None) -> float:
    """User and system time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=64)
    arguments = parser.parse_args()
    from prime_rl.models.tokenizers import build_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        build_tokenizer("letters", Path(folder))
        asyncio.run(measure(arguments.episodes, arguments.concurrency, Path(folder)))


if __name__ == "__main__":
    main()
