"""The peer: llama.cpp, its own graph of one layer of experts over the same weights in its own formats."""

from __future__ import annotations

import ctypes

import torch

from hetero.bench.ggml import BF16, F32, I32, MXFP4, Q4_0, Q8_0, Ggml
from hetero.bench.moe_check import Expected, Inputs
from hetero.bench.moe_layers import Weights
from hetero.bench.timing import check
from hetero.errors import ArgumentError

KINDS = {"bf16": (BF16, False), "int8": (Q8_0, False), "int4": (Q4_0, True), "mxfp4": (MXFP4, True)}
"""Our format -> its type, and whether it lays that type out anew for x86."""
TOLERANCES = {"bf16": 0.05, "int8": 0.05, "int4": 0.3, "mxfp4": 0.3}
"""Of a row, against the weights as we hold them: its scales differ, and it rounds rows to 8 bits."""


class Experts:
    """gate, up, activation, down and the weighted sum, node by node as llama.cpp builds them."""

    PAUSE = 0.1
    """Seconds after which OpenMP's waiting threads have gone to sleep."""

    def __init__(self, weights: Weights, copies: int, format: str, threads: int, most_tokens: int) -> None:
        self.ggml = ggml = Ggml()
        if format not in KINDS:
            raise ArgumentError(
                f"--format {format} has no counterpart in llama.cpp; compare {', '.join(KINDS)}"
            )
        if weights.shape.activation != "silu" or weights.shape.bias:
            raise ArgumentError("llama.cpp's side computes experts with silu and without biases here")
        self.format, self.shape = format, weights.shape
        self.backend = ggml.backend_cpu_init()
        ggml.backend_cpu_set_n_threads(self.backend, threads)
        plain = ggml.backend_get_default_buffer_type(self.backend)
        self.working_memory = ggml.gallocr_new(plain)
        self.kind, repack = KINDS[format]
        self.buffer_type = ggml.repacked() if repack else plain
        gate, up = weights.gate_up.chunk(2, dim=1)
        coded = [self._code(stack) for stack in (gate, up, weights.down)]
        self.layers = [self._layer(coded) for _ in range(copies)]
        self.graphs: dict[tuple[int, int], _Graph] = {}

    def _code(self, stack: torch.Tensor) -> tuple[tuple[int, int, int], torch.Tensor]:
        """A stack [E, N, K] as bytes of its type, matrix by matrix."""
        e, n, k = stack.shape
        size = n * self.ggml.row_size(self.kind, k)
        coded = torch.empty(e, size, dtype=torch.uint8)
        for matrix, target in zip(stack, coded, strict=True):
            values = matrix.float().contiguous()
            pointers = (values.data_ptr(), target.data_ptr())
            self.ggml.quantize_chunk(self.kind, *pointers, 0, n, k, None)
        return (e, n, k), coded

    def _layer(self, coded: list[tuple[tuple[int, int, int], torch.Tensor]]) -> list[int]:
        context = self.ggml.context()
        tensors = [self.ggml.new_tensor_3d(context, self.kind, k, n, e) for (e, n, k), _ in coded]
        self.ggml.backend_alloc_ctx_tensors_from_buft(context, self.buffer_type)
        for tensor, (_, values) in zip(tensors, coded, strict=True):
            self.ggml.backend_tensor_set(tensor, values.data_ptr(), 0, values.numel())
        return tensors

    def run(self, inputs: Inputs, copy: int) -> torch.Tensor:
        tokens = inputs.x.shape[0]
        graph = self.graphs.get((tokens, copy))
        if graph is None:
            graph = _Graph(self.ggml, self.layers[copy], tokens, self.shape.top_k, self.shape.hidden)
            self.graphs[tokens, copy] = graph
        self.ggml.gallocr_alloc_graph(self.working_memory, graph.graph)
        graph.put(inputs)
        if self.ggml.backend_graph_compute(self.backend, graph.graph):
            raise RuntimeError("llama.cpp could not compute its graph")
        return graph.get()

    def check(self, inputs: Inputs, expected: Expected) -> None:
        """The peer must compute the same layer. Raises WrongResultError."""
        out = self.run(inputs, 0)[expected.rows]
        check("llama.cpp's own output", out, expected.out, tolerance=TOLERANCES[self.format])


class _Graph:
    """One layer for a number of tokens: x, ids and weights in, the sum over the token's experts out."""

    def __init__(self, ggml: Ggml, layer: list[int], tokens: int, top_k: int, hidden: int) -> None:
        self.ggml, self.size = ggml, (tokens, hidden)
        context = ggml.context()
        gate, up, down = layer
        self.x = ggml.new_tensor_3d(context, F32, hidden, 1, tokens)
        self.ids = ggml.new_tensor_2d(context, I32, top_k, tokens)
        self.weights = ggml.new_tensor_3d(context, F32, 1, top_k, tokens)
        for tensor in (self.x, self.ids, self.weights):
            ggml.set_input(tensor)
        h_up = ggml.mul_mat_id(context, up, self.x, self.ids)
        h_gate = ggml.mul_mat_id(context, gate, self.x, self.ids)
        h = ggml.swiglu_split(context, h_gate, h_up)
        each = ggml.mul(context, ggml.mul_mat_id(context, down, h, self.ids), self.weights)
        row = 4 * hidden
        parts = [ggml.view_2d(context, each, hidden, tokens, top_k * row, i * row) for i in range(top_k)]
        self.out = parts[0]
        for part in parts[1:]:
            self.out = ggml.add(context, self.out, part)
        ggml.set_output(self.out)
        self.graph = ggml.new_graph(context)
        ggml.build_forward_expand(self.graph, self.out)

    def put(self, inputs: Inputs) -> None:
        for tensor, values in (
            (self.x, inputs.x.float()),
            (self.ids, inputs.ids.int()),
            (self.weights, inputs.weights.contiguous()),
        ):
            self.ggml.backend_tensor_set(tensor, values.data_ptr(), 0, values.nbytes)

    def get(self) -> torch.Tensor:
        out = torch.empty(self.size, dtype=torch.float32)
        self.ggml.backend_tensor_get(self.out, ctypes.c_void_p(out.data_ptr()), 0, out.nbytes)
        return out
