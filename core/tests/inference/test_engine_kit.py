"""The engine kit rejects engines that are wrong in one deliberate way each.

The engines serve the toy model, with one part of the embedded engine replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from prime_rl.api.transport import NamedTensor, Receiver
from prime_rl.errors import WeightTransferError
from prime_rl.inference import admission, generate
from prime_rl.inference.embedded import EmbeddedConfig
from prime_rl.inference.engine_loop import EngineLoop
from prime_rl.inference.runner import ModelRunner
from prime_rl.inference.sampler import Sampler
from prime_rl.models.load import load_weights
from prime_rl.models.setup import build
from prime_rl.testing.engine import MAX_MODEL_LEN, EngineConformance, Reference, Served
from prime_rl.testing.served_engine import EngineClient


class FileReceiver(Receiver):
    """One safetensors file per version."""

    def receive(self, version: int, directory: Path) -> Iterator[NamedTensor]:
        path = directory / "all.safetensors"
        if not path.exists():
            raise WeightTransferError(f"{path} does not exist")
        yield from (NamedTensor(*item) for item in load_file(path).items())


class ToyServed(Served):
    """Sends updates as one file."""

    def update(self, reference: Reference) -> None:
        self.version += 1
        directory = self.broadcasts / f"step_{self.version}"
        directory.mkdir(parents=True)
        save_file(dict(reference.tensors()), directory / "all.safetensors")
        info = {"version": self.version, "directory": str(directory)}
        self.client.post("/update_weights", {"update_info": info})


@pytest.fixture
def kit_of_toy(serve_toy: Callable[..., Any], make_toy: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the kit for a toy engine."""

    class Kit(EngineConformance):
        plugin_name = "embedded"

        @contextmanager
        def serve(self, folder: Path) -> Iterator[Served]:
            references = []
            for seed in (0, 1):
                setup = make_toy(folder / f"model_{seed}", seed)
                module = build(setup)
                load_weights(module, setup.layout, setup.model_dir, "cpu")
                references.append(Reference(setup.model_dir, setup, module.eval()))
            server = serve_toy(
                receiver=FileReceiver(),
                setup=references[0].setup,
                max_model_len=MAX_MODEL_LEN,
                settings={"max_running": 8},
            )
            yield ToyServed(EngineClient(server.url), *references, folder / "broadcasts")

    return Kit


def failures(kit: EngineConformance, engine: Served, only: str | None = None) -> set[str]:
    """Names of the kit's checks that do not pass."""
    failed = set()
    for name, check in inspect.getmembers(kit, inspect.ismethod):
        needs_engine = "engine" in inspect.signature(check).parameters
        if not name.startswith("test_") or not needs_engine or only not in (None, name):
            continue
        try:
            check(engine)
        except Exception:
            failed.add(name)
    return failed


def test_the_right_engine_passes(kit_of_toy, tmp_path: Path) -> None:
    kit = kit_of_toy()
    with kit.serve(tmp_path) as engine:
        assert failures(kit, engine) == set()


def ignores_temperature(patch: pytest.MonkeyPatch) -> None:
    whole = Sampler._prepare

    def prepare(self: Sampler, sequences: Any) -> None:
        whole(self, sequences)
        self._temperatures = None

    patch.setattr(Sampler, "_prepare", prepare)


def scores_before_filtering(patch: pytest.MonkeyPatch) -> None:
    whole = Sampler._sample_filtered

    def sample(self: Sampler, logits: Any, draws: Any, group: Any, rows: Any, out: Any) -> None:
        whole(self, logits, draws, group, rows, out)
        table = torch.log_softmax(logits, dim=-1)
        for row in rows:
            out.tops[row] = [(token, float(table[row, token])) for token, _ in out.tops[row]]

    patch.setattr(Sampler, "_sample_filtered", sample)


def greedy_draws(patch: pytest.MonkeyPatch) -> None:
    whole = Sampler._prepare

    def prepare(self: Sampler, sequences: Any) -> None:
        whole(self, sequences)
        self._greedy_rows = []

    patch.setattr(Sampler, "_prepare", prepare)


def one_stream_of_draws(patch: pytest.MonkeyPatch) -> None:
    """All sequences draw from one generator, so company matters."""
    import random

    shared = random.Random(0)
    whole = Sampler.sample

    def sample(self: Sampler, logits: Any, sequences: Any) -> Any:
        for sequence in sequences:
            sequence.draws = shared
        return whole(self, logits, sequences)

    patch.setattr(Sampler, "sample", sample)


def stop_tokens_ignored(patch: pytest.MonkeyPatch) -> None:
    whole = EngineLoop._reason_to_finish

    def reason(self: EngineLoop, sequence: Any, token: int) -> Any:
        found = whole(self, sequence, token)
        return None if found == "stop" else found

    patch.setattr(EngineLoop, "_reason_to_finish", reason)


def cache_kept_over_updates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineLoop, "restart_caches", lambda self: None)
    whole = ModelRunner.update

    def update(self: ModelRunner, tensors: Any) -> None:
        self.decoder.forget = lambda: None  # type: ignore[method-assign]
        whole(self, tensors)

    patch.setattr(ModelRunner, "update", update)


def updates_answered_but_not_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelRunner, "update", lambda self, tensors: list(tensors))


def pause_does_nothing(patch: pytest.MonkeyPatch) -> None:
    def pause(self: EngineLoop, mode: Any, clear_cache: bool) -> Any:
        return self.between_steps(lambda: None)

    patch.setattr(EngineLoop, "pause", pause)


def long_prompts_are_cut(patch: pytest.MonkeyPatch) -> None:
    def check(self: Any, token_ids: list[int]) -> None:
        del token_ids[self.max_model_len - 1 :]

    patch.setattr(admission.Limits, "check_prompt", check)


def plain_token_names(patch: pytest.MonkeyPatch) -> None:
    class Bare(generate.TokenLogprob):
        def __post_init__(self) -> None:
            self.token = self.token.removeprefix("token_id:")

    patch.setattr(generate, "TokenLogprob", Bare)


@pytest.mark.parametrize(
    ("break_it", "caught_by"),
    [
        (ignores_temperature, "test_logprobs_are_the_modules_own_at_the_sampling_temperature"),
        (scores_before_filtering, "test_logprobs_are_renormalised_over_the_candidates"),
        (greedy_draws, "test_greedy_takes_the_likeliest"),
        (one_stream_of_draws, "test_seeds_decide"),
        (one_stream_of_draws, "test_company_changes_nothing"),
        (stop_tokens_ignored, "test_stop_tokens_and_limits"),
        (cache_kept_over_updates, "test_running_requests_survive_an_update"),
        (updates_answered_but_not_taken, "test_new_weights_are_served_and_old_ones_can_come_back"),
        (pause_does_nothing, "test_pause_keeps_requests_and_resume_ends_them"),
        (long_prompts_are_cut, "test_wrong_requests_get_clear_errors"),
        (plain_token_names, "test_generate_has_the_shape_that_clients_read"),
    ],
)
def test_wrong_engines_are_caught(
    kit_of_toy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    break_it: Callable[[pytest.MonkeyPatch], None],
    caught_by: str,
) -> None:
    break_it(monkeypatch)
    kit = kit_of_toy()
    with kit.serve(tmp_path) as engine:
        assert failures(kit, engine, only=caught_by) == {caught_by}


def test_the_settings_of_the_embedded_engine_are_checked() -> None:
    with pytest.raises(ValueError, match="expected more than max_running"):
        EmbeddedConfig(max_running=64, max_batch_tokens=64)
