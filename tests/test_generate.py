"""Choosing a token, and the loop: against the definitions in NumPy and a naive loop that keeps nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config import ModelConfig, window_start
from errors import RunError, UsageError
from generate import Sampling, generate, next_token, probabilities, store_by_column
from model import GPT

JUST_BELOW_1 = float(np.nextafter(1.0, 0.0))


def tiny_model(vocab_size=27, **keys):
    """An untrained model whose predictions are far from uniform."""
    torch.manual_seed(1)
    keys = {"n_layers": 2, "block_size": 16, "init_std": 0.8, "final_norm": True} | keys
    return GPT(ModelConfig(**keys), vocab_size).eval()


def random_prompts(*lengths, vocab_size=27):
    rng = np.random.default_rng(1)
    return [rng.integers(vocab_size, size=length).tolist() for length in lengths]


def softmax(logits):
    e = np.exp(logits - logits.max())
    return e / e.sum()


def defined(logits, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0):
    """The distribution by its definition, for one row in float64; of equally likely tokens the first counts as more."""
    p = softmax(np.asarray(logits, dtype=np.float64) / temperature)
    ranked = sorted(range(len(p)), key=lambda i: (-logits[i], i))
    kept = [i for i in ranked[:top_k] if p[i] >= min_p * p.max()]
    for size in range(1, len(kept) + 1):
        if top_p < 1 and p[kept[:size]].sum() >= top_p * p[kept].sum():
            kept = kept[:size]
            break
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


def on_the_edge(logits, temperature, top_k, top_p, min_p):
    """Whether rounding decides which tokens are kept."""
    p = softmax(np.asarray(logits) / temperature)
    shares = np.cumsum(-np.sort(-defined(logits, temperature, top_k, 1.0, min_p)))
    ratios = p / p.max()
    return (top_p < 1 and (abs(shares - top_p) < 1e-9).any()) or ((ratios < 1) & (abs(ratios - min_p) < 1e-9)).any()


@pytest.mark.parametrize("temperature", [0.1, 0.8, 1.0, 3.0])
def test_temperature_divides_the_logits(temperature):
    logits = np.random.default_rng(0).normal(size=(5, 27)) * 4
    expected = [softmax(row / temperature) for row in logits]
    np.testing.assert_allclose(probabilities(torch.tensor(logits), Sampling(temperature)), expected, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-30, 1e-6])
def test_a_tiny_temperature_is_the_most_likely_token(temperature, dtype):
    logits = torch.tensor([[-3.0, 88.0, 87.99], [0.002, 0.001, -1e30], [0.0, 1e8, 1e9]], dtype=dtype)
    assert probabilities(logits, Sampling(temperature)).tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]


def test_temperature_zero_is_greedy_and_repeatable():
    logits = torch.randn(50, 27)
    drawn = [
        next_token(logits, torch.full((50,), u, dtype=torch.float64), Sampling(0)).tolist()
        for u in (0.0, 0.5, JUST_BELOW_1)
    ]
    assert drawn == [np.argmax(logits.numpy(), axis=-1).tolist()] * 3
    model, prompts = tiny_model(), random_prompts(3, 5)
    assert generate(model, prompts, 40, Sampling(0), seed=1) == generate(model, prompts, 40, Sampling(0), seed=2)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("temperature", v) for v in (-1.0, -1e-45, float("nan"), float("inf"), float("-inf"))]
    + [("top_k", 0), ("top_k", -1)]
    + [("top_p", v) for v in (0.0, -0.1, 1.1, float("nan"), float("inf"))]
    + [("min_p", v) for v in (-0.1, 1.1, float("nan"), float("inf"))],
)
def test_a_setting_out_of_range_is_refused_by_name_and_value(setting, value):
    with pytest.raises(UsageError, match=rf"{setting.replace('_', '-')} {value} must be"):
        Sampling(**{setting: value})


@pytest.mark.parametrize("sampling", [Sampling(top_k=27), Sampling(top_k=200), Sampling(top_p=1.0), Sampling(min_p=0)])
def test_a_filter_that_leaves_everything_changes_no_sample(sampling):
    model, prompts = tiny_model(), random_prompts(1, 4, 9)
    assert generate(model, prompts, 40, sampling, seed=3) == generate(model, prompts, 40, Sampling(), seed=3)


@pytest.mark.parametrize("sampling", [Sampling(top_k=1), Sampling(top_p=1e-12), Sampling(min_p=1.0)])
def test_the_narrowest_filters_are_greedy(sampling):
    model, prompts = tiny_model(), random_prompts(1, 4, 9)
    assert generate(model, prompts, 40, sampling, seed=3) == generate(model, prompts, 40, Sampling(0), seed=3)


# whole numbers tie often, which is where a filter by threshold keeps too many
LOGITS = st.lists(st.integers(-3, 3) | st.floats(-4, 4).map(lambda x: round(x, 3)), min_size=1, max_size=16)
SETTINGS = [
    {"temperature": 1.5, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for top_k in (None, 1, 4, 20)
    for top_p in (1.0, 0.5, 0.8, 0.95)
    for min_p in (0.0, 0.1, 0.3)
]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(LOGITS)
def test_the_filters_keep_what_their_definitions_say_and_renormalise_it(logits):
    for keys in SETTINGS:
        p = probabilities(torch.tensor([logits], dtype=torch.float64), Sampling(**keys))[0].numpy()
        expected = defined(logits, **keys)
        assert abs(p.sum() - 1) < 1e-12
        assert on_the_edge(logits, **keys) or np.allclose(p, expected, rtol=1e-9, atol=0), (keys, p, expected)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"top_k": 2}, [0, 0.5, 0, 0.5, 0]),  # the first two of the three that tie
        ({"top_p": 0.5}, [0, 0.5, 0, 0.5, 0]),  # two quarters have the half: no third
        ({"top_p": 0.51}, [0, 1 / 3, 0, 1 / 3, 1 / 3]),
        ({"min_p": 0.5}, [0.125, 0.25, 0.125, 0.25, 0.25]),  # "at least": half as likely stays
        ({"min_p": 1.0}, [0, 1 / 3, 0, 1 / 3, 1 / 3]),  # all that tie for the first place
        ({"top_k": 3, "top_p": 0.6}, [0, 0.5, 0, 0.5, 0]),  # 0.6 of what top-k left: two thirds
        ({"min_p": 0.6, "top_p": 0.6}, [0, 0.5, 0, 0.5, 0]),  # 0.6 of what min-p left: two thirds
    ],
)
def test_ties_and_exact_shares_are_decided_as_defined(keys, expected):
    p = torch.tensor([[0.125, 0.25, 0.125, 0.25, 0.25]], dtype=torch.float64)
    np.testing.assert_allclose(probabilities(p.log(), Sampling(**keys))[0], expected, atol=1e-12)


def test_draws_follow_the_distribution():
    n, logits = 200_000, np.array([1.0, -2.0, 0.5, 3.0, -8.0, 0.5])
    uniform = torch.from_numpy(np.random.default_rng(7).random(n))
    ids = next_token(torch.tensor(logits).expand(n, -1), uniform, Sampling(0.8, top_k=5))
    p = defined(logits, temperature=0.8, top_k=5)
    counts = np.bincount(ids.numpy(), minlength=6)
    assert counts[p == 0].sum() == 0
    assert (abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p))).all()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(LOGITS)
def test_the_ends_of_the_uniform_range_draw_no_impossible_token(logits):
    rows = torch.tensor([logits, logits], dtype=torch.float64)
    ends = torch.tensor([0.0, JUST_BELOW_1], dtype=torch.float64)
    for keys in SETTINGS:
        possible = np.flatnonzero(defined(logits, **keys))
        first, last = next_token(rows, ends, Sampling(**keys)).tolist()
        assert on_the_edge(logits, **keys) or (first == possible[0] and last in possible), (keys, possible)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_single_logit_that_is_not_finite_is_an_error_and_the_largest_finite_ones_are_none(value, temperature):
    logits, uniform = torch.full((3, 27), torch.finfo(torch.float32).max), torch.full((3,), 0.5).double()
    assert next_token(logits, uniform, Sampling(temperature)).max() < 27
    logits[1, 4] = value
    with pytest.raises(RunError, match="not finite"):
        next_token(logits, uniform, Sampling(temperature))


def test_tokens_too_unlikely_for_a_number_are_not_drawn():
    logits = torch.tensor([[-1e4, 0.0, -1e4, 0.0, -1e4]]).expand(2, -1)
    ends = torch.tensor([0.0, JUST_BELOW_1], dtype=torch.float64)
    assert next_token(logits, ends, Sampling()).tolist() == [1, 3]


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("name", ["blocks.0.mlp.fc.weight", "lm_head.weight"])  # the latter breaks one logit alone
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_weight_is_an_error_before_anything_is_drawn(temperature, name, value):
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter(name)[0, 0] = value
    with pytest.raises(RunError, match="logits are not finite"):
        generate(model, [[1]], 5, Sampling(temperature), seed=0)


@pytest.mark.parametrize("temperature", [0, 1.0, 5.0])
def test_ids_that_only_pad_the_vocabulary_are_never_drawn(temperature):
    model, prompts = tiny_model(vocab_size=128), random_prompts(*[1] * 100, vocab_size=65)
    with torch.no_grad():
        model.lm_head.weight[65:] *= 10  # so that they would be drawn
    drawn = {cut: generate(model, prompts, 10, Sampling(temperature), seed=0, vocab_size=cut) for cut in (65, None)}
    assert max(map(max, drawn[None])) >= 65
    assert max(map(max, drawn[65])) < 65
    assert sum(map(len, drawn[65])) == 1000


def naive_greedy(model, prompt, new):
    """Each next token from a forward pass over the whole window, which moves as the rule is told in words."""
    block_size, ids = model.config.block_size, list(prompt)
    while len(ids) < len(prompt) + new:
        start = 0
        for n in range(1, len(ids) + 1):
            start += max(1, block_size // 8) if n - start > block_size else 0
        assert start == window_start(len(ids), block_size)
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids[start:]]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("position", "block_size", "length"),
    [(position, 16, 40) for position in ("learned", "sinusoidal", "rope", "none")]
    + [("learned", 16, 16), ("rope", 16, 17), ("learned", 5, 3), ("rope", 1, 2)],
)
def test_past_the_context_the_window_moves_by_its_rule(position, block_size, length):
    model, prompts = tiny_model(position=position, block_size=block_size), random_prompts(length)
    expected = naive_greedy(model, prompts[0], 100)
    assert len(set(expected)) >= 2
    for use_cache in (True, False):
        assert generate(model, prompts, 100, Sampling(0), seed=0, use_cache=use_cache) == [expected]


def test_the_cache_does_not_change_what_is_drawn():
    model, prompts = tiny_model(), random_prompts(40, 3, 17)
    cached, uncached = (generate(model, prompts, 100, Sampling(), seed=5, use_cache=c) for c in (True, False))
    assert cached == uncached


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "rope", "none"])
def test_prompts_of_different_lengths_in_a_batch_give_the_text_and_logits_of_each_alone(position):
    model, prompts = tiny_model(position=position), random_prompts(1, 5, 12, 12, 12)  # most go on to the end
    seen = []
    model.register_forward_hook(lambda model, inputs, output: seen.append(output.double()))

    def greedy(prompts, use_cache):
        seen.clear()
        return generate(model, prompts, 64, Sampling(0), seed=0, use_cache=use_cache), torch.stack(seen, dim=1)

    together, logits = greedy(prompts, use_cache=True)  # logits[row, t]: after t + 1 tokens
    uncached, uncached_logits = greedy(prompts, use_cache=False)
    assert together == uncached
    torch.testing.assert_close(logits, uncached_logits, rtol=0, atol=1e-4)
    for row, prompt in enumerate(prompts):
        alone, alone_logits = greedy([prompt], use_cache=True)
        first, steps = len(prompt) - 1, alone_logits.size(1)
        assert alone == [together[row]]
        torch.testing.assert_close(logits[row, first : first + steps], alone_logits[0], rtol=0, atol=1e-4)


def test_each_row_ends_before_its_own_stop_token():
    model, prompts, stop = tiny_model(), random_prompts(*[1, 2] * 10), 7
    prompts[3] = [stop, stop]  # a stop token in the prompt starts a text
    endless = generate(model, prompts, 40, Sampling(), seed=1)
    rows = generate(model, prompts, 40, Sampling(), seed=1, stop_id=stop)
    assert rows == [row[: row.index(stop)] if stop in row else row for row in endless]
    assert len(set(map(len, rows))) > 5
    for i, prompt in enumerate(prompts):
        assert generate(model, [prompt], 40, Sampling(), seed=1, stop_id=stop, first_row=i) == [rows[i]]


@pytest.mark.parametrize("use_cache", [True, False])
def test_rows_that_have_ended_are_left_out_and_change_no_other(use_cache):
    model, prompts, stop = tiny_model(), random_prompts(*range(1, 21)), 7
    alone = [generate(model, [p], 40, Sampling(), seed=1, stop_id=stop, first_row=i) for i, p in enumerate(prompts)]
    computed = []
    model.register_forward_hook(lambda model, inputs, output: computed.append(len(output)))
    rows = generate(model, prompts, 40, Sampling(), seed=1, stop_id=stop, use_cache=use_cache)
    assert rows == [row for (row,) in alone]
    # after t steps a row goes on if its text, the stop token included, is longer
    lengths = [len(p) - 1 + min(40, len(row) + 1) for p, row in zip(prompts, rows, strict=True)]
    assert all(size < 2 * sum(length > t for length in lengths) for t, size in enumerate(computed))
    assert len(computed) == max(lengths) and computed[-1] < 3


def test_storing_the_weights_by_column_changes_no_value_and_no_sample():
    model, prompts = tiny_model(tie_weights=True), random_prompts(1, 4, 20)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    before = generate(model, prompts, 40, Sampling(), seed=2)
    store_by_column(model)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert model.lm_head.weight is model.wte.weight
    assert {p.stride() for name, p in model.named_parameters() if name.endswith("fc.weight")} == {(1, 64)}
    assert generate(model, prompts, 40, Sampling(), seed=2) == before


def test_a_sample_does_not_depend_on_how_many_are_drawn():
    model, prompts = tiny_model(), [[0]] * 20
    twenty = generate(model, prompts, 30, Sampling(), seed=4, stop_id=7)
    assert len(set(map(tuple, twenty))) > 15
    assert generate(model, prompts[:7], 30, Sampling(), seed=4, stop_id=7) == twenty[:7]
    assert generate(model, prompts[5:], 30, Sampling(), seed=4, stop_id=7, first_row=5) == twenty[5:]
    assert generate(model, prompts, 30, Sampling(), seed=5, stop_id=7) != twenty


@pytest.mark.parametrize("training", [True, False])
def test_generating_leaves_the_random_state_and_the_mode_alone_and_drops_nothing_out(training):
    model = tiny_model(dropout=0.5).train(training)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    rows = generate(model, [[1]] * 4, 30, Sampling(), seed=0)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert model.training == training
    assert rows == generate(tiny_model(dropout=0.0), [[1]] * 4, 30, Sampling(), seed=0)


@pytest.mark.parametrize("new", [1, 2, 37])
def test_without_a_stop_token_every_row_has_the_length_asked_for(new):
    rows = generate(tiny_model(), random_prompts(1, 5, 30), new, Sampling(), seed=0)
    assert [len(row) for row in rows] == [new] * 3
