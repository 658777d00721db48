"""The optimizers against their formulas, in NumPy float64 or by hand; learning rates by step."""

import math
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

from config import ModelConfig, OptimConfig
from model import GPT
from optim import Optimizer, clip, learning_rate, orthogonalise

VOCAB = 27
IDS = torch.tensor([[26, 0, 13, 13, 0, 26, 4, 11], [26, 1, 14, 1, 26, 2, 0, 25]])
TARGETS = torch.tensor([[0, 13, 13, 0, 26, 4, 11, -1], [1, 14, 1, 26, 2, 0, 25, -1]])


def gpt(**keys) -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(init_std=0.3, **keys), VOCAB).double()


def gradients(model: GPT) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (model(IDS, TARGETS).sum() / (TARGETS >= 0).sum()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def arrays(tensors) -> dict[str, np.ndarray]:
    return {name: t.detach().numpy().copy() for name, t in tensors}


def is_decayed(name: str, array: np.ndarray) -> bool:
    return array.ndim == 2 and name not in ("wte.weight", "wpe.weight")


@pytest.mark.parametrize("compiling", [False, True])
def test_three_updates_are_those_of_the_formula_of_adamw(monkeypatch, compiling):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)  # the kernel, or what is compiled
    model = gpt(norm="layernorm", bias=True)
    optimizer = Optimizer(model, OptimConfig(betas=(0.8, 0.95), weight_decay=0.5))
    w = arrays(model.named_parameters())
    m, v = ({name: np.zeros_like(a) for name, a in w.items()} for _ in range(2))
    for t, lr in enumerate((1e-2, 2e-2, 5e-3), start=1):
        g = arrays(gradients(model).items())
        optimizer.lr.fill_(lr)
        optimizer.step()
        for name in w:
            m[name] = 0.8 * m[name] + 0.2 * g[name]
            v[name] = 0.95 * v[name] + 0.05 * g[name] ** 2
            decay = 0.5 if is_decayed(name, w[name]) else 0.0
            direction = m[name] / (1 - 0.8**t) / (np.sqrt(v[name] / (1 - 0.95**t)) + 1e-8)
            w[name] = w[name] * (1 - lr * decay) - lr * direction
    for name, p in model.named_parameters():
        np.testing.assert_allclose(p.detach().numpy(), w[name], rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("tie_weights", [False, True])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_each_parameter_is_changed_and_only_matrices_are_decayed(name, tie_weights):
    model = gpt(tie_weights=tie_weights, norm="layernorm", bias=True, qk_norm=True, final_norm=True)
    before = arrays(model.named_parameters())
    optimizer = Optimizer(model, OptimConfig(name=name, lr=1e-2, muon_lr=1e-2, weight_decay=0.5))
    optimizer.lr.fill_(1e-2)
    optimizer.update({name: torch.zeros_like(p) for name, p in model.named_parameters()})  # what moves now is decay
    for key, p in model.named_parameters():
        decay = 0.5 if is_decayed(key, before[key]) else 0.0
        np.testing.assert_allclose(p.detach().numpy(), before[key] * (1 - 1e-2 * decay), rtol=1e-6, err_msg=key)
    before = arrays(model.named_parameters())
    optimizer.update(gradients(model))
    assert all((p.detach().numpy() != before[key]).any() for key, p in model.named_parameters())


def test_parameters_are_updated_in_the_models_order_in_every_process():
    model = gpt(n_layers=2)
    optimizer = Optimizer(model, OptimConfig(name="muon"))
    order = [name for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2]
    assert list(optimizer.parts) == order and list(optimizer.decayed) == [*order, "lm_head.weight"]


def test_a_frozen_parameter_stays_as_it_is():
    model = gpt()
    model.wte.weight.requires_grad_(False)
    before = model.wte.weight.clone()
    optimizer = Optimizer(model, OptimConfig(name="muon", weight_decay=0.5))
    optimizer.lr.fill_(1e-2)
    gradients(model)
    optimizer.step()
    assert torch.equal(model.wte.weight, before)


# ---------------------------------------------------------------------------------------------------------------- Muon


def test_a_matrix_of_ones_own_in_a_block_is_one_of_muons():
    model = gpt()
    model.blocks[0].gate = torch.nn.Linear(16, 16, bias=False).double()
    optimizer = Optimizer(model, OptimConfig(name="muon"))
    assert set(optimizer.state["blocks.0.gate.weight"]) == {"momentum"}


@pytest.mark.parametrize("shape", [(5, 48, 16), (5, 16, 48), (5, 64, 64), (1, 1, 7)])
def test_singular_values_come_near_one_and_singular_vectors_stay(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    y = orthogonalise(x)
    assert y.shape == x.shape and y.dtype == x.dtype
    core = u.mT @ y @ vt.mT  # diagonal where the vectors are those of x
    values = core.diagonal(dim1=-2, dim2=-1)
    kept = s > 0.05 * s.amax(dim=-1, keepdim=True)  # five rounds do not lift what is almost zero
    assert kept.float().mean() > 0.9 and values[kept].min() > 0.6 and values.max() < 1.25
    torch.testing.assert_close(core, torch.diag_embed(values), rtol=0, atol=1e-4)


def test_the_scale_of_a_gradient_does_not_matter():
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(orthogonalise(1e-3 * x), orthogonalise(1e3 * x), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("mlp", ["relu", "swiglu"])
def test_an_update_of_muon_is_a_scaled_orthogonal_matrix_for_each_matrix_by_itself(mlp):
    model = gpt(mlp=mlp, n_layers=2)
    before = arrays(model.named_parameters())
    optimizer = Optimizer(model, OptimConfig(name="muon", lr=1e-3, muon_lr=1e-2, weight_decay=0.0))
    optimizer.lr.fill_(5e-4)  # half of the peak, for Muon as well
    grads = arrays(gradients(model).items())
    optimizer.step()
    for name, p in model.named_parameters():
        step = (before[name] - p.detach().numpy()) / 5e-3
        if not name.startswith("blocks.") or p.ndim != 2:
            assert set(optimizer.state[name]) == {"exp_avg", "exp_avg_sq"}
            continue
        assert set(optimizer.state[name]) == {"momentum"}
        count = 3 if ".qkv." in name else 2 if ".fc." in name and mlp == "swiglu" else 1
        pairs = zip(np.split(step, count), np.split(grads[name], count), strict=True)
        for part, g in pairs:
            u, s, vt = np.linalg.svd(g, full_matrices=False)
            values = np.diag(u.T @ part @ vt.T) / math.sqrt(max(1, g.shape[0] / g.shape[1]))
            large = s > 0.1 * s[0]
            assert values[large].min() > 0.6 and values.max() < 1.25, name


def test_momentum_of_muon_looks_ahead_as_nesterov_does():
    model = gpt()
    optimizer = Optimizer(model, OptimConfig(name="muon", lr=1.0, muon_lr=1.0, weight_decay=0.0))
    optimizer.lr.fill_(1.0)
    name = "blocks.0.mlp.fc.weight"
    rng, average = np.random.default_rng(0), np.zeros((64, 16))
    for _ in range(3):
        grads = {key: torch.zeros_like(p) for key, p in model.named_parameters()}
        g = rng.standard_normal((64, 16))
        grads[name], before = torch.from_numpy(g), optimizer.weights[name].clone()
        optimizer.update(grads)
        average = 0.95 * average + 0.05 * g
        expected = 2 * orthogonalise(torch.from_numpy(0.05 * g + 0.95 * average)[None])[0]  # 2 = √(64 / 16)
        torch.testing.assert_close(before - optimizer.weights[name], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_one_batch_is_learned_by_heart_in_200_updates(name):
    torch.manual_seed(0)
    model = GPT(ModelConfig(), VOCAB)
    assert model(IDS, TARGETS).sum().item() / 14 == pytest.approx(math.log(VOCAB), rel=0.02)  # two of 16 are ignored
    optimizer = Optimizer(model, OptimConfig(name=name))
    optimizer.lr.fill_(1e-2)
    for _ in range(200):
        optimizer.update(gradients(model))
    assert model(IDS, TARGETS).sum().item() / 14 < 0.1


# ------------------------------------------------------------------------------------------------------------ clipping


@pytest.mark.parametrize("max_norm, expected", [(0.0, 13.0), (20.0, 13.0), (6.5, 6.5)])
def test_gradients_are_scaled_together_to_the_largest_norm(max_norm, expected):
    grads = {"a": torch.tensor([[3.0, 4.0]]), "b": torch.tensor([12.0])}
    assert clip(grads, max_norm).item() == pytest.approx(13.0)
    assert math.hypot(*grads["a"].flatten().tolist(), *grads["b"].tolist()) == pytest.approx(expected, rel=1e-5)
    assert (grads["a"][0, 0] / grads["b"][0]).item() == pytest.approx(3 / 12)


# ------------------------------------------------------------------------------------------------------ learning rates


@pytest.mark.parametrize(
    "schedule, corners",  # 10 updates of warm-up, then 100: update 10 + 100 x has the share x of them behind it
    [
        ("constant", {10: 1.0, 60: 1.0, 109: 1.0}),
        ("linear", {10: 1.0, 35: 0.75, 60: 0.5, 109: 0.01}),
        ("cosine", {10: 1.0, 35: (1 + math.sqrt(0.5)) / 2, 60: 0.5, 85: (1 - math.sqrt(0.5)) / 2, 110: 0.0}),
        ("wsd", {10: 1.0, 60: 1.0, 90: 1.0, 95: 0.5, 110: 0.0}),
    ],
)
@pytest.mark.parametrize("least", [0.0, 0.1])
def test_learning_rate_goes_through_the_corners_of_its_schedule(schedule, corners, least):
    c = OptimConfig(lr=2.0, schedule=schedule, warmup_steps=10, min_lr_ratio=least)
    expected = {update: (update + 1) / 10 for update in range(10)}
    expected |= {update: least + (1 - least) * share for update, share in corners.items()}
    for update, share in expected.items():
        assert learning_rate(update, c, 110) == pytest.approx(2.0 * share, abs=1e-12)


@pytest.mark.parametrize("schedule", get_args(get_type_hints(OptimConfig)["schedule"]))
@pytest.mark.parametrize("warmup_steps", [0, 1, 5, 20, 50])
def test_learning_rate_is_above_zero_at_every_update(schedule, warmup_steps):
    c = OptimConfig(lr=1e-2, schedule=schedule, warmup_steps=warmup_steps)
    assert all(0 < learning_rate(update, c, 20) <= 1e-2 for update in range(20))
