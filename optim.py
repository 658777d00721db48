"""The optimizers: AdamW, and Muon for the matrices inside blocks; the learning rate of every step.

An update is plain tensor arithmetic, in place, that reads no value back: it runs as it stands on every device, and
torch.compile can fuse it with the gradient.
"""

import math
from typing import Any

import torch
from torch import Tensor

from config import OptimConfig
from model import GPT

ADAM_EPS = 1e-8
MUON_MOMENTUM = 0.95
NEWTON_SCHULZ = [(3.4445, -4.7750, 2.0315)] * 5  # a, b, c of every round


def adamw(
    ps: list[Tensor],
    gs: list[Tensor],
    ms: list[Tensor],
    vs: list[Tensor],
    steps: Tensor,
    lr: Tensor,
    config: OptimConfig,
) -> None:
    """p ← p − lr · m / (√v + ε), in place, for each p: m and v average its g and g², freed of their start at zero.

    (Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019 take the decay out of g.) `steps` counts this update.
    """
    b1, b2 = config.betas
    if not torch.compiler.is_compiling():  # PyTorch's kernel of the same, for all of them together
        rest: dict[str, Any] = {"weight_decay": 0.0, "eps": ADAM_EPS, "amsgrad": False, "maximize": False}
        torch._fused_adamw_(ps, gs, ms, vs, [], [steps] * len(ps), lr=lr, beta1=b1, beta2=b2, **rest)
        return
    for p, g, m, v in zip(ps, gs, ms, vs, strict=True):
        m.lerp_(g, 1 - b1)
        v.lerp_(g.square(), 1 - b2)
        p -= lr * (m / (1 - b1**steps)) / ((v / (1 - b2**steps)).sqrt() + ADAM_EPS)


def orthogonalise(x: Tensor) -> Tensor:
    """About U Vᵀ of each x = U Σ Vᵀ, the nearest matrix whose rows (or columns, where they are fewer) are orthonormal.

    Rounds of x ← a x + (b A + c A²) x with A = x xᵀ, after a division by the norm: an odd polynomial that takes the
    singular values from 0.002 to 1 to 0.68 … 1.21 in five rounds and multiplies smaller ones by up to 480 (Jordan et
    al. 2024, kellerjordan.github.io/posts/muon). (n, rows, columns) → the same.
    """
    tall, dtype = x.size(-2) > x.size(-1), x.dtype
    y = x.mT if tall else x
    y = y.bfloat16() if y.is_cuda else y.float()  # most CPUs emulate bfloat16, many times slower than float32
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # no singular value is above 1
    for a, b, c in NEWTON_SCHULZ:
        A = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(A, A, A, beta=b, alpha=c), y, beta=a)
    return (y.mT if tall else y).to(dtype)


def muon(grads: dict[str, Tensor], state: dict[str, dict[str, Tensor]], parts: dict[str, int]) -> dict[str, Tensor]:
    """√max(1, rows / columns) · orthogonalise(Nesterov momentum of the gradient), for each matrix (Jordan et al. 2024).

    parts: how many matrices stand in a parameter, one above the other: they are orthogonalised apart. All matrices of
    one shape go through one batched product.
    """
    batches: dict[tuple[int, int], dict[str, Tensor]] = {}
    for name, g in grads.items():
        average = state[name]["momentum"].lerp_(g, 1 - MUON_MOMENTUM)
        stacked = g.lerp(average, MUON_MOMENTUM).unflatten(0, (parts[name], -1))  # (parts, rows, columns)
        batches.setdefault((stacked.size(1), stacked.size(2)), {})[name] = stacked
    directions = {}
    for (rows, columns), batch in batches.items():
        scaled = math.sqrt(max(1, rows / columns)) * orthogonalise(torch.cat(list(batch.values())))
        for name, x in zip(batch, scaled.split([x.size(0) for x in batch.values()]), strict=True):
            directions[name] = x.flatten(0, 1)
    return directions


class Optimizer:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) for all parameters of a model, or for those that Muon leaves.

    Decay pulls towards zero, which for a gain means switching the layer off: it is for matrices, not for gains, biases
    and embeddings (nor an lm_head that is tied to one). A parameter without a gradient is left alone.
    """

    def __init__(self, model: GPT, config: OptimConfig):
        """`model`: on its final device."""
        self.config, device = config, model.wte.weight.device
        self.parameters = dict(model.named_parameters())
        self.param_groups = [{"params": list(self.parameters.values())}]  # where torch.amp.GradScaler looks
        self.weights = {name: p.detach() for name, p in self.parameters.items()}  # the same memory
        # lists, since the order of a set changes from process to process, and with it what torch.compile has cached
        self.decayed = [n for n, p in self.weights.items() if p.ndim == 2 and n.split(".")[0] not in ("wte", "wpe")]
        self.parts = {}
        if config.name == "muon":
            side_by_side = {"qkv": 3, "fc": 2 if model.config.mlp == "swiglu" else 1}
            self.parts = {n: side_by_side.get(n.split(".")[-2], 1) for n in self.decayed if n.startswith("blocks.")}
        self.lr, self.steps = torch.zeros((), device=device), torch.zeros((), device=device)
        self.state = {
            name: {
                key: torch.zeros_like(p) for key in (["momentum"] if name in self.parts else ["exp_avg", "exp_avg_sq"])
            }
            for name, p in self.weights.items()
        }

    def gradients(self) -> dict[str, Tensor]:
        """What backward() left behind."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def step(self) -> None:
        """One update from the gradients that backward() left behind."""
        self.update(self.gradients())

    @torch.no_grad()
    def update(self, grads: dict[str, Tensor]) -> None:
        """One update with the learning rate in `lr` (a tensor, because compiled code keeps numbers for good)."""
        self.steps += 1
        muon_lr = self.lr * (self.config.muon_lr / self.config.lr)
        for name in (name for name in self.decayed if name in grads):
            self.weights[name] *= 1 - (muon_lr if name in self.parts else self.lr) * self.config.weight_decay
        for name, direction in muon({n: grads[n] for n in self.parts if n in grads}, self.state, self.parts).items():
            self.weights[name] -= muon_lr * direction
        rest = [name for name in grads if name not in self.parts]
        m, v = ([self.state[name][key] for name in rest] for key in ("exp_avg", "exp_avg_sq"))
        adamw([self.weights[n] for n in rest], [grads[n] for n in rest], m, v, self.steps, self.lr, self.config)

    def state_dict(self) -> dict[str, Any]:
        """What has to be saved, by parameter name, since positions change with the model's code."""
        return {"steps": self.steps, **self.state}

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Put back what `state_dict` gave; KeyError if something is missing."""
        self.steps.copy_(saved["steps"])
        for name, tensors in self.state.items():
            for key, tensor in tensors.items():
                tensor.copy_(saved[name][key])

    def reset(self) -> None:
        """As before the first update."""
        for tensor in (self.lr, self.steps, *(t for tensors in self.state.values() for t in tensors.values())):
            tensor.zero_()


def clip(grads: dict[str, Tensor], max_norm: float) -> Tensor:
    """Scale all gradients together, in place, to a norm of at most max_norm (0: no limit); returns the norm before.

    (Pascanu et al. 2013, algorithm 1.)
    """
    norm = torch.nn.utils.get_total_norm(grads.values())
    if max_norm:
        torch._foreach_mul_(list(grads.values()), (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


def learning_rate(step: int, config: OptimConfig, max_steps: int) -> float:
    """The learning rate of update `step` = 0 … max_steps − 1; Muon's is the same share of muon_lr.

    Linear warm-up that is never 0; then lr · (min + (1 − min) · f(x)), x = 0 … 1 the share of the rest that is done:
    constant: f = 1. linear: 1 − x. cosine: (1 + cos πx) / 2 (Loshchilov & Hutter 2017, eq. 5).
    wsd: 1, then 1 − √ of the last fifth (Hägele et al. 2024, section 3).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    x = (step - config.warmup_steps) / (max_steps - config.warmup_steps)
    factor = {
        "constant": 1.0,
        "linear": 1 - x,
        "cosine": (1 + math.cos(math.pi * x)) / 2,
        "wsd": 1 - math.sqrt(max(0.0, (x - 0.8) / 0.2)),
    }[config.schedule]
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * factor)
