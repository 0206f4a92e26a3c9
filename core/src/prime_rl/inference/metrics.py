"""GET /metrics: counters in the Prometheus text format, under the names vLLM gives them."""

from __future__ import annotations

from prime_rl.inference.service import EngineService


def metrics_text(service: EngineService) -> str:
    """The whole page."""
    loop = service.loop
    label = f'model_name="{_escape(service.limits.served_names[0])}"'
    rows: list[tuple[str, str, str, float]] = [
        ("num_requests_running", "gauge", "Sequences in the batch.", loop.running_count),
        ("num_requests_waiting", "gauge", "Sequences that wait.", loop.waiting_count),
        ("prompt_tokens", "counter", "Prompt tokens taken.", loop.prompt_tokens),
        ("generation_tokens", "counter", "Tokens generated.", loop.generated_tokens),
        ("engine_steps", "counter", "Model steps.", loop.steps),
        ("num_preemptions", "counter", "Sequences put back into the queue: never.", 0),
    ]
    capacity = loop.cache_capacity_tokens
    if capacity:
        usage = loop.cached_tokens / capacity
        rows.append(("kv_cache_usage_perc", "gauge", "Filled share of the cache, 0 to 1.", usage))
    lines: list[str] = []
    for name, kind, text, value in rows:
        suffix = "_total" if kind == "counter" else ""
        lines += [
            f"# HELP vllm:{name} {text}",
            f"# TYPE vllm:{name} {kind}",
            f"vllm:{name}{suffix}{{{label}}} {float(value)}",
        ]
    lines += [
        "# HELP vllm:request_success Finished sequences by reason.",
        "# TYPE vllm:request_success counter",
    ]
    for reason in ("stop", "length", "abort", "error"):
        count = loop.finished_counts.get(reason, 0)
        lines.append(
            f'vllm:request_success_total{{{label},finished_reason="{reason}"}} {float(count)}'
        )
    if capacity:
        lines += [
            "# HELP vllm:cache_config_info The cache: one block per token.",
            "# TYPE vllm:cache_config_info gauge",
            f'vllm:cache_config_info{{{label},block_size="1",num_gpu_blocks="{capacity}"}} 1.0',
        ]
    lines += [
        "# HELP prime_rl:weight_version Version of the weights served.",
        "# TYPE prime_rl:weight_version gauge",
        f"prime_rl:weight_version{{{label}}} {float(service.weights.version)}",
    ]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
