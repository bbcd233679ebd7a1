"""The part of ggml's C interface that one layer of experts needs, from the library of llama-cpp-python."""

from __future__ import annotations

import ctypes
import importlib
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from typing import Any

from hetero.errors import UnavailableError

INSTALL = (
    'CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON" pip install '
    "--no-binary llama-cpp-python llama-cpp-python (keep the AVX-512 options that this processor has)"
)
F32, Q4_0, Q8_0, I32, BF16, MXFP4 = 0, 2, 8, 26, 30, 39
"""Types of tensors, by ggml's own numbers."""

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead": (c_size_t,),
    "ggml_row_size": (c_size_t, c_int, c_int64),
    "ggml_new_tensor_2d": (c_void_p, c_void_p, c_int, c_int64, c_int64),
    "ggml_new_tensor_3d": (c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64),
    "ggml_mul_mat_id": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_swiglu_split": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_mul": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_add": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_view_2d": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_size_t, c_size_t),
    "ggml_set_input": (None, c_void_p),
    "ggml_set_output": (None, c_void_p),
    "ggml_new_graph": (c_void_p, c_void_p),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_quantize_chunk": (c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_cpu_reg": (c_void_p,),
    "ggml_backend_reg_dev_get": (c_void_p, c_void_p, c_size_t),
    "ggml_backend_reg_get_proc_address": (c_void_p, c_void_p, c_char_p),
    "ggml_backend_get_default_buffer_type": (c_void_p, c_void_p),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, c_void_p, c_void_p),
    "ggml_backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_tensor_get": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_gallocr_new": (c_void_p, c_void_p),
    "ggml_gallocr_alloc_graph": (c_bool, c_void_p, c_void_p),
}


class _InitParams(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("buffer", c_void_p), ("no_alloc", c_bool)]


class Ggml:
    """Its functions by name, without the "ggml_" in front. Raises UnavailableError if it is missing."""

    def __init__(self) -> None:
        try:
            self._library = importlib.import_module("llama_cpp.llama_cpp")._lib
        except (ImportError, RuntimeError) as error:  # RuntimeError: its library is missing
            raise UnavailableError(
                f"--against llama.cpp needs llama-cpp-python, which cannot be imported ({error}): {INSTALL}"
            ) from None
        self._library.ggml_init.restype, self._library.ggml_init.argtypes = c_void_p, [_InitParams]
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, f"ggml_{name}")

    def context(self) -> int:
        """Room for the descriptions of some hundred tensors and a graph of them."""
        size = 512 * self.tensor_overhead() + self.graph_overhead()
        return int(self._library.ggml_init(_InitParams(size, None, True)))

    def repacked(self) -> int:
        """The buffer type whose weights are laid out anew for the processor's vectors."""
        registry = self.backend_cpu_reg()
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        types = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(address)(
            self.backend_reg_dev_get(registry, 0)
        )
        if not types or not types[0]:
            raise UnavailableError(f"this build of llama.cpp cannot repack weights; build it anew: {INSTALL}")
        return int(types[0])
