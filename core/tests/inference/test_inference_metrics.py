"""What the orchestrator reads out of an engine's /metrics."""

from prime_rl.inference.embedded import EmbeddedConfig
from prime_rl.orchestrator.engine_load import engine_load


def test_the_page_says_all_that_concurrency_needs(toy) -> None:
    load = engine_load([toy.client.get("/metrics").text])
    assert load is not None
    assert (load.running, load.waiting, load.cache_usage, load.evictions) == (0, 0, 0, 0)
    assert load.capacity_tokens == EmbeddedConfig().max_running * toy.spec.max_model_len


def test_the_cache_fills_with_the_sequences_that_run(drive) -> None:
    driver = drive(max_running=4)
    loop = driver.loop
    assert loop.cache_capacity_tokens == 4 * 64
    seen = []
    look = lambda tokens: seen.append(loop.cached_tokens) or False  # noqa: E731
    running = driver.sequence("a", [1, 2, 3], max_tokens=5)
    running.is_stopped_by_text = look
    driver.finish(running)
    # Called before the token just sampled is in the cache.
    assert seen == [3, 4, 5, 6, 7]
    assert loop.cached_tokens == 0
    assert drive(cached=False).loop.cache_capacity_tokens == 0
