"""Rollouts: continuous batching over a paged, prefix-shared KV cache, on the model that is trained."""

from __future__ import annotations

from hetero.engine.engine import Engine
from hetero.engine.generation import Generation
from hetero.engine.params import SamplingParams
from hetero.engine.sequence import Completion, FinishReason, Piece
from hetero.engine.session import Session
from hetero.engine.stats import EngineStats

__all__ = [
    "Completion",
    "Engine",
    "EngineStats",
    "FinishReason",
    "Generation",
    "Piece",
    "SamplingParams",
    "Session",
]
