"""Training: samples packed into shared-prefix batches, losses, the trainer, its optimizer and checkpoints."""

from hetero.train.batch import TrainSample
from hetero.train.checkpoint import latest_checkpoint, prune_checkpoints, write_checkpoint
from hetero.train.correction import Correction
from hetero.train.losses import LOSSES, LossConfig
from hetero.train.trainer import Trainer

__all__ = [
    "LOSSES",
    "Correction",
    "LossConfig",
    "TrainSample",
    "Trainer",
    "latest_checkpoint",
    "prune_checkpoints",
    "write_checkpoint",
]
