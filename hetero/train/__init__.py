"""Training: samples packed into shared-prefix batches, losses, the trainer, its optimizer and checkpoints."""
