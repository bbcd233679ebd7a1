"""Routed experts that live packed in RAM."""

from hetero.experts.build import ExpertLayout, StoreBuilder
from hetero.experts.imported import import_fp8, import_gguf, import_mxfp4
from hetero.experts.store import ExpertStore

__all__ = ["ExpertLayout", "ExpertStore", "StoreBuilder", "import_fp8", "import_gguf", "import_mxfp4"]
