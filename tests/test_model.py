"""The network and its optimizer against their formulas, which stand here once more in plain NumPy float64."""

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
import torch.nn as nn

import config
import model as parts
from checkpoint import load_weights, weights_of
from config import ModelConfig, OptimConfig
from model import GPT, MLP, CausalSelfAttention, KVCache, Rotary, Sinusoidal, SwiGLU, attention
from optim import Optimizer

VOCAB, BLOCK = 27, 8
LM_HEAD, EMBEDDINGS = "lm_head.weight", {"wte.weight", "wpe.weight"}
IDS, TARGETS = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, (2, 2, BLOCK)))
TARGETS[1, 3:5] = -1

CHOICES = {"norm": parts.NORMS, "mlp": parts.MLPS, "position": parts.POSITIONS, "block": parts.BLOCKS}
VARIANTS = [  # every choice of every kind, every flag, and some of them together
    {},
    *({kind: name} for kind, names in CHOICES.items() for name in names if name != getattr(ModelConfig(), kind)),
    *({flag: True} for flag in ("tie_weights", "final_norm", "qk_norm", "bias")),
    {"dropout": 0.3},
    {"init": "zero_proj"},
    {"norm": "layernorm", "bias": True, "mlp": "gelu", "tie_weights": True, "final_norm": True, "dropout": 0.1},
    {"position": "rope", "qk_norm": True, "mlp": "relu2", "final_norm": True, "init": "zero_proj"},
    {"position": "rope", "qk_norm": True, "mlp": "swiglu", "tie_weights": True, "bias": True, "block": "postnorm"},
]
every_variant = pytest.mark.parametrize(
    "variant", VARIANTS, ids=lambda v: "-".join(f"{k}={v[k]}" for k in v) or "micro"
)


def gpt(**changes) -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(**changes), VOCAB)


def scramble(module: nn.Module) -> nn.Module:
    """To float64, with weights far from the initial ones, so that every gain and bias shows."""
    torch.manual_seed(0)
    for p in module.double().parameters():
        nn.init.normal_(p, mean=1.0 if p.ndim == 1 else 0.0, std=0.3)
    return module.eval()


def normal(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).standard_normal(shape))


def gradients(model: GPT) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (model(IDS, TARGETS).sum() / (TARGETS >= 0).sum()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def with_gradient(model: GPT) -> set[str]:
    return {name for name, gradient in gradients(model).items() if gradient.any()}


def train(model: GPT, steps: int = 1, weight_decay: float = 0.0) -> None:
    # no weight decay unless asked for: it moves a matrix that learns nothing as well
    optimizer = Optimizer(model, OptimConfig(weight_decay=weight_decay))
    optimizer.lr.fill_(1e-2)
    for _ in range(steps):
        optimizer.update(gradients(model))


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def assert_close(actual: torch.Tensor, expected, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(actual.detach().numpy(), np.asarray(expected), rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------------------------------------------------
# The formulas, for one row: x (T, C); w has a module's arrays by name, matrices as nn.Linear keeps them (out, in)

ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


def arrays(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in module.named_parameters()}


def under(w, prefix):
    return {name.removeprefix(prefix): a for name, a in w.items() if name.startswith(prefix)}


def np_softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def np_losses(logits, targets):
    """logsumexp(logits) − logits[target], and 0 for a target of −1."""
    top = logits.max(-1)
    log_sum = top + np.log(np.exp(logits - top[..., None]).sum(-1))
    return np.where(targets < 0, 0.0, log_sum - np.take_along_axis(logits, targets[..., None], -1)[..., 0])


def np_norm(x, w, eps, centre=False):
    """RMSNorm, or LayerNorm, which is the same of x − its mean, shifted."""
    x = x - x.mean(-1, keepdims=True) if centre else x
    return w["weight"] * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) + w.get("bias", 0.0)


def np_linear(x, w):
    return x @ w["weight"].T + w.get("bias", 0.0)


def np_rotate(x):
    """Row t turned by t · 10000^(−2i/D), each pair of components (i, i + D/2) as one complex number."""
    angle = np.outer(np.arange(len(x)), 10000.0 ** (-np.arange(0, x.shape[1], 2) / x.shape[1]))
    z = (x[:, : x.shape[1] // 2] + 1j * x[:, x.shape[1] // 2 :]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], axis=-1)


def np_attention(q, k, v):
    """One head, causal, query by query: no mask is needed where the later keys are not read."""
    ahead = len(k) - len(q)
    weights = [np_softmax(q[t] @ k[: ahead + t + 1].T / math.sqrt(q.shape[-1])) for t in range(len(q))]
    return np.stack([p @ v[: len(p)] for p in weights])


def np_self_attention(x, w, c):
    q, k, v = (np.split(part, c.n_heads, -1) for part in np.split(np_linear(x, under(w, "qkv.")), 3, -1))
    if c.qk_norm:
        q = [np_norm(head, under(w, "q_norm."), c.norm_eps) for head in q]
        k = [np_norm(head, under(w, "k_norm."), c.norm_eps) for head in k]
    if c.position == "rope":
        q, k = [np_rotate(head) for head in q], [np_rotate(head) for head in k]
    heads = [np_attention(*head) for head in zip(q, k, v, strict=True)]
    return np_linear(np.concatenate(heads, -1), under(w, "proj."))


def np_mlp(x, w, c):
    h = np_linear(x, under(w, "fc."))
    if c.mlp == "swiglu":
        gate, value = np.split(h, 2, -1)
        return np_linear(gate / (1 + np.exp(-gate)) * value, under(w, "proj."))
    return np_linear(ACTIVATIONS[c.mlp](h), under(w, "proj."))


def np_sinusoidal(T, C):
    angle = [[t / 10000 ** ((j - j % 2) / C) for j in range(C)] for t in range(T)]
    return np.where(np.arange(C) % 2, np.cos(angle), np.sin(angle))


def np_logits(ids, w, c):
    def norm(x, name):
        return np_norm(x, under(w, f"{name}."), c.norm_eps, c.norm == "layernorm")

    x = w["wte.weight"][ids]
    if c.position in ("learned", "sinusoidal"):
        x = x + (w["wpe.weight"] if c.position == "learned" else np_sinusoidal(c.block_size, c.d_model))[: len(ids)]
    for b in (f"blocks.{i}." for i in range(c.n_layers)):
        for n, branch, name in ((f"{b}norm1", np_self_attention, f"{b}attn."), (f"{b}norm2", np_mlp, f"{b}mlp.")):
            if c.block == "prenorm":
                x = x + branch(norm(x, n), under(w, name), c)
            else:
                x = norm(x + branch(x, under(w, name), c), n)
    return (norm(x, "norm") if c.final_norm else x) @ w.get(LM_HEAD, w["wte.weight"]).T


# ---------------------------------------------------------------------------------------------------------------------
# Each part is its formula, and so is the whole


def test_embedding_is_the_row_of_the_token_plus_the_row_of_the_position():
    model, seen = scramble(gpt()), []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(IDS)
    w = arrays(model)
    assert_close(seen[0], [[w["wte.weight"][i] + w["wpe.weight"][t] for t, i in enumerate(row)] for row in IDS])


@pytest.mark.parametrize("kind, bias", [("rmsnorm", False), ("layernorm", False), ("layernorm", True)])
def test_norms_have_a_gain_per_component_and_eps_inside_the_root(kind, bias):
    norm, x = scramble(parts.NORMS[kind](ModelConfig(norm_eps=0.1, bias=bias))), normal(2, 5, 16) * 0.3 + 0.2
    assert_close(norm(x), np_norm(x.numpy(), arrays(norm), 0.1, centre=kind == "layernorm"))


@pytest.mark.parametrize("queries", [5, 2, 1])
def test_written_out_attention_is_the_formula(queries):
    q, k, v = normal(3, 5, 4)[:, -queries:], normal(3, 5, 4).flip(0), normal(3, 5, 4).flip(1)
    out, weights = attention(q, k, v)
    assert_close(out, [np_attention(*head) for head in zip(q.numpy(), k.numpy(), v.numpy(), strict=True)])
    assert_close(weights.sum(-1), np.ones((3, queries)))
    assert (weights.triu(5 - queries + 1) == 0).all()
    out, weights = attention(q, k, v, causal=False)
    expected = np_softmax(q.numpy() @ k.numpy().swapaxes(1, 2) / 2)  # √4
    assert_close(weights, expected)
    assert_close(out, expected @ v.numpy())


@pytest.mark.parametrize("n_heads", [1, 4, 16])
def test_self_attention_splits_and_joins_heads(n_heads):
    c, x = ModelConfig(n_heads=n_heads, bias=True), normal(2, 6, 16)
    attn = scramble(CausalSelfAttention(c))
    assert_close(attn(x), [np_self_attention(row, arrays(attn), c) for row in x.numpy()])


def test_attention_as_it_is_compiled_for_short_rows_is_that_of_the_kernel(monkeypatch):
    model, wrote = scramble(gpt(n_layers=2)), []
    expected, grads = model(IDS, TARGETS), gradients(model)
    written_out = attention
    monkeypatch.setattr(parts, "attention", lambda *a, **k: wrote.append(1) or written_out(*a, **k))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_close(model(IDS, TARGETS), expected.detach().numpy())
    for name, gradient in gradients(model).items():
        assert_close(gradient, grads[name])
    assert wrote


def test_one_query_over_five_keys_attends_to_all_five():
    attn, cache, x = scramble(CausalSelfAttention(ModelConfig())), KVCache(), normal(1, 5, 16)
    attn(x[:, :4], cache)
    assert_close(attn(x[:, 4:], cache)[0, 0], np_self_attention(x[0].numpy(), arrays(attn), ModelConfig())[-1])


@pytest.mark.parametrize("mlp", parts.MLPS)
def test_mlp_is_its_formula(mlp):
    c, x = ModelConfig(mlp=mlp, bias=True), normal(2, 5, 16)
    module = scramble(parts.MLPS[mlp](c))
    assert_close(module(x), np_mlp(x.numpy(), arrays(module), c))


def test_sinusoidal_table_is_the_papers():
    assert_close(Sinusoidal(50, 16)(torch.arange(50)), np_sinusoidal(50, 16), 1e-5)  # the table is float32


def test_rope_scores_depend_on_the_distance_alone_and_lengths_are_kept():
    rotary, (q, k) = Rotary(64, 8).double(), normal(2, 1, 1, 1, 8)
    scores = torch.tensor([[(rotary(q, t) * rotary(k, s)).sum() for s in range(0, 64, 7)] for t in range(0, 64, 7)])
    assert_close(scores[1:, 1:], scores[:-1, :-1], 1e-5)
    assert scores[0].unique().numel() == 10
    assert_close(rotary(q.expand(1, 1, 64, 8), 0).norm(dim=-1), q.norm().expand(1, 1, 64), 1e-6)


@every_variant
def test_logits_losses_and_gradients_are_the_formulas(variant):
    model = scramble(gpt(**variant, n_layers=2))
    w, c, targets = arrays(model), model.config, TARGETS.numpy()

    def logits(w):
        return np.stack([np_logits(row, w, c) for row in IDS.numpy()])

    def loss(w):
        return np_losses(logits(w), targets).sum() / (targets >= 0).sum()

    assert_close(model(IDS), logits(w), 2e-6 if c.position in ("sinusoidal", "rope") else 1e-10)  # float32 tables
    assert_close(model(IDS, TARGETS), np_losses(logits(w), targets), 1e-5)  # float32 losses
    for name, gradient in gradients(model).items():
        way = np.random.default_rng(2).standard_normal(gradient.shape) * 1e-5
        slope = (loss({**w, name: w[name] + way}) - loss({**w, name: w[name] - way})) / 2
        assert (gradient.numpy() * way).sum() == pytest.approx(slope, rel=1e-4, abs=1e-10), name


def losses_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The model's own losses for given logits, which stand in for what its lm_head makes."""
    model = gpt()
    model.lm_head.register_forward_hook(lambda *_: logits)
    return model(torch.zeros_like(targets), targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e30])
def test_loss_is_logsumexp_less_the_targets_logit_in_float32_even_for_large_logits(scale, dtype):
    logits = (normal(2, BLOCK, VOCAB) * scale).to(dtype)
    losses = losses_of(logits, TARGETS)
    assert_close(losses, np_losses(logits.double().numpy(), TARGETS.numpy()), 1e-6)
    assert losses.dtype == torch.float32 and (losses[TARGETS < 0] == 0).all()


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_the_loss_of_a_large_vocabulary_part_by_part_is_that_of_the_whole(monkeypatch, rows):
    model = scramble(gpt())
    whole, expected = model(IDS, TARGETS), gradients(model)
    monkeypatch.setattr(parts, "LOGITS_AT_ONCE", rows * VOCAB)
    assert torch.equal(model(IDS, TARGETS), whole)
    for name, gradient in gradients(model).items():
        assert_close(gradient, expected[name])


def test_no_tensor_that_is_kept_for_the_gradient_is_a_float32_copy_of_all_logits(monkeypatch):
    def kept(logits):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append((t.dtype, t.numel())) or t, lambda t: t):
            parts.token_losses(logits, torch.zeros(1, 64, dtype=torch.long))
        return [size for dtype, size in sizes if dtype == torch.float32]

    logits = torch.zeros(1, 64, 100, dtype=torch.bfloat16, requires_grad=True)
    assert max(kept(logits)) == 6400
    monkeypatch.setattr(parts, "LOGITS_AT_ONCE", 800)
    assert max(kept(logits), default=0) < 6400


@pytest.mark.parametrize("p, printed", [(0.9, "0.11"), (0.5, "0.69"), (0.01, "4.6"), (0.001, "6.9")])
def test_loss_is_minus_the_log_of_the_probability_of_the_truth(p, printed):
    loss = losses_of(torch.tensor([[[math.log(p), math.log(1 - p)]]]), torch.tensor([[0]])).item()
    assert loss == pytest.approx(-math.log(p), rel=1e-6) and f"{loss:.2g}" == printed


def test_gradient_of_the_loss_at_the_logits_is_p_minus_y():
    logits = normal(2, BLOCK, VOCAB).requires_grad_()
    losses_of(logits, TARGETS).sum().backward()
    expected = np_softmax(logits.detach().numpy()) - np.eye(VOCAB)[TARGETS]
    assert_close(logits.grad, np.where(TARGETS[..., None] < 0, 0.0, expected), 1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# What is said of micro and of its parts

SIZES = {"wte": 432, "wpe": 128, "blocks.*.norm1": 16, "blocks.*.attn.qkv": 768, "blocks.*.attn.proj": 256}
SIZES |= {"blocks.*.norm2": 16, "blocks.*.mlp.fc": 1024, "blocks.*.mlp.proj": 1024, "lm_head": 432}


@pytest.mark.parametrize("n_heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    "n_layers, tied, total", [(1, False, 4096), (1, True, 4096 - 432), (3, False, 4096 + 2 * 3104)]
)
def test_micro_has_4096_parameters_whatever_its_heads_and_tying_saves_432(n_heads, n_layers, tied, total):
    model = gpt(n_heads=n_heads, n_layers=n_layers, tie_weights=tied)
    table = {part: size for part, _, size in parts.parameter_table(model)}
    assert table == {k: n * (n_layers if "*" in k else 1) for k, n in SIZES.items() if not (tied and k == "lm_head")}
    assert sum(table.values()) == count(model) == total
    assert ("blocks.*.attn.qkv", (48, 16), 768 * n_layers) in parts.parameter_table(model)


@pytest.mark.parametrize("tied", [False, True])
def test_flops_per_token_are_six_a_multiplied_weight_and_those_of_attention(tied):
    # micro multiplies 3,072 + 432 weights a token; q·k and weights·v are 2 · 2 · T · C, three times with the backward
    assert parts.flops_per_token(gpt(tie_weights=tied)) == 6 * (32 + 3072 + 432) + 3 * 4 * 8 * 16


def test_mlp_is_two_thirds_of_a_blocks_matrices_and_half_of_micro():
    mlp, attn = count(gpt().blocks[0].mlp), count(gpt().blocks[0].attn)
    assert 3 * mlp == 2 * (mlp + attn) and 2 * mlp == count(gpt())


def test_attention_without_mask_is_permutation_equivariant_until_positions_are_added():
    wte, wpe, (q, k, v), order = normal(VOCAB, 16), normal(9, 16)[1:], normal(3, 16, 16), [3, 1, 7, 0, 5, 2, 6, 4]

    def attend(x):
        return attention(x @ q, x @ k, x @ v, causal=False)[0]

    assert torch.allclose(attend(wte[IDS[0, order]]), attend(wte[IDS[0]])[order])
    assert not torch.allclose(attend(wte[IDS[0, order]] + wpe), attend(wte[IDS[0]] + wpe)[order], atol=0.1)


@pytest.mark.parametrize(
    "position, n_layers, sees_order",
    [("none", 1, False), ("none", 2, True), ("learned", 1, True), ("sinusoidal", 1, True), ("rope", 1, True)],
)
def test_one_causal_layer_without_positions_does_not_see_the_order_of_the_past(position, n_layers, sees_order):
    model, turned = scramble(gpt(position=position, n_layers=n_layers)), IDS[:, [6, 5, 4, 3, 2, 1, 0, 7]]
    assert torch.allclose(model(IDS)[:, -1], model(turned)[:, -1], rtol=0, atol=1e-9) != sees_order


def test_heads_read_every_component_and_do_not_mix_before_proj():
    attn = scramble(CausalSelfAttention(ModelConfig()))
    nn.init.eye_(attn.proj.weight)
    for h in range(4):
        (used,) = torch.autograd.grad(attn(normal(1, 5, 16))[..., 4 * h : 4 * h + 4].square().sum(), attn.qkv.weight)
        used = used.view(3, 4, 4, 16) != 0  # q, k, v; head; its rows; components of x
        assert used[:, h].all() and used.sum() == used[:, h].numel()


@pytest.mark.parametrize("head_dim", [4, 64, 256])
def test_scores_have_variance_one_after_scaling_whatever_the_head_dim(head_dim):
    q, k = normal(2, 400, head_dim)
    assert (q @ k.T).var().item() == pytest.approx(head_dim, rel=0.15)
    weights = attention(q, k, k, causal=False)[1]
    assert weights.log().var(dim=1).mean().item() == pytest.approx(1, rel=0.15)  # log-weights: scores less a constant


@every_variant
def test_initial_loss_is_within_two_percent_of_log_vocab(variant):
    assert gpt(**variant)(IDS, IDS.roll(-1, 1)).mean().item() == pytest.approx(math.log(VOCAB), rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_start_at_init_std_and_residual_projections_smaller_tied_or_not(tied):
    model = gpt(d_model=256, n_layers=3, block_size=256, init_std=0.05, bias=True, norm="layernorm", tie_weights=tied)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            std = 0.05 / math.sqrt(2 * 3) if name.endswith("proj.weight") else 0.05
            assert p.std().item() == pytest.approx(std, rel=0.03), name
        else:
            assert (p == (0 if "bias" in name else 1)).all(), name


def test_zero_proj_starts_uniform_and_with_blocks_that_are_the_identity():
    model, tied = (gpt(init="zero_proj", n_layers=2, tie_weights=tie) for tie in (False, True))
    assert (model(IDS) == 0).all()
    assert_close(model(IDS, IDS), np.full((2, BLOCK), math.log(VOCAB)), 1e-6)
    x = torch.randn(2, BLOCK, 16)
    assert all(torch.equal(block(x), x) for block in [*model.blocks, *tied.blocks])
    assert tied.wte.weight.std().item() == pytest.approx(0.02, rel=0.1)


# ---------------------------------------------------------------------------------------------------------------------
# Every choice and flag: gradients, updates, causality, cache


@every_variant
def test_every_parameter_gets_a_gradient_and_one_step_changes_every_tensor(variant):
    model = gpt(**{**variant, "init": "gpt2"})
    before = arrays(model)
    assert with_gradient(model) == before.keys()
    train(model)
    assert all((after != before[name]).any() for name, after in arrays(model).items())


def test_under_zero_proj_gradients_reach_first_lm_head_then_embeddings_and_projections_then_all():
    model = gpt(init="zero_proj", n_layers=2)
    names = dict(model.named_parameters()).keys()
    for reached in ({LM_HEAD}, {LM_HEAD} | EMBEDDINGS | {n for n in names if ".proj." in n}, names):
        assert with_gradient(model) == reached
        train(model)


@pytest.mark.parametrize("path", sorted(Path(config.__file__).parent.glob("configs/*.yaml")), ids=lambda p: p.stem)
def test_every_parameter_of_a_shipped_configuration_gets_a_gradient(path):
    c = config.load(path).model  # narrower and shallower, but with all its choices
    model = GPT(replace(c, n_layers=min(c.n_layers, 2), d_model=8 * c.n_heads, d_ff=None, block_size=BLOCK), VOCAB)
    train(model, steps=2 if c.init == "zero_proj" else 0)
    assert with_gradient(model) == dict(model.named_parameters()).keys()


@every_variant
def test_future_tokens_do_not_change_past_logits_and_past_tokens_change_later_ones(variant):
    model, changed = scramble(gpt(**variant)), IDS.clone()
    changed[:, 3] = (changed[:, 3] + 1) % VOCAB
    difference = (model(changed) - model(IDS)).abs().amax(dim=-1)
    assert (difference[:, :3] < 1e-12).all()
    assert (difference[:, 3:] > 1e-6).all()


@every_variant
@pytest.mark.parametrize("pieces", [[1] * 8, [3, 3, 2], [5, 1, 1]], ids=str)
def test_cached_logits_equal_uncached_ones(variant, pieces):
    model = scramble(gpt(**variant, n_layers=2))
    whole, cache, end = model(IDS), model.new_cache(), 0
    for piece in pieces:
        end += piece
        assert torch.allclose(model(IDS[:, end - piece : end], cache=cache), whole[:, end - 1], rtol=0, atol=1e-10)


def test_rows_kept_in_a_cache_go_on_as_if_the_others_had_never_been():
    model = scramble(gpt(n_layers=2))
    whole, cache = model(IDS), model.new_cache()
    model(IDS[:, :5], cache=cache)
    for layer in cache:
        layer.keep(torch.tensor([False, True]))
    assert torch.allclose(model(IDS[1:, 5:], cache=cache), whole[1:, -1], rtol=0, atol=1e-10)


@every_variant
def test_under_bfloat16_autocast_every_choice_runs_and_stays_close(variant):
    model = scramble(gpt(**variant)).float()
    exact, cache = model(IDS), model.new_cache()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(IDS, TARGETS).dtype == torch.float32
        model(IDS[:, :-1], cache=cache)
        for rough, close in ((model(IDS), exact), (model(IDS[:, -1:], cache=cache), exact[:, -1])):
            assert (rough - close).abs().mean() < 0.05 * close.abs().mean()


# ---------------------------------------------------------------------------------------------------------------------
# Dropout, limits, new parts, tied weights


def test_dropout_is_silent_in_eval_mode_only():
    model = gpt(dropout=0.5)
    assert not torch.equal(model(IDS), model(IDS))
    model.eval()
    assert torch.equal(model(IDS), model(IDS)) and torch.equal(model(IDS), gpt()(IDS))


@pytest.mark.parametrize("part, kept", [(GPT, 2), (MLP, 2), (SwiGLU, 2), (CausalSelfAttention, 4)])
def test_dropout_zeroes_half_of_what_a_part_adds_and_doubles_the_rest(part, kept):
    module, x = (gpt(dropout=0.5), IDS) if part is GPT else (part(ModelConfig(dropout=0.5)), torch.randn(200, 1, 16))
    if part is GPT:  # its embeddings alone
        module.blocks, module.lm_head = nn.ModuleList(), nn.Identity()
    if part is CausalSelfAttention:  # dropped twice: as the weight of its head, and as what is added
        nn.init.eye_(module.proj.weight)
    ratio = module.train()(x) / module.eval()(x)
    assert_close(ratio, kept * (ratio > 1), 1e-3)
    assert (ratio > 1).float().mean().item() == pytest.approx(1 / kept, rel=0.2)


def test_more_tokens_than_block_size_are_refused_with_both_numbers():
    model = gpt()
    with pytest.raises(ValueError, match=r"9 tokens .* 8"):
        model(torch.zeros(1, 9, dtype=torch.long))
    cache = model.new_cache()
    model(IDS[:, :6], cache=cache)
    with pytest.raises(ValueError, match=r"10 tokens .* 8"):
        model(IDS[:, :4], cache=cache)


def test_a_parameter_that_no_rule_initialises_is_an_error():
    model = gpt()
    model.mystery = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"mystery\.weight"):
        model.init_weights()


@pytest.mark.parametrize("kind", CHOICES)
def test_names_in_the_configuration_are_those_of_the_parts(kind):
    assert set(get_args(get_type_hints(ModelConfig)[kind])) == CHOICES[kind].keys()


def test_a_new_part_is_a_class_and_a_dictionary_entry(monkeypatch):
    monkeypatch.setitem(parts.MLPS, "same", nn.Identity)
    block, x = gpt(mlp="same").blocks[0], torch.randn(2, BLOCK, 16)
    x_attended = x + block.attn(block.norm1(x))
    assert torch.equal(block(x), x_attended + block.norm2(x_attended))


def test_tied_weights_are_stored_once_and_tied_again_when_loaded():
    model, other = gpt(tie_weights=True), GPT(ModelConfig(tie_weights=True), VOCAB)
    weights = weights_of(model)
    assert LM_HEAD not in weights and sum(w.numel() for w in weights.values()) == 4096 - 432
    assert not torch.equal(other(IDS), model(IDS))
    load_weights(other, weights, Path("tied.pt"))
    assert other.lm_head.weight is other.wte.weight and torch.equal(other(IDS), model(IDS))
