"""The RL trainer: pulls batches, publishes every version, annotates the episodes."""

from __future__ import annotations

from collections.abc import Iterable

from prime_rl.api import NamedTensor, WeightTransport
from prime_rl.batches.opening import open_batch_client
from prime_rl.configs.run import RLConfig
from prime_rl.models.served import check_served, iter_served
from prime_rl.traces.annotations import AnnotationWriter
from prime_rl.trainer.annotate import Annotator
from prime_rl.trainer.feed import Feed, pulled_batches
from prime_rl.trainer.loop import TrainingLoop
from prime_rl.trainer.publish import Publisher
from prime_rl.trainer.step import StepResult


class RLTraining(TrainingLoop):
    """Step n trains on batch n and publishes version n; version 0 is what the stage started from."""

    keeps_traces = True
    annotator: Annotator | None = None

    def before_loop(self) -> None:
        """Publish the version that batches of the first step are generated with: 0, or N after a
        resume at N."""
        self.publisher = self._open_publisher()
        if self.rl_stage.orchestrator.save_episodes:
            producer = f"trainer_{self.world.rank}"
            self.annotator = Annotator(AnnotationWriter(self.paths.traces, producer))
        self._publish(self.resumed_after)

    @property
    def rl_stage(self) -> RLConfig:
        """The stage, known to be RL."""
        assert isinstance(self.stage, RLConfig)
        return self.stage

    def make_feed(self, first_step: int) -> Feed:
        """Batches of this rank from the orchestrator."""
        stage = self.rl_stage
        client = open_batch_client(stage.orchestrator.batch_transport, self.paths, self.world.rank)
        batches = pulled_batches(
            client, first_step, stage.max_steps, stage.weight_broadcast_timeout_s
        )
        trainer = stage.trainer
        return Feed(
            batches, self.world.device, trainer.background_batches, trainer.enable_router_replay
        )

    def after_step(self, step: int, result: StepResult) -> dict[str, float]:
        """Publish version `step`, the last one included, then annotate beside the next step."""
        seconds = self._publish(step)
        if self.annotator is not None:
            self.annotator.add(step, result.traces)
        return {"time/broadcast_weights": seconds}

    def before_checkpoint(self) -> None:
        """A resumed run does not annotate the steps before its checkpoint again."""
        if self.annotator is not None:
            self.annotator.flush()

    def _open_publisher(self) -> Publisher:
        section = self.rl_stage.weight_broadcast
        if self.rl_stage.weight_rounding != "nearest":
            check_served(self.policy.model, self.setup.layout)
        transport = self.registry.load("weight_transport", section.type)(section)
        assert isinstance(transport, WeightTransport)
        return Publisher(
            transport,
            self.paths.broadcasts,
            self.rl_stage.weight_broadcast_timeout_s,
            self.world,
            self._published_weights,
        )

    def _published_weights(self, version: int) -> Iterable[NamedTensor]:
        """The weights of a version as engines get them; a collective."""
        if self.rl_stage.weight_rounding == "nearest":
            return self.weights()
        seed = self.stage.seed
        return iter_served(self.policy.model, self.setup.layout, self.dtype, seed, version)

    def _publish(self, version: int) -> float:
        seconds = self.publisher.publish(version)
        if self.world.is_master:
            self.hooks.tell("weight_update", version=version, seconds=seconds, role="trainer")
        return seconds

    def run(self) -> None:
        """See TrainingLoop.run."""
        try:
            super().run()
        finally:
            if hasattr(self, "publisher"):
                self.publisher.close()
            if self.annotator is not None:
                self.annotator.close()
