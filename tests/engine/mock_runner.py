"""A model without weights whose every logit depends on the whole visible context, through a paged store.

It mimics two attention layers over 64-bit integers: what is stored for a token depends on all tokens before
it and on the adapter version. A block that is shared, copied, fetched or evicted wrongly changes what is
drawn.
"""

from __future__ import annotations

import numpy as np
import torch

from hetero.engine import SamplingParams
from hetero.errors import ModelError
from hetero.kernels import ops
from hetero.kernels.batch import KV_BLOCK, AttentionBatch

_RNG = np.random.default_rng(0)
_FIRST, _SECOND = _RNG.integers(0, 2**64, (2, 4096), dtype=np.uint64) | np.uint64(1)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class MockStore:
    """Two "layers" of one 64-bit number per token."""

    bytes_per_block = 2 * KV_BLOCK * 8
    on_gpu = False

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.layers = np.zeros((2, num_blocks, KV_BLOCK), np.uint64)
        self.copied: list[tuple[int, int]] = []

    def copy_block(self, src: int, dst: int) -> None:
        self.layers[:, dst] = self.layers[:, src]
        self.copied.append((src, dst))

    def read_block(self, i: int, out: np.ndarray) -> None:
        out[:] = self.layers[:, i].reshape(-1).view(np.uint8)

    def write_block(self, i: int, data: np.ndarray) -> None:
        self.layers[:, i] = data.view(np.uint64).reshape(2, KV_BLOCK)


class MockRunner:
    """See the module. `bad_token` in the context makes the logits NaN."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        vocab_size: int = 50,
        context_length: int = 1024,
        eos_ids: frozenset[int] = frozenset(),
        bad_token: int = -1,
        flat: bool = False,
    ) -> None:
        self.store = MockStore(num_blocks)
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.eos_ids = eos_ids
        self.bad_token = bad_token
        self.flat = flat
        self.weights = "mock"
        self.version = 0
        self.kept: list[int] = []  # versions in memory besides the current one
        self.runs: list[list[tuple[str, int]]] = []  # of each forward
        self.base = False
        self.num_tokens: list[int] = []  # of each forward
        self.num_segments: list[int] = []
        self.fail_at = -1  # forward that raises

    def namespace(self, version: int | None = None) -> str:
        if version is None:
            return "base" if self.base else f"policy:{self.version}"
        if f"policy:{version}" not in self.resident():
            raise ModelError(f"version {version} is not in memory")
        return f"policy:{version}"

    def resident(self) -> set[str]:
        return {"base", *(f"policy:{version}" for version in (*self.kept, self.version))}

    def fingerprint(self, name: str | None = None) -> dict[str, str]:
        name = self.namespace() if name is None else name
        assert name in self.resident()
        return {"weights": self.weights, "adapter": "" if name == "base" else name.removeprefix("policy:")}

    def versions(self) -> list[int]:
        return [*self.kept, self.version]

    def adapter_version(self) -> int:
        return self.version

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        runs: list[tuple[str, int]],
    ) -> torch.Tensor:
        if len(self.num_tokens) == self.fail_at:
            raise RuntimeError("the machine is on fire")
        self.num_tokens.append(len(token_ids))
        self.runs.append(runs)
        names = [name for name, rows in runs for _ in range(rows)]
        assert len(names) == len(token_ids)
        assert {*names} <= self.resident()
        self.num_segments.append(attention.num_segments)
        tokens, places = token_ids.numpy(), positions.numpy()
        self.last = tokens.copy(), places.copy()
        slots, tables = attention.slots.numpy(), attention.block_tables.numpy()
        assert len(set(slots.tolist())) == len(slots), "two tokens written to one place"
        flat = self.store.layers.reshape(2, -1)
        flat[0, slots] = self.contribution(tokens, places)
        hidden = np.zeros((len(tokens), 2), np.uint64)
        for layer in (0, 1):
            for s in range(attention.num_segments):
                rows = slice(int(attention.q_start[s]), int(attention.q_start[s + 1]))
                num_visible = int(attention.kv_len[s])
                assert places[rows].tolist() == list(
                    range(num_visible - (rows.stop - rows.start), num_visible)
                )
                table = tables[s, : -(-num_visible // KV_BLOCK)]
                where = (table[:, None] * KV_BLOCK + np.arange(KV_BLOCK)).reshape(-1)[:num_visible]
                assert slots[rows].tolist() == where[places[rows]].tolist()
                if layer == 0:
                    assert len({*names[rows]}) == 1
                    context = self.context(flat[0, where], names[rows.start])
                    flat[1, slots[rows]] = context[places[rows]]
                else:
                    hidden[rows] = self.final(flat[0, where], flat[1, where])[places[rows]]
        return torch.from_numpy(hidden.view(np.int64))

    def routes(self, rows: list[int]) -> np.ndarray:
        """[R, 2, 3], telling which token at which position computed a row."""
        tokens, places = (values[rows] for values in self.last)
        return np.stack([np.stack([tokens, places % 256, tokens], -1)] * 2, 1).astype(np.uint8)

    def contribution(self, tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
        bad = np.where(tokens == self.bad_token, np.uint64(1) << np.uint64(62), np.uint64(0))
        return ((tokens.astype(np.uint64) + np.uint64(1)) * (_FIRST[places] >> np.uint64(8))) % (
            1 << 62
        ) | bad

    def context(self, first: np.ndarray, name: str) -> np.ndarray:
        salt = 0 if name == "base" else 1 + int(name.removeprefix("policy:"))
        return _mix(np.cumsum(first, dtype=np.uint64) + np.uint64(salt))

    def final(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        state = _mix(np.cumsum(second * _SECOND[: len(second)], dtype=np.uint64))
        return np.stack([state, np.cumsum(first >> np.uint64(62), dtype=np.uint64)], axis=-1)

    def logits(self, hidden: torch.Tensor, runs: list[tuple[str, int]] = ()) -> torch.Tensor:
        assert sum(rows for _, rows in runs) == len(hidden) or not runs
        rows = hidden.numpy().view(np.uint64)
        noise = _mix(rows[:, :1] + _SECOND[None, : self.vocab_size])
        logits = (noise >> np.uint64(40)).astype(np.float32) * np.float32(4.0 / (1 << 24))
        logits[rows[:, 1] > 0] = np.nan
        return torch.from_numpy(np.zeros_like(logits) if self.flat else logits)

    def expect(
        self,
        prompt: list[int],
        params: SamplingParams,
        stream: tuple[int, int],
        seed: int = 0,
        version: int | None = None,
    ) -> tuple[list[int], list[float]]:
        """What must be drawn: the whole context computed anew for every token, no pages, no batch."""
        name = self.namespace(version)
        tokens, logprobs = list(prompt), []
        while len(tokens) < min(len(prompt) + params.max_tokens, self.context_length):
            first = self.contribution(np.array(tokens), np.arange(len(tokens)))
            hidden = self.final(first, self.context(first, name))[-1:]
            key = (params.seed if params.seed is not None else seed, *stream, len(tokens))
            ids, logp, _ = ops.sample(
                self.logits(torch.from_numpy(hidden.view(np.int64))),
                torch.tensor([params.temperature], dtype=torch.float32),
                torch.tensor([params.top_p], dtype=torch.float32),
                torch.tensor([params.top_k]),
                torch.tensor([params.min_p], dtype=torch.float32),
                torch.from_numpy(np.array([key], np.uint64)),
            )
            tokens.append(int(ids[0]))
            logprobs.append(float(logp[0]))
            if tokens[-1] in params.stop_ids or (tokens[-1] in self.eos_ids and not params.ignore_eos):
                break
        return tokens[len(prompt) :], logprobs
