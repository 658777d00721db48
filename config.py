"""The configuration of a run: declared once, here; read from YAML and `section.key=value`, checked, written back.

The declarations below are the single source of every key's type, choices, default, range and meaning:
`python train.py --help` prints them, and the same converter reads YAML and the command line.
"""

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from errors import UsageError

LARGEST_INT = 2**31 - 1
UNIONS = (UnionType, Union)  # what get_origin says of int | None, and of Literal["auto"] | bool


def key(default: Any, meaning: str, least: float = -math.inf, most: float = math.inf, above: float = -math.inf) -> Any:
    """A key of a section: least <= value <= most, value > above."""
    return field(default=default, metadata={"meaning": meaning, "least": least, "most": most, "above": above})


@dataclass
class ModelConfig:
    block: Literal["prenorm", "postnorm"] = key("prenorm", "where the norms stand: x + f(norm(x)), or norm(x + f(x))")
    norm: Literal["rmsnorm", "layernorm"] = key("rmsnorm", "normalisation over the d_model components of a token")
    mlp: Literal["relu", "gelu", "gelu_tanh", "swiglu", "relu2"] = key("relu", "the MLP and its non-linearity")
    position: Literal["learned", "sinusoidal", "rope", "none"] = key(
        "learned", "how the model knows the order of tokens"
    )
    d_model: int = key(16, "width of the residual stream", least=1)
    n_layers: int = key(1, "number of blocks", least=1, most=10_000)
    n_heads: int = key(4, "attention heads; must divide d_model", least=1)
    d_ff: int | None = key(
        None, "width inside the MLP; null: 4 d_model (swiglu: 8/3 d_model, a multiple of 8)", least=1
    )
    block_size: int = key(8, "context: the most tokens the model sees at once", least=1)
    tie_weights: bool = key(False, "one matrix for the token embedding and lm_head")
    final_norm: bool = key(False, "a norm between the last block and lm_head")
    qk_norm: bool = key(False, "RMSNorm on the queries and keys of each head")
    bias: bool = key(False, "biases in the linear layers and in layernorm")
    dropout: float = key(0.0, "share of activations zeroed in training", least=0.0, most=0.99)
    norm_eps: float = key(1e-5, "added inside the root of a norm", above=0.0)
    init: Literal["gpt2", "zero_proj"] = key(
        "gpt2", "normal(init_std), proj / sqrt(2 n_layers); or proj and lm_head at 0"
    )
    init_std: float = key(0.02, "standard deviation of the initial weights", above=0.0)

    def __post_init__(self) -> None:
        if self.d_ff is None:
            self.d_ff = 8 * math.ceil(8 * self.d_model / 3 / 8) if self.mlp == "swiglu" else 4 * self.d_model
        if self.d_model >= 1 and (self.n_heads < 1 or self.d_model % self.n_heads):
            fitting = ", ".join(str(n) for n in range(1, min(self.d_model, 1024) + 1) if self.d_model % n == 0)
            raise UsageError(
                f"model.n_heads={self.n_heads} does not divide model.d_model={self.d_model}: n_heads can be {fitting}"
            )
        check_ranges("model", self)
        if self.position == "rope" and self.head_dim % 2:
            fitting = ", ".join(
                str(n) for n in range(1, min(self.d_model // 2, 1024) + 1) if self.d_model % (2 * n) == 0
            )
            raise UsageError(
                f"model.position=rope turns pairs of components, but d_model {self.d_model} / n_heads {self.n_heads} "
                f"= {self.head_dim} is odd: n_heads can be {fitting or 'none of them; choose an even d_model'}"
            )
        if self.position == "sinusoidal" and self.d_model % 2:
            raise UsageError(f"model.position=sinusoidal needs an even model.d_model, not {self.d_model}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


@dataclass
class DataConfig:
    name: str = key("names", "names, a set that data/prepare.py made, or a text file or folder of your own")
    mode: Literal["documents", "stream"] = key("documents", "a row starts where its document starts; or anywhere")
    val_fraction: float = key(0.1, "share of the documents held out for validation", above=0.0, most=0.9)
    split_seed: int = key(0, "which documents are held out", least=0, most=LARGEST_INT)

    def __post_init__(self) -> None:
        check_ranges("data", self)
        if not self.name.strip() or len(self.name) > 1000 or re.search(r"[\x00-\x1f\x7f-\x9f]", self.name):
            raise UsageError(
                f"data.name={self.name[:100]!r} names no data: give a prepared set such as names, or a text file"
            )


@dataclass
class OptimConfig:
    name: Literal["adamw", "muon"] = key(
        "adamw", "the optimizer; muon: for the matrices inside blocks, adamw for the rest"
    )
    lr: float = key(1e-2, "peak learning rate", above=0.0)
    muon_lr: float = key(2e-2, "peak learning rate of the matrices under muon", above=0.0)
    betas: tuple[float, float] = key((0.9, 0.99), "decay of AdamW's averages of the gradient and its square")
    weight_decay: float = key(0.01, "decay of the matrices (not of gains, biases, embeddings)", least=0.0)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = key("linear", "learning rate after the warm-up")
    warmup_steps: int = key(50, "updates in which the learning rate rises to lr", least=0)
    min_lr_ratio: float = key(0.0, "the learning rate at the end, as a share of lr", least=0.0, most=1.0)
    grad_clip: float = key(1.0, "largest norm of the whole gradient; 0: no clipping", least=0.0)

    def __post_init__(self) -> None:
        check_ranges("optim", self)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"optim.betas={list(self.betas)} must both be at least 0 and below 1")


@dataclass
class TrainConfig:
    max_steps: int = key(2000, "updates in all", least=1)
    max_minutes: float | None = key(None, "save and stop after this time (exit status 143); null: no limit", above=0.0)
    batch_size: int = key(128, "rows per update, over all accumulation slices", least=1)
    accumulation: int = key(1, "slices an update's rows are computed in; must divide batch_size", least=1)
    eval_every: int = key(500, "updates between evaluations", least=1)
    checkpoint_every: int = key(500, "updates between checkpoints", least=1)
    keep: int = key(2, "step checkpoints kept, besides best.pt", least=1)
    samples: int = key(8, "samples shown at each evaluation", least=0, most=1000)
    seed: int = key(1337, "initial weights, order of the data, dropout, samples", least=0, most=LARGEST_INT)
    device: str = key("auto", "auto | cpu | cuda | cuda:1 | mps")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto", "precision of the matrix products")
    compile: Literal["auto"] | bool = key(
        "auto", "torch.compile the update; auto: where the run is long enough for it to pay"
    )

    def __post_init__(self) -> None:
        check_ranges("train", self)
        check_device("train.device=", self.device)
        if self.batch_size % self.accumulation:
            fitting = ", ".join(str(n) for n in range(1, min(self.batch_size, 1024) + 1) if self.batch_size % n == 0)
            raise UsageError(
                f"train.accumulation={self.accumulation} does not divide train.batch_size={self.batch_size}: "
                f"it can be {fitting}"
            )


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def flat(self) -> dict[str, Any]:
        """{"model.d_model": 16, ...}"""
        return {f"{section}.{name}": v for section, keys in asdict(self).items() for name, v in keys.items()}

    def to_yaml(self) -> str:
        """YAML that `parse` reads back to an equal Config; `d_ff` is resolved."""
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)


SECTIONS: dict[str, type] = {"model": ModelConfig, "data": DataConfig, "optim": OptimConfig, "train": TrainConfig}
TYPES: dict[str, Any] = {f"{s}.{name}": t for s, cls in SECTIONS.items() for name, t in get_type_hints(cls).items()}


def window_start(n_tokens: int, block_size: int) -> int:
    """Where the context of the next token starts when `n_tokens` stand before it: the window rule.

    The window starts with the document; each time its block_size places are full, the oldest
    max(1, block_size // 8) tokens are dropped. Training rows, evaluation and sampling all follow it.
    """
    hop = max(1, block_size // 8)
    return hop * math.ceil(max(0, n_tokens - block_size) / hop)


def load(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """The Config of a YAML file, with `section.key=value` overrides on top; UsageError on anything unclear."""
    if Path(path).exists() and not Path(path).is_file():
        raise UsageError(f"{path} is no file: give a YAML file, such as configs/micro.yaml")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 at byte {error.start}"
        raise UsageError(f"{path} cannot be read: {reason}") from None
    return parse(text, str(path), overrides)


def parse(text: str, source: str = "config", overrides: Iterable[str] = ()) -> Config:
    """The Config of a YAML text; `source` names it in errors. Keys that are missing have their defaults."""
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for where, name, value in [*_yaml_items(text, source), *_override_items(overrides)]:
        section, _, last = name.partition(".")
        values[section][last] = convert(where, name, value)
    return Config(**{section: cls(**values[section]) for section, cls in SECTIONS.items()})


def _override_items(overrides: Iterable[str]) -> Iterator[tuple[str, str, Any]]:
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals:
            raise UsageError(f"{override!r} is not section.key=value, such as train.max_steps=100")
        check_known(name, "")
        yield "", name, value


def _yaml_items(text: str, source: str) -> Iterator[tuple[str, str, Any]]:
    """("file:line: ", "section.key", text or list of texts) of every key. Nothing is interpreted or constructed."""
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "too deep or too large"
        raise UsageError(f"{source} is not valid YAML{place}: {problem}") from None
    seen: set[str] = set()
    for section, keys in _pairs(root, source, "a mapping of the sections " + ", ".join(SECTIONS)):
        place = f"{source}:{section.start_mark.line + 1}: "
        if section.value in seen:
            raise UsageError(f"{place}the section {section.value} is given twice: put its keys together")
        seen.add(section.value)
        if section.value not in SECTIONS:
            raise UsageError(f"{place}unknown section {section.value!r}{nearest(section.value, SECTIONS)}")
        for name, node in _pairs(keys, source, f"a mapping of the keys of {section.value}"):
            place, full = f"{source}:{name.start_mark.line + 1}: ", f"{section.value}.{name.value}"
            check_known(full, place)
            if full in seen:
                raise UsageError(f"{place}{full} is given twice: keep one of the two")
            seen.add(full)
            yield place, full, _plain(node)


def _pairs(node: yaml.Node | None, source: str, expected: str) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    if node is None or (isinstance(node, yaml.ScalarNode) and node.value == ""):
        return  # an empty file or section: all defaults
    names = [name for name, _ in node.value] if isinstance(node, yaml.MappingNode) else [node]
    for name in names:
        if name is node or not isinstance(name, yaml.ScalarNode):
            raise UsageError(f"{source}:{name.start_mark.line + 1}: expected {expected}")
    yield from node.value


def _plain(node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return node.value
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return [item.value for item in node.value]
    return node  # nested: fits no type, the converter refuses it


def check_known(name: str, where: str) -> None:
    """Raise UsageError unless `name` is a section.key; the message has the nearest one."""
    if name not in TYPES:
        homes = [full for full in TYPES if full.partition(".")[2] == name]
        hint = f": did you mean {' or '.join(homes)}?" if homes else nearest(name, TYPES)
        raise UsageError(f"{where}unknown key {name!r}{hint}")


def nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {close[0]}?" if close else ": the keys are listed by python train.py --help"


def convert(where: str, name: str, value: Any) -> Any:
    """The text (or list of texts) given for the key `name` as its declared type; UsageError names key and value."""
    declared = TYPES[name]
    for kind in get_args(declared) if get_origin(declared) in UNIONS else (declared,):
        try:
            return _convert(kind, value)
        except ValueError:
            continue
    shown = repr(value) if isinstance(value, str) else value if isinstance(value, list) else "a nested value"
    raise UsageError(f"{where}{name}={shown} is not {type_name(declared)}")


def _convert(kind: Any, value: Any) -> Any:
    if get_origin(kind) is tuple:
        items = value if isinstance(value, list) else str(value).strip("[]() ").split(",")
        if len(items) != len(get_args(kind)):
            raise ValueError
        return tuple(_convert(item_kind, item) for item_kind, item in zip(get_args(kind), items, strict=True))
    if not isinstance(value, str):
        raise ValueError
    if kind is str:
        return value
    word = value.strip().lower()
    if kind is type(None) and word in ("null", "none", "~", ""):
        return None
    if kind is bool and word in ("true", "yes", "on", "false", "no", "off"):
        return word in ("true", "yes", "on")
    if kind is int:
        number = float(word)
        if not number.is_integer() or abs(number) > 2**53:
            raise ValueError
        return int(number)  # so 6e4 is a whole number, as people write it
    if kind is float:
        number = float(word)
        if not math.isfinite(number):
            raise ValueError
        return number
    if get_origin(kind) is Literal and value.strip() in get_args(kind):
        return value.strip()
    raise ValueError


def type_name(declared: Any) -> str:
    """The type as --help and errors show it."""
    if get_origin(declared) in UNIONS:
        return " | ".join(type_name(kind) for kind in get_args(declared))
    if get_origin(declared) is Literal:
        return " | ".join(get_args(declared))
    if get_origin(declared) is tuple:
        return f"[{', '.join(type_name(kind) for kind in get_args(declared))}]"
    return {int: "a whole number", float: "a number", bool: "true | false", str: "text", type(None): "null"}[declared]


def check_device(where: str, name: str) -> None:
    """Raise UsageError unless the text names a device; whether it exists is seen later (device.choose_device)."""
    if not re.fullmatch(r"auto|cpu|cuda|cuda:(0|[1-9]\d?)|mps", name, re.ASCII):
        raise UsageError(f"{where}{name!r} is not auto, cpu, cuda, cuda:N or mps")


def check_ranges(section: str, values: Any) -> None:
    """Raise UsageError for a number outside the range that its key declares."""
    for f in fields(values):
        value, meta = getattr(values, f.name), f.metadata
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        most = min(meta["most"], LARGEST_INT) if isinstance(value, int) else meta["most"]
        if value <= meta["above"]:
            raise UsageError(f"{section}.{f.name}={value} must be above {meta['above']:g}")
        if not meta["least"] <= value <= most:
            bound = f"at least {meta['least']:g}" if value < meta["least"] else f"at most {most}"
            raise UsageError(f"{section}.{f.name}={value} must be {bound}")


def describe_keys() -> str:
    """Every key with type, default and meaning, for --help."""
    lines = ["keys, as section.key=value on the command line or in YAML (default in brackets):"]
    for section, cls in SECTIONS.items():
        lines.append(f"\n{section}")
        for f in fields(cls):
            default = yaml.safe_dump(
                list(f.default) if isinstance(f.default, tuple) else f.default, default_flow_style=True
            )
            lines.append(f"  {f.name:<17}{f.metadata['meaning']}")
            lines.append(f"  {'':<17}{type_name(TYPES[f'{section}.{f.name}'])} [{default.split(chr(10))[0]}]")
    return "\n".join(lines)
