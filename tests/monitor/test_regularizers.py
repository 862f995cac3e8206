"""Penalties on attention, against autograd through the scores that models write out themselves."""

import copy
import functools
from unittest import mock

import pytest
import torch
from taps.families import build
from torch.nn import functional
from torch.testing import assert_close

import massieu
from massieu.checks import UserError
from massieu.monitor.regularizers import collect, entropy_floor, logit_bound, z_loss

FAMILIES = {
    "gpt2": "causal",
    "llama": "grouped keys",
    "mistral": "window",
    "bert": "both directions",
    "gemma2": "softcap",
    "bart": "encoder, decoder, cross",
    "gptj": "outside the interface",
    "bloom": "scores only",
}
PENALTIES = {
    "entropy": lambda attention: entropy_floor(attention, 3.0),
    "normalized": lambda attention: entropy_floor(attention, 0.99, normalized=True),
    "z": z_loss,
    "logit": lambda attention: logit_bound(attention, 0.05, sharpness=3.0),
}


def eager(name, padding):
    model, inputs = build(name, padding=padding, attn_implementation="eager")
    return model.double(), inputs


def forward(model, inputs):
    """Run a model, and return the scores that its eager attention gives to softmax, as part of the graph."""
    found, own = [], functional.softmax

    def softmax(scores, *args, **kwargs):
        if scores.dim() >= 3:
            found.append(scores if scores.dim() == 4 else scores.unflatten(0, (2, -1)))
        return own(scores, *args, **kwargs)

    with mock.patch.object(functional, "softmax", softmax):
        model(**inputs)
    return found


def reference(name, scores, present):
    """The penalty by definition, from matrices of weights."""
    heads = []
    for matrix, rows in zip(scores, present, strict=True):
        seen = matrix > -1e4
        matrix = matrix.double().masked_fill(~seen, -torch.inf)
        kept = rows[:, None].expand(matrix.shape[:3])
        weight = matrix.softmax(-1)
        entropy = -(weight * weight.clamp_min(1e-300).log()).sum(-1)
        atoms = seen.expand_as(matrix).sum(-1)
        for head in range(matrix.shape[1]):
            rows = kept[:, head]
            if name == "entropy":
                heads.append((3.0 - entropy[:, head][rows].mean()).clamp_min(0) ** 2)
            elif name == "normalized":
                rows = rows & (atoms[:, head] > 1)
                share = entropy[:, head][rows] / atoms[:, head][rows].log()
                heads.append((0.99 - share.mean()).clamp_min(0) ** 2)
            elif name == "z":
                heads.append(matrix[:, head].logsumexp(-1)[rows].square().mean())
            else:
                largest = (3.0 * matrix[:, head]).logsumexp(-1) / 3.0
                heads.append((largest[rows].max() - 0.05).clamp_min(0) ** 2)
    return torch.stack(heads).mean()


def rows_of(inputs, scores):
    """Which queries are tokens, for every matrix of scores."""
    masks = [inputs.get("attention_mask"), inputs.get("decoder_attention_mask")]
    known = {mask.shape: mask.bool() for mask in masks if mask is not None}
    return [known.get((len(each), each.shape[2]), torch.ones(len(each), each.shape[2]).bool()) for each in scores]


def gradients(value, model, retain=True):
    found = torch.autograd.grad(value, [*model.parameters()], retain_graph=retain, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found, strict=True)]


# The others take softmax in float32, where the float64 mask of a row without atoms makes nan of the whole sequence.
LEFT = ("gpt2", "bert", "bart")


@pytest.mark.parametrize(
    ("family", "padding"),
    [*((name, padding) for name in FAMILIES for padding in ("none", "right")), *((name, "left") for name in LEFT)],
)
def test_penalties_and_their_gradients_are_those_of_the_written_out_softmax(family, padding):
    model, inputs = eager(family, padding)
    scores = forward(model, inputs)
    with collect(model) as attention:
        model(**inputs)
    assert len(scores) == len(attention.calls) > 0
    for name, penalty in PENALTIES.items():
        wanted = reference(name, scores, rows_of(inputs, scores))
        assert wanted > 1e-4  # the floor and the bound are in reach, so that there is something to compare
        # Models that compute their scores in float32 whatever comes in agree to its digits.
        tolerance = 1e-9 if all(each.dtype == torch.float64 for each in scores) else 1e-4
        assert_close(penalty(attention), wanted, rtol=tolerance, atol=1e-12, check_dtype=False)
        for own, other in zip(gradients(penalty(attention), model), gradients(wanted, model), strict=True):
            assert_close(own, other, rtol=100 * tolerance, atol=1e-3 * tolerance)


def test_a_sink_is_an_atom_of_the_entropy_but_no_score_to_be_bounded():
    model, inputs = build("gpt_oss", attn_implementation="eager")  # in float32: its experts know no other
    scores = forward(model, inputs)  # their last column is the sink, and each row is shifted by its maximum
    with collect(model) as attention:
        model(**inputs)
    everything = [torch.ones(2, 24).bool()] * len(scores)
    for name in ("entropy", "normalized"):
        wanted = reference(name, scores, everything)
        assert_close(PENALTIES[name](attention), wanted, rtol=1e-5, atol=1e-8, check_dtype=False)
        for own, other in zip(gradients(PENALTIES[name](attention), model), gradients(wanted, model), strict=True):
            assert_close(own, other, rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.fill_(1000.0)
    with collect(model) as attention:
        model(**inputs)
    assert logit_bound(attention, 50.0) == 0
    assert z_loss(attention) > 50.0**2


def test_a_bias_of_the_scores_counts_in_every_penalty():
    model, inputs = eager("t5", "right")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "relative_attention_bias" in name:
                weight.normal_(std=2.0, generator=torch.Generator().manual_seed(0))
        scores = forward(model, inputs)
        with collect(model) as attention:
            model(**inputs)
        for name, penalty in PENALTIES.items():
            # The model rounds its scores to float32.
            wanted = reference(name, scores, rows_of(inputs, scores))
            assert_close(penalty(attention), wanted, rtol=1e-4, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("family", ["gemma2", "bloom", "gpt2"])
def test_autocast_around_the_penalty_does_not_change_it(family):
    model, inputs = build(family, attn_implementation="eager")
    found = []
    for autocast in (True, False):
        with collect(model) as attention:
            model(**inputs)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(torch.stack([penalty(attention) for penalty in PENALTIES.values()]))
    assert torch.equal(*found)


def test_the_fused_attention_of_a_model_is_penalised_like_its_written_out_one():
    model, inputs = eager("gpt2", "right")
    scores = forward(model, inputs)
    fused = build("gpt2", padding="right", attn_implementation="sdpa")[0].double()
    with collect(fused) as attention:
        fused(**inputs)
    for name, penalty in PENALTIES.items():
        wanted = gradients(reference(name, scores, rows_of(inputs, scores)), model)
        for own, other in zip(gradients(penalty(attention), fused), wanted, strict=True):
            assert_close(own, other, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", ["massieu", "torch_encoder", "multihead"])
def test_plain_modules_get_gradients_for_queries_and_keys(name):
    model, inputs = build(name)
    model = model.double().train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        if isinstance(part, torch.nn.MultiheadAttention):
            part.dropout = 0.0
    sharpen(model, 8)
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    with collect(model) as attention:
        model(**inputs)
    step = 1e-6
    weight = next(p for key, p in model.named_parameters() if "in_proj_weight" in key or "k_proj" in key)
    for penalty in PENALTIES.values():
        slope = torch.autograd.grad(penalty(attention), weight, retain_graph=True)[0]
        direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        values = []
        for sign in (step, -step):
            changed = copy.deepcopy(model).eval()
            dict(changed.named_parameters())[name_of(model, weight)].data.add_(sign * direction)
            with torch.no_grad(), collect(changed) as moved:
                changed(**inputs)
            with torch.no_grad():
                values.append(penalty(moved))
        assert slope.abs().max() > 0
        assert_close((slope * direction).sum(), (values[0] - values[1]) / (2 * step), rtol=1e-5, atol=1e-9)


def sharpen(model, factor):
    """Heads far from the equal weights that most models begin with."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "in_proj_weight")):
                weight.mul_(factor)


def name_of(model, weight):
    return next(key for key, p in model.named_parameters() if p is weight)


def test_a_floor_raises_the_entropy_of_a_collapsed_head():
    torch.manual_seed(0)
    model = massieu.nn.Transformer(16, 1, 2, vocabulary=10)
    sharpen(model, 40)
    words = torch.randint(10, (4, 12))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    seen = []
    for _ in range(80):
        with collect(model) as attention:
            model(words)
        penalty = entropy_floor(attention, 1.2)
        seen.append(penalty.item())
        optimizer.zero_grad()
        penalty.backward()
        optimizer.step()
    assert seen[0] > 0.1
    assert seen[-1] < 0.02 * seen[0]


def test_heads_on_the_right_side_are_left_alone():
    model, inputs = eager("gpt2", "none")
    with collect(model) as attention:
        model(**inputs)
    for penalty in (entropy_floor(attention, 1e-3), logit_bound(attention, 1e3)):
        assert penalty == 0
        assert all(not g.any() for g in gradients(penalty, model))


def test_the_smooth_maximum_lies_above_the_true_one_by_no_more_than_its_gap():
    model, inputs = eager("gpt2", "none")
    scores = forward(model, inputs)
    with collect(model) as attention:
        model(**inputs)
    true = torch.stack([each[:, head].max() for each in scores for head in range(each.shape[1])])
    for sharpness in (1.0, 8.0, 64.0):
        found = logit_bound(attention, 1e-6, sharpness=sharpness)
        assert (true - 1e-6).square().mean() <= found
        assert found <= (true - 1e-6 + torch.tensor(24.0).log() / sharpness).square().mean()


def checkpointed(reentrant):
    model, inputs = build("gpt2")
    model = model.double().train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model, inputs


@pytest.mark.parametrize("inside", [True, False])
def test_checkpointed_layers_give_the_same_gradients(inside):
    plain, inputs = checkpointed(False)
    plain.gradient_checkpointing_disable()
    found = []
    for model in (plain, checkpointed(False)[0]):
        with collect(model) as attention:
            loss = model(**inputs, labels=inputs["input_ids"]).loss
            total = loss + sum(penalty(attention) for penalty in PENALTIES.values())
            if inside:
                total.backward()
        if not inside:
            total.backward()
        assert len(attention.calls) == 2
        found.append([p.grad for p in model.parameters()])
    for own, other in zip(*found, strict=True):
        assert_close(own, other, rtol=1e-12, atol=1e-14)


def test_checkpointed_layers_outside_the_interface_give_the_same_gradients():
    found = []
    for checkpoint in (False, True):
        model, inputs = eager("bloom", "none")
        model.train()
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with collect(model) as attention:
            model(**inputs)
        found.append(gradients(entropy_floor(attention, 3.0), model, retain=False))
    assert any(each.any() for each in found[0])
    for own, other in zip(*found, strict=True):
        assert_close(own, other, rtol=1e-12, atol=1e-14)


def test_reentrant_checkpoints_are_refused_with_a_sentence():
    model, inputs = checkpointed(True)
    with collect(model) as attention:
        model(**inputs)
    for penalty in PENALTIES.values():
        with pytest.raises(RuntimeError, match="checkpoint layers with use_reentrant=False"):
            penalty(attention)
        with torch.no_grad():
            assert penalty(attention) >= 0


@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision_gives_a_penalty_in_single_and_gradients_close_to_the_exact_ones(autocast):
    exact, inputs = eager("gpt2", "right")
    with collect(exact) as attention:
        exact(**inputs)
    wanted = [p(attention) for p in PENALTIES.values()]
    model = build("gpt2", padding="right")[0]
    model = model if autocast else model.bfloat16()
    with collect(model) as attention, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(**inputs)
        found = [p(attention) for p in PENALTIES.values()]
    for own, other in zip(found, wanted, strict=True):
        assert own.dtype == torch.float32
        # bfloat16 has eight bits; measured: 0.4 to 1.2 percent.
        assert_close(own.double(), other, rtol=0.04, atol=1e-3)
        flat = [
            torch.cat([g.double().flatten() for g in gradients(value, of)])
            for value, of in ((own, model), (other, exact))
        ]
        assert functional.cosine_similarity(*flat, dim=0) > 0.99


def test_a_compiled_model_is_observed_uncompiled():
    model, inputs = eager("gpt2", "none")
    compiled = torch.compile(model, backend="eager")
    compiled(**inputs)
    found = []
    for each in (compiled, model):
        with collect(each) as attention:
            each(**inputs)
        found.append(gradients(z_loss(attention), model))
    for own, other in zip(*found, strict=True):
        assert torch.equal(own, other)
    torch.compiler.reset()


def test_rows_without_atoms_have_no_gradient_instead_of_nan():
    query = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    key = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    empty = torch.ones(3, 5, dtype=torch.bool)
    empty[1] = False
    for penalty in (functools.partial(entropy_floor, floor=3.0), z_loss):
        found = penalty(massieu.row_statistics(query, key, empty))
        slope = torch.autograd.grad(found, query)[0]
        assert slope[:, :, 1].abs().max() == 0
        assert slope.isfinite().all()
        kept = massieu.row_statistics(query[:, :, [0, 2]], key)
        assert_close(found, penalty(kept))


def test_statistics_of_an_attend_call_serve_as_well():
    query, key, value = torch.randn(3, 2, 4, 5, 6).unbind(0)
    light = massieu.attend(query, key, value, statistics="light").statistics
    full = massieu.attend(query, key, value).statistics
    heads = (1.5 - full.entropy.mean((0, 2))).clamp_min(0).square().mean()
    assert_close(entropy_floor(light, 1.5), heads)
    assert_close(entropy_floor([light, full], 1.5), heads)


def test_several_forward_passes_are_averaged_and_can_be_forgotten():
    model, inputs = eager("gpt2", "none")
    with collect(model) as attention:
        model(**inputs)
        first = z_loss(attention)
        model(input_ids=inputs["input_ids"].flip(1))
        both = z_loss(attention)
        attention.clear()
        model(input_ids=inputs["input_ids"].flip(1))
        second = z_loss(attention)
    assert_close(both, (first + second) / 2)


def test_a_model_without_queries_left_has_a_penalty_of_zero():
    model, inputs = build("bert")
    with collect(model) as attention:
        model(**inputs, attention_mask=torch.zeros(2, 24, dtype=torch.long))
    assert entropy_floor(attention, 1.0).item() == 0


def test_what_is_collected_from_is_a_module():
    with (
        pytest.raises(UserError, match="model"),
        collect("x"),
    ):
        pass


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a: entropy_floor(a, 0.0), "floor must"),
        (lambda a: entropy_floor(a, "1"), "floor must"),
        (lambda a: entropy_floor(a, float("nan")), "floor must"),
        (lambda a: entropy_floor(a, 1.5, normalized=True), "normalized floor must"),
        (lambda a: entropy_floor([], 1.0), "got nothing"),
        (lambda a: z_loss(torch.zeros(3)), "got Tensor"),
        (lambda a: logit_bound(a, -1.0), "bound must"),
        (lambda a: logit_bound(a, 1.0, sharpness=0), "sharpness must"),
        (lambda a: logit_bound([], 1.0), "queries and keys, got list"),
        (z_loss, "no attention was observed"),
        (lambda a: logit_bound(a, 1.0), "no attention was observed"),
        (
            lambda a: entropy_floor(massieu.row_statistics(torch.zeros(1, 2), torch.zeros(1, 2)), 0.5, normalized=True),
            "got RowStatistics",
        ),
    ],
)
def test_bad_input_gets_one_sentence(call, words):
    with collect(torch.nn.Linear(2, 2)) as nothing, pytest.raises(UserError, match=words):
        call(nothing)
