"""Routed experts that live packed in RAM."""

from hetero.experts.build import ExpertLayout, StoreBuilder
from hetero.experts.store import ExpertStore

__all__ = ["ExpertLayout", "ExpertStore", "StoreBuilder"]
