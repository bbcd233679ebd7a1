from torch import Tensor

class Context:
    def __init__(self, num_threads: int = 0, isa: str = "", num_nodes: int = 0) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def isa(self) -> str: ...

def isas() -> list[tuple[str, bool, bool]]: ...
def kernels() -> list[str]: ...
def usable_cores() -> int: ...

# Tensors go by address (Tensor.data_ptr()); `bf16` tells bfloat16 from float32.
class Norm:
    def __init__(
        self, n: int, eps: float, offset: float, round_first: bool, x_bf16: bool, weight_bf16: bool
    ) -> None: ...

class Gate:
    def __init__(self, kind: int, clamp: bool, limit: float, alpha: float) -> None: ...

def rms_norm(c: Context, norm: Norm, x: int, weight: int, y: int, rows: int) -> None: ...
def rms_norm_backward(c: Context, norm: Norm, x: int, weight: int, dy: int, dx: int, rows: int) -> None: ...
def activate(c: Context, kind: int, x: int, y: int, n: int, bf16: bool) -> None: ...
def activate_backward(c: Context, kind: int, x: int, dy: int, dx: int, n: int, bf16: bool) -> None: ...
def gate(c: Context, kind: Gate, gate: int, up: int, y: int, n: int, bf16: bool) -> None: ...
def gate_backward(
    c: Context, kind: Gate, gate: int, up: int, dy: int, dgate: int, dup: int, n: int, bf16: bool
) -> None: ...
def softmax(c: Context, x: int, y: int, rows: int, n: int, bf16: bool) -> None: ...
def softmax_backward(c: Context, y: int, dy: int, dx: int, rows: int, n: int, bf16: bool) -> None: ...
def topk(c: Context, x: int, ids: int, rows: int, n: int, k: int) -> None: ...

# These take tensors themselves: contiguous, on the CPU; packed weights are flat.
def pack(context: Context, weight: Tensor, packed: Tensor) -> None: ...
def unpack(context: Context, packed: Tensor, weight: Tensor) -> None: ...

class Format:
    def __init__(self, name: str, group: int = 0) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def group(self) -> int: ...
    def panel_bytes(self, k_pad: int) -> int: ...

def formats() -> list[str]: ...
def quantize(
    context: Context, format: Format, weight: Tensor, least_squares: bool, packed: Tensor
) -> None: ...
def pack_codes(
    context: Context,
    format: Format,
    codes: Tensor,
    scales: Tensor,
    minima: Tensor | None,
    scale_rows: int,
    packed: Tensor,
) -> None: ...
def dequantize(context: Context, format: Format, packed: Tensor, weight: Tensor) -> None: ...
def linear(
    context: Context,
    x: Tensor,
    weight: Tensor,
    format: Format | None,
    bias: Tensor | None,
    lora_a: list[Tensor | None],
    lora_b: list[Tensor | None],
    ends: list[int],
    xa: Tensor | None,
    rank: int,
    scale: float,
    out: Tensor,
) -> None: ...
def linear_backward(
    context: Context,
    dout: Tensor,
    weight: Tensor,
    format: Format | None,
    x: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    xa: Tensor | None,
    rank: int,
    scale: float,
    dx: Tensor | None,
    da: Tensor | None,
    db: Tensor | None,
) -> None: ...

class HeadRows:
    def __init__(self, data: int, row_stride: int, head_stride: int) -> None: ...

class AttentionShape:
    def __init__(
        self, tokens: int, kv_tokens: int, heads: int, kv_heads: int, dim: int, v_dim: int
    ) -> None: ...

class AttentionParams:
    def __init__(self, scale: float, window: int, softcap: float, sinks: int) -> None: ...

class Segments:
    def __init__(self, count: int, q_start: int, kv_len: int) -> None: ...

def attention(
    c: Context,
    shape: AttentionShape,
    q: HeadRows,
    k: HeadRows,
    v: HeadRows,
    segments: Segments,
    kv_rows: int,
    kv_start: int,
    num_rows: int,
    params: AttentionParams,
    out: int,
    lse: int,
) -> None: ...
def attention_backward(
    c: Context,
    shape: AttentionShape,
    q: HeadRows,
    k: HeadRows,
    v: HeadRows,
    out: int,
    lse: int,
    dout: HeadRows,
    segments: Segments,
    kv_rows: int,
    kv_start: int,
    params: AttentionParams,
    dq: int,
    dk: int,
    dv: int,
) -> None: ...
def paged_attention(
    c: Context,
    shape: AttentionShape,
    q: HeadRows,
    segments: Segments,
    k_pool: int,
    v_pool: int,
    num_blocks: int,
    tables: int,
    stride: int,
    params: AttentionParams,
    out: int,
) -> None: ...
def write_kv(
    c: Context,
    shape: AttentionShape,
    k: HeadRows,
    v: HeadRows,
    slots: int,
    k_pool: int,
    v_pool: int,
    num_blocks: int,
) -> None: ...

class Experts:
    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        gate_up: Tensor,
        down: Tensor,
        gate_up_format: Format | None,
        down_format: Format | None,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        gate: Gate,
    ) -> None: ...

class ExpertLora:
    def __init__(
        self,
        experts: Experts,
        gate_up_a: Tensor | None,
        gate_up_b: Tensor | None,
        down_a: Tensor | None,
        down_b: Tensor | None,
        gate_up_rank: int,
        down_rank: int,
        shared_gate_up_a: bool,
        shared_down_b: bool,
        scale: float,
    ) -> None: ...

class SavedExperts:
    @property
    def num_tokens(self) -> int: ...
    @property
    def top_k(self) -> int: ...

def experts_forward(
    context: Context,
    experts: Experts,
    loras: list[ExpertLora | None],
    ends: list[int],
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    out: Tensor,
    save: bool,
    keep_pre: bool,
) -> SavedExperts | None: ...
def experts_backward(
    context: Context,
    saved: SavedExperts,
    experts: Experts,
    lora: ExpertLora | None,
    x: Tensor,
    dout: Tensor,
    dx: Tensor | None,
    dweights: Tensor | None,
    gate_a: Tensor | None,
    gate_b: Tensor | None,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
) -> None: ...
def cap_logits(c: Context, x: int, rows: int, n: int, factor: float, softcap: float) -> None: ...
def token_logprobs(
    c: Context,
    logits: int,
    targets: int,
    temperature: int,
    rows: int,
    n: int,
    logp: int,
    entropy: int,
    max: int,
    inverse_total: int,
) -> None: ...
def token_logprobs_backward(
    c: Context,
    logits: int,
    targets: int,
    temperature: int,
    rows: int,
    n: int,
    max: int,
    inverse_total: int,
    gradient: int,
    factor: float,
    softcap: float,
    dlogits: int,
) -> None: ...
def sample(
    c: Context,
    logits: int,
    rows: int,
    n: int,
    temperature: int,
    top_p: int,
    top_k: int,
    min_p: int,
    keys: int,
    ids: int,
    logp: int,
    raw: int,
) -> None: ...
def read_stream(context: Context, data: Tensor) -> int: ...
def run_multiply_adds(context: Context, rounds: int) -> float: ...
