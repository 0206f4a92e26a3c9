"""What the sticky router adds to a request: the same small answers asked directly and through it.

Engine, router and client are processes of their own.

    python tests/benchmarks/bench_router.py [--requests 2000] [--concurrency 1 32]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from typing import Any

import aiohttp
import uvicorn

from prime_rl.plugins import scan

ANSWER = b'{"choices":[{"index":0,"token_ids":[' + b"1," * 200 + b"1]}]}"
LIMIT_MS = 3.0
"""Most the router may add to the median of one request at a time."""


async def engine(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers everything with the same bytes."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ANSWER))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})


def serve(urls: list[str], ready: Any) -> None:
    """Run an engine (no URLs) or a router before engines; sends its own URL."""
    application: Any = engine
    if urls:
        registry = scan()
        config = registry.config_class("router", "sticky")(type="sticky")
        application = registry.load("router", "sticky")(config).application(urls)

    async def run() -> None:
        server = uvicorn.Server(uvicorn.Config(application, port=0, log_level="error"))
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        ready.send(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
        await task

    asyncio.run(run())


async def measure(url: str, requests: int, concurrency: int) -> tuple[float, float]:
    """(median latency in ms, requests per second)."""
    latencies: list[float] = []
    left = iter(range(requests))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def work(number: int) -> None:
            headers = {"X-Session-ID": f"s{number}"}
            for _ in left:
                started = time.perf_counter()
                async with client.post(
                    f"{url}/inference/v1/generate", data=b"{}", headers=headers
                ) as r:
                    await r.read()
                latencies.append(time.perf_counter() - started)

        started = time.perf_counter()
        await asyncio.gather(*(work(number) for number in range(concurrency)))
        seconds = time.perf_counter() - started
    return statistics.median(latencies) * 1e3, requests / seconds


def main() -> int:
    """Print the table; 1 when the router adds too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    processes = []

    def start(urls: list[str]) -> str:
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(urls, there), daemon=True)
        process.start()
        processes.append(process)
        url: str = here.recv()
        return url

    engines = [start([]), start([])]
    router = start(engines)
    print(f"{'at once':>8} {'':>8} {'median ms':>10} {'requests/s':>11}")
    added: dict[int, float] = {}
    for concurrency in options.concurrency:
        found = {}
        for name, url in (("direct", engines[0]), ("router", router)):
            asyncio.run(measure(url, 100, concurrency))
            found[name] = asyncio.run(measure(url, options.requests, concurrency))
            median, rate = found[name]
            print(f"{concurrency:>8} {name:>8} {median:>10.2f} {rate:>11.0f}")
        added[concurrency] = found["router"][0] - found["direct"][0]
    for process in processes:
        process.terminate()
        process.join()
    missed = added.get(1, 0.0) > LIMIT_MS
    if 1 in added:
        verdict = "MISSED" if missed else "met"
        print(f"added to one request: {added[1]:.2f} ms   limit {LIMIT_MS:g} ms: {verdict}")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
