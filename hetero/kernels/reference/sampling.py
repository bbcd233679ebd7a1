"""Log-probabilities and sampling in plain Python and PyTorch: the oracle of the tests."""

from __future__ import annotations

import torch

_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1


def philox(counter: tuple[int, int], key: int) -> tuple[int, int]:
    """Philox 4x32-10 (Salmon et al., SC 2011): 128-bit counter (low, high) and 64-bit key to 128 bits."""
    c = [counter[0] & _MASK32, counter[0] >> 32, counter[1] & _MASK32, counter[1] >> 32]
    k0, k1 = key & _MASK32, key >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & _MASK32, (p0 >> 32) ^ c[3] ^ k1, p0 & _MASK32]
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c[0] | c[1] << 32, c[2] | c[3] << 32


def uniform(seed: int, task: int, sample: int, position: int) -> float:
    """The random number in (0, 1) of one token: two rounds of Philox, so that all four 64-bit words count."""
    low, high = philox((task & _MASK64, sample & _MASK64), seed & _MASK64)
    bits, _ = philox((position & _MASK64, high), low)
    return float((bits >> 12) + 0.5) * 2.0**-52


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float | torch.Tensor = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability of each target, entropy) of softmax(logits / temperature), both [T]; logits [T, V]."""
    scale = torch.as_tensor(temperature, dtype=logits.dtype).reshape(-1, 1)
    logp = torch.log_softmax(logits / scale, dim=-1)
    entropy = -(logp.exp() * logp.clamp(min=-1e30)).sum(-1)
    return logp.gather(-1, targets[:, None])[:, 0], entropy


def allowed(logits: torch.Tensor, temperature: float, top_p: float, top_k: int, min_p: float) -> torch.Tensor:
    """Which tokens of one row [V] may be sampled: bool [V].

    Order: temperature, top-k, top-p over what top-k left, min-p against the most likely token. Ties go to
    the lower id.
    """
    x = logits.double()
    keep = torch.zeros(x.numel(), dtype=torch.bool)
    order = torch.sort(x, descending=True, stable=True).indices
    if temperature == 0.0:
        keep[order[0]] = True
        return keep
    if top_k > 0:
        order = order[:top_k]
    p = torch.softmax(x[order] / temperature, dim=-1)
    if top_p < 1.0:
        num_kept = int((p.cumsum(0) < top_p).sum()) + 1
        order, p = order[:num_kept], p[:num_kept]
    keep[order[p >= min_p * p[0]]] = True
    return keep


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token per row by inverse CDF in vocabulary order. Arguments: see `hetero.kernels.ops.sample`."""
    ids, logps, raws = [], [], []
    for b in range(logits.shape[0]):
        x, t = logits[b].double(), float(temperature[b])
        if torch.isnan(x).any() or x.max().isinf():
            ids.append(-1)
            logps.append(float("nan"))
            raws.append(float("nan"))
            continue
        keep = allowed(x, t, float(top_p[b]), int(top_k[b]), float(min_p[b]))
        scaled = x / (t if t > 0.0 else 1.0)
        kept = torch.log_softmax(scaled.masked_fill(~keep, float("-inf")), dim=-1)
        words = [int(w) & _MASK64 for w in keys[b].tolist()]
        token = int((kept.exp().cumsum(0) <= uniform(*words)).sum())
        token = min(token, int(keep.nonzero()[-1]))
        ids.append(token)
        logps.append(float(kept[token]))
        raws.append(float(torch.log_softmax(scaled, dim=-1)[token]))
    return torch.tensor(ids), torch.tensor(logps), torch.tensor(raws)
