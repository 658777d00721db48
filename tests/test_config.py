import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import config
from config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
MICRO = ROOT / "configs" / "micro.yaml"
REPEATABLE = settings(deadline=None, derandomize=True, max_examples=150)


def refusal(text: str = "", *overrides: str) -> str:
    """The message a configuration is refused with: one line, whatever the user gave."""
    with pytest.raises(UsageError) as error:
        config.parse(text, "c.yaml", overrides)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


VALUES = [
    ("optim.lr", "1e-3", 0.001),
    ("model.norm_eps", "1e-8", 1e-8),
    ("train.max_steps", "6e4", 60_000),
    ("train.seed", "1", 1),
    ("model.dropout", "0", 0.0),
    ("optim.lr", "1", 1.0),
    ("optim.betas", "[0.8, 0.95]", (0.8, 0.95)),
    ("optim.betas", "0.8,0.95", (0.8, 0.95)),
    ("train.compile", "false", False),
    ("train.compile", "true", True),
    ("train.compile", "auto", "auto"),
    ("model.bias", "on", True),
    ("model.bias", "no", False),
    ("model.d_ff", "100", 100),
    ("data.name", "a=b", "a=b"),
    ("data.name", "1e-3", "1e-3"),
    ("train.device", "cuda:1", "cuda:1"),
]


@pytest.mark.parametrize(("name", "text", "value"), VALUES)
def test_a_value_has_the_declared_type_from_yaml_and_from_the_command_line(name, text, value):
    section, key = name.split(".")
    for cfg in (config.parse(f"{section}:\n  {key}: {text}\n"), config.parse("", overrides=[f"{name}={text}"])):
        got = getattr(getattr(cfg, section), key)
        assert got == value and type(got) is type(value)


WRONG = "train.device=off train.compile=disabled train.compile=1 model.dropout=abc model.bias=maybe model.mlp=ReLU6 "
WRONG += "model.d_model=16.5 model.d_model= train.max_steps=null optim.betas=0.9 data.name="


@pytest.mark.parametrize("override", WRONG.split())
def test_a_value_of_the_wrong_type_is_refused_with_key_and_value(override):
    section, key, text = re.split("[.=]", override, maxsplit=2)
    for message in (refusal(f"{section}:\n  {key}: {text}\n"), refusal("", override)):
        assert f"{section}.{key}={text!r}" in message


def test_a_wrong_value_is_refused_with_its_line_and_a_nested_one_as_such():
    assert "c.yaml:3: optim.lr='fast'" in refusal("model:\noptim:\n  lr: fast\n")
    assert "model.d_model=a nested value" in refusal("model: {d_model: {a: 1}}")
    assert "optim.betas" in refusal("optim: {betas: [0.9, [0.99]]}")
    assert "model.d_model=['16']" in refusal("model: {d_model: [16]}")


def test_a_key_given_twice_is_refused_with_its_line():
    assert "c.yaml:4: train.seed is given twice" in refusal("train:\n  seed: 1\n  keep: 3\n  seed: 1\n")
    assert "c.yaml:2: the section train is given twice" in refusal("train: {seed: 1}\ntrain: {keep: 2}\n")


def test_an_override_wins_over_the_file():
    assert config.parse("train: {seed: 1}", overrides=["train.seed=2"]).train.seed == 2


@pytest.mark.parametrize(
    ("text", "overrides", "wrong", "meant"),
    [
        ("optim: {learning_rte: 0.01}", [], "optim.learning_rte", "optim.lr"),
        ("optim: {warmup_step: 10}", [], "optim.warmup_step", "optim.warmup_steps"),
        ("modle: {d_model: 8}", [], "modle", "model"),
        ("", ["train.max_step=10"], "train.max_step", "train.max_steps"),
        ("", ["max_steps=10"], "max_steps", "train.max_steps"),
        ("", ["name=x"], "name", "data.name or optim.name"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_named(text, overrides, wrong, meant):
    assert refusal(text, *overrides).endswith(f"{wrong!r}: did you mean {meant}?")


def test_a_key_like_no_other_is_refused_with_the_place_where_keys_are_listed():
    assert "'zzz'" in refusal("zzz: {d_model: 8}") and "--help" in refusal("zzz: {d_model: 8}")
    assert "'zzz'" in refusal("", "zzz=8") and "--help" in refusal("", "zzz=8")


@pytest.mark.parametrize("override", ["train.seed", "", "--resume"])
def test_an_override_without_equals_is_refused(override):
    assert repr(override) in refusal("", override) and "section.key=value" in refusal("", override)


@pytest.mark.parametrize(
    ("overrides", "width"),
    [
        (["model.d_model=24"], 96),
        (["model.d_model=24", "model.mlp=swiglu"], 64),  # 8/3 of it exactly
        (["model.d_model=16", "model.mlp=swiglu"], 48),  # 42.67
        (["model.d_model=20", "model.mlp=swiglu"], 56),  # 53.33
        (["model.d_model=24", "model.d_ff=10", "model.mlp=swiglu"], 10),
    ],
)
def test_a_null_d_ff_follows_the_width(overrides, width):
    assert config.parse("model: {d_ff: null}", overrides=overrides).model.d_ff == width


@pytest.mark.parametrize(("d_model", "n_heads"), [(17, 4), (16, 0), (16, -4), (24, 5), (16, 32)])
def test_heads_that_do_not_divide_the_width_are_refused_with_those_that_would(d_model, n_heads):
    fitting = [n for n in range(1, d_model + 1) if d_model % n == 0]
    message = refusal("", f"model.d_model={d_model}", f"model.n_heads={n_heads}")
    assert f"n_heads={n_heads} " in message and f"d_model={d_model}:" in message
    assert message.endswith("can be " + ", ".join(map(str, fitting)))


def test_a_position_that_needs_an_even_width_is_refused_with_what_would_do():
    message = refusal("", "model.position=rope", "model.d_model=20", "model.n_heads=4")
    assert "d_model 20 / n_heads 4 = 5" in message and message.endswith("can be 1, 2, 5, 10")
    assert "even d_model" in refusal("", "model.position=rope", "model.d_model=15", "model.n_heads=3")
    assert config.parse("", overrides=["model.position=rope", "model.d_model=20", "model.n_heads=5"])
    assert "not 15" in refusal("", "model.position=sinusoidal", "model.d_model=15", "model.n_heads=3")


def test_accumulation_that_does_not_divide_the_batch_is_refused_with_what_would():
    message = refusal("", "train.batch_size=12", "train.accumulation=5")
    assert "accumulation=5 " in message and "batch_size=12:" in message and message.endswith("1, 2, 3, 4, 6, 12")


OUTSIDE = "model.d_model=-16 model.d_model=0 model.d_ff=-1 model.block_size=0 model.n_layers=0 model.dropout=-0.1 "
OUTSIDE += "model.dropout=1.0 model.norm_eps=0.0 model.init_std=-1.0 optim.lr=0.0 optim.lr=-1.0 optim.min_lr_ratio=1.5 "
OUTSIDE += "optim.warmup_steps=-1 optim.grad_clip=-1.0 data.val_fraction=0.0 data.val_fraction=1.0 data.split_seed=-1 "
OUTSIDE += "train.seed=-1 train.seed=2147483648 train.max_steps=0 train.batch_size=0 train.accumulation=0 train.keep=0"


@pytest.mark.parametrize("override", OUTSIDE.split())
def test_a_number_out_of_range_is_refused_with_key_value_and_bound(override):
    assert re.match(re.escape(override) + " must be (above|at least|at most) -?[0-9]", refusal("", override))


@pytest.mark.parametrize("betas", ["[0.9, 1]", "[-0.1, 0.9]", "[nan, 0.9]"])
def test_betas_outside_zero_to_one_are_refused(betas):
    assert "optim.betas=" in refusal(f"optim: {{betas: {betas}}}")


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "NaN", ".nan", ".inf", "1e999"])
@pytest.mark.parametrize("name", ["optim.lr", "model.init_std", "optim.grad_clip", "train.max_steps"])
def test_nan_and_infinity_are_refused(name, number):
    assert f"{name}={number!r}" in refusal("", f"{name}={number}")


@pytest.mark.parametrize("device", ["gpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:٣", "CUDA", "", "mps\n"])
def test_a_device_that_is_none_is_refused(device):
    assert f"train.device={device!r}" in refusal("", f"train.device={device}")


DEFAULTS = ["", "\n", "# only a comment\n", "---\n", "{}", "model:\n", "model:\ntrain:\n", "\ufeff"]
NO_MAPPING = ["[]", "- model", "model", "3", "model: 3", "model: [d_model]", "? [a]\n: 3", "model: {{a: 1}: 2}"]


@pytest.mark.parametrize("text", DEFAULTS)
def test_what_is_not_given_has_its_default(text):
    assert config.parse(text) == Config()


@pytest.mark.parametrize("text", NO_MAPPING)
def test_yaml_that_is_no_mapping_of_sections_is_refused(text):
    assert "c.yaml:1: expected a mapping" in refusal(text)


BROKEN = {"model: {": "line 1", "a: b: c": "line 1, column 5", "model:\n\td_model: 3": "line 2", "a: *b": "line 1"}
BROKEN |= {"--- {}\n--- {}": "line 2", "model: \0": "", "[" * 1000: "", "a: " + "{b: " * 1000: ""}


@pytest.mark.parametrize(("text", "place"), BROKEN.items())
def test_invalid_yaml_is_refused_with_its_place(text, place):
    assert refusal(text).startswith("c.yaml is not valid YAML" + (" at " if place else "")) and place in refusal(text)


def test_an_anchor_stands_for_its_value_even_inside_itself():
    assert config.parse("model: {d_model: &n 8, n_layers: *n}").model.n_layers == 8
    assert "nested" in refusal("model: &m {d_model: *m}")
    assert "expected a mapping" in refusal("&a [*a]")


@pytest.mark.parametrize("text", ["{}", "model: {}", "model: {{d_model: {}}}", "train: {{device: {}}}"])
def test_a_python_tag_runs_nothing(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusal(text.format('!!python/object/apply:os.system ["touch x"]'))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_read_is_refused_with_path_and_reason(tmp_path):
    (tmp_path / "latin1.yaml").write_bytes("data: {name: zoë}".encode("latin-1"))
    cases = {"none.yaml": "No such file", "": "is no file", "latin1.yaml": "not UTF-8 at byte 15"}
    for name, reason in cases.items():
        with pytest.raises(UsageError) as error:
            config.load(tmp_path / name)
        assert str(tmp_path / name) in str(error.value) and reason in str(error.value)


def test_a_file_is_named_in_its_errors_and_read_as_utf8(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_bytes("data: {name: zoë}".encode())
    assert config.load(file, ["train.seed=3"]).data.name == "zoë"
    file.write_text("model: {d_modle: 3}")
    with pytest.raises(UsageError, match=r"run\.yaml:1: unknown key"):
        config.load(file)


def test_micro_gives_every_key_there_is():
    given_keys = {s: list(keys) for s, keys in yaml.safe_load(MICRO.read_text(encoding="utf-8")).items()}
    assert given_keys == {s: list(cls.__dataclass_fields__) for s, cls in config.SECTIONS.items()}
    assert {f"{s}.{key}" for s, keys in given_keys.items() for key in keys} == set(Config().flat())


def test_micro_is_the_seeds_model():
    micro = config.load(MICRO).model
    assert (micro.d_model, micro.n_layers, micro.n_heads, micro.block_size) == (16, 1, 4, 8)
    assert (micro.d_ff, micro.head_dim, micro.mlp, micro.norm, micro.norm_eps) == (64, 4, "relu", "rmsnorm", 1e-5)
    assert not (micro.tie_weights or micro.final_norm or micro.bias or micro.qk_norm)


def test_help_has_every_key_with_type_and_default():
    types = {
        "d_model": "a whole number",
        "d_ff": "a whole number | null",
        "dropout": "a number",
        "bias": "true | false",
    }
    types |= {"betas": "[a number, a number]", "mode": "documents | stream", "device": "text"}
    types |= {"compile": "auto | true | false"}
    for block, cls in zip(config.describe_keys().split("\n\n")[1:], config.SECTIONS.values(), strict=True):
        lines = block.splitlines()[1:]
        shown = {line.split()[0]: after.strip() for line, after in zip(lines[::2], lines[1::2], strict=True)}
        assert list(shown) == [key.name for key in fields(cls)]
        for key in fields(cls):
            kind, bracket, default = shown[key.name].rpartition(" [")
            (default,) = yaml.safe_load(bracket + default)
            assert default == (list(key.default) if key.name == "betas" else key.default)
            assert kind == types.get(key.name, kind)


one_to_many, share = st.integers(1, 2**31 - 1), st.floats(0, 0.9)
positive, seeds = st.floats(0, 1e300, exclude_min=True), st.integers(0, 2**31 - 1)


@st.composite
def model_configs(draw):
    n_heads = draw(st.integers(1, 32))
    return ModelConfig(
        block=draw(st.sampled_from(["prenorm", "postnorm"])),
        mlp=draw(st.sampled_from(["relu", "gelu", "gelu_tanh", "swiglu", "relu2"])),
        position=draw(st.sampled_from(["learned", "sinusoidal", "rope", "none"])),
        d_model=2 * n_heads * draw(st.integers(1, 100)),
        n_heads=n_heads,
        d_ff=draw(st.none() | one_to_many),
        block_size=draw(one_to_many),
        bias=draw(st.booleans()),
        dropout=draw(share),
        norm_eps=draw(positive),
    )


# a name of nothing but space, or with control characters, is refused
names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(str.strip)
names |= st.sampled_from(["null", "1e-3", "off", "~", " a", "a: b", "#"])
devices, compiles = st.sampled_from(["auto", "cpu", "cuda:3"]), st.sampled_from(["auto", True, False])
configs = st.builds(
    Config,
    model_configs(),
    st.builds(DataConfig, name=names, split_seed=seeds),
    st.builds(OptimConfig, lr=positive, betas=st.tuples(share, share), grad_clip=st.just(0.0) | positive),
    st.builds(TrainConfig, max_steps=one_to_many, batch_size=one_to_many, seed=seeds, device=devices, compile=compiles),
)


@settings(REPEATABLE, max_examples=60)
@given(configs)
def test_a_written_configuration_reads_back_equal(cfg):
    assert config.parse(cfg.to_yaml()) == cfg


def is_config_or_refused(text: str, overrides: list[str]) -> bool:
    try:
        return isinstance(config.parse(text, "c.yaml", overrides), Config)
    except UsageError as error:
        return len(str(error).splitlines()) == 1


KEYS = list(Config().flat())
PIECES = (
    "model¦d_model¦lr¦betas¦:¦: ¦ ¦\n¦\n  ¦- ¦{¦}¦[¦]¦,¦&a ¦*a¦!!python/name:os.system ¦<<¦'¦#¦? ¦|¦>¦%¦---¦1e-3¦null"
)
PIECES = [*PIECES.split("¦"), '"', "é", "\t"]


@REPEATABLE
@given(st.text() | st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
def test_any_text_is_a_configuration_or_refused_in_one_line(text):
    assert is_config_or_refused(text, [])


@REPEATABLE
@given(st.text() | st.builds("{}={}".format, st.sampled_from(KEYS), st.text() | st.integers() | st.floats()))
def test_any_override_is_a_configuration_or_refused_in_one_line(override):
    assert is_config_or_refused("", [override])


def test_config_needs_neither_torch_nor_numpy():
    code = "import sys, config; sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_window_drops_its_oldest_tokens_each_time_it_is_full():
    for block_size in range(1, 41):
        held: list[int] = []
        for n in range(200):
            # n tokens stand before the next one, and `held` are those it may see
            assert config.window_start(n, block_size) == (held[0] if held else 0)
            assert len(held) <= block_size
            if len(held) == block_size:
                del held[: max(1, block_size // 8)]
            held.append(n)
