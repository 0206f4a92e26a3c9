"""The fine-tuning trainer: rows of conversations, cross-entropy on what a model would sample."""

from __future__ import annotations

import logging

from prime_rl.configs.run import SFTConfig
from prime_rl.models.renderers import load_renderer
from prime_rl.trainer.feed import Feed, packed_batches
from prime_rl.trainer.loop import TrainingLoop
from prime_rl.trainer.sft_data import SampleOrder
from prime_rl.trainer.sft_render import Renderer, SampleCache, check_renderer
from prime_rl.trainer.sft_rows import load_rows

log = logging.getLogger(__name__)


class SFTTraining(TrainingLoop):
    """Every step trains on `data.batch_size` samples; one order for all ranks."""

    @property
    def sft_stage(self) -> SFTConfig:
        """The stage, known to be fine-tuning."""
        assert isinstance(self.stage, SFTConfig)
        return self.stage

    def make_feed(self, first_step: int) -> Feed:
        """Rendered and packed samples, from where a resumed run stopped."""
        stage = self.sft_stage
        samples = SampleCache(load_rows(stage.data), self._renderer(), stage.seq_len)
        order = SampleOrder(samples, stage.seed, stage.data.shuffle)
        if self.state.data_state is not None:
            order.restore(self.state.data_state)
        log.info("%d rows from %s", len(samples), stage.data.source)
        batches = packed_batches(
            order,
            first_step,
            stage.max_steps,
            stage.data.batch_size,
            stage.seq_len,
            self.world.rank,
            self.world.size,
        )
        return Feed(batches, self.world.device, stage.trainer.background_batches)

    def _renderer(self) -> Renderer:
        name = self.stage.tokenizer.renderer
        if name == "auto":
            name = self.setup.plugin.renderer
        renderer: Renderer = load_renderer(self._tokenizer_dir(), name)
        check_renderer(renderer)
        return renderer
