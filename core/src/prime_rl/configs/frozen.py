"""Where a frozen model answers: a teacher that somebody else serves. The system never starts one."""

from __future__ import annotations

from pydantic import Field

from prime_rl.configs.base import BaseConfig
from prime_rl.configs.urls import BaseUrl, Headers


class FrozenModelConfig(BaseConfig):
    """A model behind an endpoint that runs already, with the policy's tokenizer.

    It must answer `/inference/v1/generate`: token ids in, token ids and log-probabilities out.
    """

    base_url: BaseUrl
    """Where it answers, as `http://127.0.0.1:8001`."""
    name: str | None = None
    """Name of the model in requests; None: the first that the endpoint lists."""
    api_key_var: str = "PRIME_RL_API_KEY"
    """Environment variable that holds the key; unset: none is sent."""
    headers: Headers = {}
    """Further headers of every request."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds one request may take."""
    max_concurrent: int = Field(32, ge=1)
    """Most requests at once that score tokens."""
