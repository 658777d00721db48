"""The network, bottom-up: norms, position, attention, MLP, block, GPT. Every part with its formula.

Shapes: B batch, T time (tokens of a row), C = d_model, H heads, D = head_dim = C / H, F = d_ff, V vocabulary.
The formulas write x W with W (in, out); nn.Linear stores the transpose (out, in).

To add a part: write its class, put it in the dictionary of its kind, and add its name in config.py.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from config import ModelConfig

LOGITS_AT_ONCE = 1 << 25  # whose loss is computed together: 128 MB in float32

# ---------------------------------------------------------------------------------------------------------------------
# Norms: over the components of one token, so that tokens and batch rows do not touch each other


class RMSNorm(nn.Module):
    """γ · x / √(mean(x²) + ε), a gain γ per component (Zhang & Sennrich 2019, eq. 4; ε inside the root).

    (..., dim) → (..., dim)
    """

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.type_as(x), self.eps)


def _rmsnorm(config: ModelConfig) -> nn.Module:
    return RMSNorm(config.d_model, config.norm_eps)


def _layernorm(config: ModelConfig) -> nn.Module:
    """γ · (x − μ) / √(σ² + ε) + β (Ba et al. 2016, eq. 3 and 4)."""
    return nn.LayerNorm(config.d_model, config.norm_eps, bias=config.bias)


NORMS = {"rmsnorm": _rmsnorm, "layernorm": _layernorm}

# ---------------------------------------------------------------------------------------------------------------------
# Position: attention alone cannot tell the order of its keys. What is added to the token embedding, by name; rope
# turns queries and keys inside attention instead


class Sinusoidal(nn.Module):
    """PE(t, 2i) = sin(t / 10000^(2i/C)), PE(t, 2i+1) = cos(same) (Vaswani et al. 2017, section 3.5). (T,) → (T, C)"""

    table: Tensor

    def __init__(self, block_size: int, d_model: int):
        super().__init__()
        rate = 10000.0 ** (-torch.arange(0, d_model, 2).float() / d_model)  # (C/2,)
        angle = torch.outer(torch.arange(block_size).float(), rate)  # (block_size, C/2)
        table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)  # (block_size, C)
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        return self.table[positions]


class NoPosition(nn.Module):
    """Nothing is added to the token embedding."""

    def __init__(self, block_size: int, d_model: int):
        super().__init__()

    def forward(self, positions: Tensor) -> float:
        return 0.0


POSITIONS: dict[str, type[nn.Module]] = {
    "learned": nn.Embedding,
    "sinusoidal": Sinusoidal,
    "rope": NoPosition,
    "none": NoPosition,
}


class Rotary(nn.Module):
    """Turn component pairs (i, i + D/2) by t · 10000^(−2i/D): q·k then depends on the distance of two tokens alone.

    (Su et al. 2021, section 3.2.2, in the half-split arrangement of GPT-NeoX and LLaMA.) (B, H, T, D) → (B, H, T, D)
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, block_size: int, head_dim: int):
        super().__init__()
        rate = 10000.0 ** (-torch.arange(0, head_dim, 2).float() / head_dim)  # (D/2,)
        angle = torch.outer(torch.arange(block_size).float(), rate)  # (block_size, D/2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor, start: int) -> Tensor:
        end = start + x.size(-2)
        cos, sin = self.cos[start:end], self.sin[start:end]  # (T, D/2)
        a, b = x.chunk(2, dim=-1)  # 2 × (B, H, T, D/2); the products promote bfloat16 to the tables' float32
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


# ---------------------------------------------------------------------------------------------------------------------
# Attention: the only place where tokens exchange information


def sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for tiny matrices, in steps that torch.compile fuses with what stands around them."""
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(dim=-2)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, matmul: Callable[[Tensor, Tensor], Tensor] = torch.matmul
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ / √D) v, written out (Vaswani et al. 2017, eq. 1): to read, to test with, to look at the weights.

    q (..., T, D); k and v (..., S, D), S ≥ T, the queries being the last T of S positions. Returns the output
    (..., T, D) and the weights (..., T, S), whose rows sum to one over the keys; causal: none of them is ahead.
    """
    T, S = q.size(-2), k.size(-2)
    scores = matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))  # (..., T, S); √D brings their variance back to 1
    if causal:
        seen = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        scores = scores.masked_fill(~seen, float("-inf"))
    weights = scores.softmax(dim=-1)
    return matmul(weights, v), weights


class KVCache:
    """The keys and values of one layer for the tokens so far, with room for block_size of them."""

    def __init__(self) -> None:
        self.length = 0
        self.keys = self.values = torch.empty(0)

    def append(self, k: Tensor, v: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """Add (B, H, T, D) keys and values; returns those of all tokens so far, (B, H, S, D)."""
        if self.length == 0:
            B, H, _, D = k.shape
            self.keys, self.values = k.new_empty(B, H, room, D), v.new_empty(B, H, room, D)
        start, self.length = self.length, self.length + k.size(2)
        self.keys[:, :, start : self.length] = k
        self.values[:, :, start : self.length] = v
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows of the batch alone, a mask (B,)."""
        self.keys, self.values = self.keys[rows], self.values[rows]


class CausalSelfAttention(nn.Module):
    """q, k, v = x W_q, x W_k, x W_v; each of H heads attends in its D components; the heads joined, times W_o.

    (Vaswani et al. 2017, section 3.2.2.) `qkv` holds W_q, W_k and W_v side by side, `proj` is W_o. Each head's
    columns read all C components of x: heads split the result, they do not restrict the projections.
    (B, T, C) → (B, T, C)
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, D = config.d_model, config.head_dim
        self.n_heads, self.block_size, self.dropout = config.n_heads, config.block_size, config.dropout
        self.qkv = nn.Linear(C, 3 * C, bias=config.bias)
        self.proj = nn.Linear(C, C, bias=config.bias)
        self.q_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else nn.Identity()
        self.rotary = Rotary(config.block_size, D) if config.position == "rope" else None

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)  # 3 × (B, H, T, D)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            start = cache.length if cache is not None else 0
            q, k = self.rotary(q, start), self.rotary(k, start)
        if cache is not None:
            k, v = cache.append(k, v.type_as(k), self.block_size)  # (B, H, S, D)
        S = k.size(2)
        # with cached keys `is_causal` would align the mask top-left, so that a new query saw the oldest keys only
        mask = None if T in (1, S) else torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        dropout = self.dropout if self.training else 0.0  # the functional form does not know about eval()
        if torch.compiler.is_compiling() and S <= 16 and q.is_cpu and not dropout:
            y, _ = attention(q, k, v, matmul=sum_of_products)  # compiled, four times as fast as the kernel for so few
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=T == S)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads joined again
        return F.dropout(self.proj(y), self.dropout, self.training)


# ---------------------------------------------------------------------------------------------------------------------
# MLP: every token on its own


def relu2(x: Tensor) -> Tensor:
    """relu(x)² (So et al. 2021, Primer, section 4)."""
    r = F.relu(x)
    return r * r  # the gradient of a power takes longer


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": relu2,
}


class MLP(nn.Module):
    """f(x W₁) W₂, C → F → C (Vaswani et al. 2017, section 3.3). (B, T, C) → (B, T, C)"""

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.d_ff is not None  # resolved by ModelConfig
        self.fc = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.proj = nn.Linear(config.d_ff, config.d_model, bias=config.bias)
        self.activation = ACTIVATIONS[config.mlp]
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.proj(self.activation(self.fc(x))), self.dropout, self.training)


class SwiGLU(nn.Module):
    """(silu(x W) ⊙ x V) W₂ (Shazeer 2020, eq. 6); `fc` holds W and V side by side. (B, T, C) → (B, T, C)"""

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.d_ff is not None
        self.fc = nn.Linear(config.d_model, 2 * config.d_ff, bias=config.bias)
        self.proj = nn.Linear(config.d_ff, config.d_model, bias=config.bias)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc(x).chunk(2, dim=-1)  # 2 × (B, T, F)
        return F.dropout(self.proj(F.silu(gate) * value), self.dropout, self.training)


MLPS: dict[str, type[nn.Module]] = {**dict.fromkeys(ACTIVATIONS, MLP), "swiglu": SwiGLU}

# ---------------------------------------------------------------------------------------------------------------------
# Block: attention, then MLP, each added to the residual stream


class Block(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x)): the stream itself is never normalised (Xiong et al. 2020, fig. 1b)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm1 = NORMS[config.norm](config)
        self.attn = CausalSelfAttention(config)
        self.norm2 = NORMS[config.norm](config)
        self.mlp = MLPS[config.mlp](config)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), cache)
        return x + self.mlp(self.norm2(x))


class PostNormBlock(Block):
    """norm(x + attn(x)), then norm(x + mlp(x)), as in the first Transformer (Xiong et al. 2020, fig. 1a)."""

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = self.norm1(x + self.attn(x, cache))
        return self.norm2(x + self.mlp(x))


BLOCKS: dict[str, type[nn.Module]] = {"prenorm": Block, "postnorm": PostNormBlock}

# ---------------------------------------------------------------------------------------------------------------------
# GPT


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=-1, reduction="none")


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """−log p(target) = logsumexp(logits) − logits[target], 0 where the target is -1; (B, T, V) and (B, T) → (B, T).

    In float32, whatever autocast made of the logits. Many logits go part by part, each computed again on the
    way back, so that there is never a float32 copy of all logits (compiled, that copy does not come about at all).
    """
    flat, flat_targets = logits.flatten(0, 1), targets.flatten()
    if logits.numel() <= LOGITS_AT_ONCE or torch.compiler.is_compiling():
        return _cross_entropy(flat, flat_targets).view_as(targets)
    rows = max(1, LOGITS_AT_ONCE // logits.size(-1))
    parts = zip(flat.split(rows), flat_targets.split(rows), strict=True)
    return torch.cat([checkpoint(_cross_entropy, *part, use_reentrant=False) for part in parts]).view_as(targets)


class GPT(nn.Module):
    """wte[ids] + wpe[positions], n_layers blocks, then a score for every token of the vocabulary at every position.

    model(ids)              ids (B, T) → logits (B, T, V)
    model(ids, targets)     → losses (B, T) in nats, float32, 0 where the target is -1: the caller sums and divides
    model(ids, cache=cache) → logits of the last position (B, V); `cache` (from new_cache) has the tokens before ids

    Raises ValueError where cache and ids together are longer than block_size.
    """

    def __init__(self, config: ModelConfig, vocab_size: int):
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.wte = nn.Embedding(vocab_size, config.d_model)
        self.wpe = POSITIONS[config.position](config.block_size, config.d_model)
        self.blocks = nn.ModuleList([BLOCKS[config.block](config) for _ in range(config.n_layers)])
        self.norm = NORMS[config.norm](config) if config.final_norm else nn.Identity()
        self.lm_head = nn.Linear(config.d_model, vocab_size, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.wte.weight  # (Press & Wolf 2016)
        self.init_weights()

    def forward(self, ids: Tensor, targets: Tensor | None = None, cache: list[KVCache] | None = None) -> Tensor:
        start = cache[0].length if cache is not None else 0
        end = start + ids.size(1)
        if end > self.config.block_size:
            raise ValueError(f"{end} tokens do not fit the block_size of {self.config.block_size}")
        x = self.wte(ids) + self.wpe(torch.arange(start, end, device=ids.device))  # (B, T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        for i, block in enumerate(self.blocks):
            x = block(x, cache[i] if cache is not None else None)
        x = self.norm(x)
        if cache is not None:
            return self.lm_head(x[:, -1])  # (B, V)
        logits = self.lm_head(x)  # (B, T, V)
        return logits if targets is None else token_losses(logits, targets)

    def new_cache(self) -> list[KVCache]:
        """An empty cache, one KVCache a layer."""
        return [KVCache() for _ in self.blocks]

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise every parameter by its name; ValueError for a name that no rule matches.

        gpt2: normal(init_std) for embeddings and matrices, and normal(init_std / √(2 n_layers)) for the proj that
        end the 2 n_layers residual branches, so that their sum does not grow with depth (Radford et al. 2019,
        section 2.3). zero_proj: the proj, and lm_head where it is not tied, start at zero, so that each block starts
        as the identity and every token as equally likely.
        """
        std = self.config.init_std
        proj_std, head_std = std / math.sqrt(2 * self.config.n_layers), std
        if self.config.init == "zero_proj":
            proj_std = head_std = 0.0
        for name, p in self.named_parameters():
            layer, kind = name.split(".")[-2:]
            if kind == "bias":
                nn.init.zeros_(p)
            elif layer in ("norm", "norm1", "norm2", "q_norm", "k_norm"):
                nn.init.ones_(p)
            elif layer in ("wte", "wpe", "qkv", "fc"):
                nn.init.normal_(p, std=std)
            elif layer == "proj":
                nn.init.normal_(p, std=proj_std)
            elif layer == "lm_head":
                nn.init.normal_(p, std=head_std)
            else:
                raise ValueError(f"no rule of init_weights matches the parameter {name}")


def parameter_table(model: GPT) -> list[tuple[str, tuple[int, ...], int]]:
    """(part, shape, parameters) for every tensor, those of the blocks together; a tied matrix is counted once."""
    table: dict[str, tuple[tuple[int, ...], int]] = {}
    for name, p in model.named_parameters():
        part = ".".join("*" if piece.isdecimal() else piece for piece in name.removesuffix(".weight").split("."))
        table[part] = (tuple(p.shape), table.get(part, ((), 0))[1] + p.numel())
    return [(part, shape, count) for part, (shape, count) in table.items()]


def flops_per_token(model: GPT) -> int:
    """Floating point operations of forward and backward for one token: 6 N + 12 · layers · C · T.

    (Chowdhery et al. 2022, appendix B.) N leaves the embeddings out, which are looked up and not multiplied, but has
    lm_head, tied or not; T = block_size, as if attention were not causal, which is how utilisation is reported.
    """
    config = model.config
    multiplied = sum(p.numel() for name, p in model.named_parameters() if name.split(".")[0] not in ("wte", "wpe"))
    tied = model.wte.weight.numel() if config.tie_weights else 0
    return 6 * (multiplied + tied) + 12 * config.n_layers * config.d_model * config.block_size
