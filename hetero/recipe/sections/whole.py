"""All sections together."""

from __future__ import annotations

from hetero.recipe.sections.base import Section
from hetero.recipe.sections.data import DataSection
from hetero.recipe.sections.model import EngineSection, LoraSection, ModelSection
from hetero.recipe.sections.rl import EvalSection, RLSection
from hetero.recipe.sections.train import LogSection, TrainSection


class Sections(Section):
    """The keys of a recipe, each section checked by itself."""

    model: ModelSection
    """The model."""
    lora: LoraSection = LoraSection()
    """The adapter."""
    engine: EngineSection = EngineSection()
    """Generation."""
    data: DataSection
    """The tasks."""
    rl: RLSection
    """Rollouts, rewards, loss."""
    train: TrainSection
    """Optimiser and length of the run."""
    eval: EvalSection = EvalSection()
    """Evaluation on held-out tasks."""
    log: LogSection = LogSection()
    """What is shown and kept."""
