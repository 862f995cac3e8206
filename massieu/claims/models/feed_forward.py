"""The fully connected layer of a trained model: no linear map, no identity, and no classical Hopfield layer."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from massieu.accumulators.regression import Regression, held_out_r2
from massieu.checks import UserError
from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import widest
from massieu.claims.models.hidden_clouds import reader, through
from massieu.claims.models.trained_model import inspection, median, profile
from massieu.claims.registry import claim
from massieu.geometry.jacobians import FieldTest, field_test
from massieu.inspection.layer_statistics import LayerStatistics, States
from massieu.inspection.tokens import Tokens
from massieu.models.residual_stream import find_residual_stream

LEFT = 0.1  # of a variance: a map that leaves less is close


@claim(
    "C44",
    source=Source.OURS,
    place="on section 6 of the paper: the question how close the FC layer is to a linear one",
    title="Fully connected layers of a trained model are not linear",
    wording="The fully connected layer of a trained model is no linear map, nor close to one.",
    reading=(
        "In the median layer of a trained model one matrix and an offset, fitted by ridge regression to half of the"
        " documents, leave more than a tenth of the variance of the layer's output, before the residual is added, on"
        " the other half, as they do of squares of linear maps of 2000 Gaussian inputs. In the control the outputs are"
        " linear maps. In the embedded model 15% is left in the first layer, 48% to 65% in the others."
    ),
    reference="a linear map of Gaussian inputs, of which the same regression leaves nothing",
    formula="m ≠ W x + b, R² < 0.9",
    on_model=True,
)
def linear_mlp(trial: Trial) -> Evidence:
    """Variance of unseen rows that a ridge regression leaves: of the MLP's update, of squares, of a linear map."""
    found = inspection(trial.model)
    x = torch.randn(2000, 16, generator=trial.generator, dtype=torch.float64)
    matrix = torch.randn(16, 16, generator=trial.generator, dtype=torch.float64)

    def left(power: int) -> float:
        halves = Regression(0, 0), Regression(0, 0)
        for half, rows in zip(halves, x.chunk(2), strict=True):
            half.update(rows, (rows @ matrix) ** power)
        return 1 - held_out_r2(*halves)

    of_model = 1 - median(found, "fc_linear_r2")
    return Evidence(
        printed=widest(exceeds(of_model), exceeds(left(2))),
        control=exceeds(trial.control(left(1), of_model)),
        table={
            "linear R²": median(found, "fc_linear_r2"),
            "linear R², all tokens": median(found, "fc_linear_r2_all_tokens"),
        },
        curve=profile(found, "fc_linear_r2", "fc_linear_control"),
    )


@claim(
    "X16",
    source=Source.OURS,
    place="on section 6 of the paper: the question how close the FC layer is to an identity mapping",
    title="Fully connected layers of a trained model are no identity",
    wording="The fully connected layer of a trained model is no identity mapping, nor close to one.",
    reading=(
        "With the residual: in the median layer of a trained model the stream behind the fully connected layer differs"
        " from the stream before it by more than a tenth of its own variance over the tokens of a text, as do 512"
        " Gaussian tokens that are rotated. In the control these tokens move by a fifth of their length. In the"
        " embedded model the difference is about a fifth in the median layer, a tenth in two layers, and more than all"
        " in the first, where the layer replaces the embedding."
    ),
    reference="clouds of tokens that move by a fifth of their length, 0.04 / 1.04 of the variance",
    formula="E|m|² > 0.1 tr Cov(x + m)",
    on_model=True,
)
def identity_mlp(trial: Trial) -> Evidence:
    """Variance of the stream that the identity leaves: of the model, of a rotation, of a small random update."""
    found = inspection(trial.model)
    x = torch.randn(512, 16, generator=trial.generator, dtype=torch.float64)
    small = 0.2 * torch.randn(512, 16, generator=trial.generator, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(16, 16, generator=trial.generator, dtype=torch.float64)).Q

    def left(update: Tensor) -> float:
        tokens = Tokens.of(torch.ones(8, 64, dtype=torch.bool), range(8))
        statistics = LayerStatistics(16)
        statistics.update(tokens, States(x, x, x, x, None, x, x, update, x + update, x + update))
        return 1 - statistics.finish()["fc_identity_r2"]

    rows = found.layers["fc_identity_r2"]
    of_model = 1 - median(found, "fc_identity_r2")
    return Evidence(
        printed=widest(exceeds(of_model), exceeds(left(x @ rotation - x))),
        control=exceeds(trial.control(left(small), of_model)),
        table={
            "identity R² with the residual": median(found, "fc_identity_r2"),
            "in the first layer": float(rows.iloc[0]),
            "in the layer closest to the identity": float(rows.max()),
            "up to a constant": median(found, "fc_identity_offset_r2"),
        },
        curve=profile(found, "fc_identity_r2", "fc_identity_offset_r2", "fc_linear_r2"),
    )


def exceeds(left: float) -> Gap:
    """Return the gap of the statement that a map leaves more of a variance than counts as close."""
    return Gap(LEFT / max(left, 1e-9), 1.0)


@claim(
    "X18",
    source=Source.PAPER,
    place="appendix B",
    title="The fully connected layer is a classical Hopfield layer",
    wording="Perhaps the FC layer can be seen as an original Hopfield network layer.",
    reading=(
        "Our reading: a classical memory moves along W^T f(W x), which is the gradient of an energy. In the median"
        " layer of a trained model, at least nine tenths of the energy of the Jacobians of the fully connected layer"
        " are symmetric, in the output of the norm in front of it, at the tokens of two passages (full: eight). Under"
        " the condition the same is measured of a layer of 128 random patterns in 32 dimensions; in the control its two"
        " matrices are independent."
    ),
    reference="the symmetric Jacobian that every gradient has",
    formula="J = J^T",
    correction=(
        "If its second matrix is the transpose of the first. Training does not tie them: about as much of their"
        " Jacobians is symmetric as of independent matrices."
    ),
    expected=Verdict.CONDITIONAL,
    on_model=True,
)
def hopfield_layer(trial: Trial) -> Evidence:
    """Asymmetric share of Jacobians: of the layers of the model, of a tied layer, and of independent matrices."""
    model, tokens = reader(trial.model)
    order = torch.randperm(len(tokens), generator=trial.generator)
    found = fully_connected(model, tokens[order[: trial.size(2, 8)]], trial.generator)
    x = torch.randn(64, 32, generator=trial.generator, dtype=torch.float64)
    first, second = torch.randn(2, 128, 32, generator=trial.generator, dtype=torch.float64) / 32**0.5

    def gap(patterns: Tensor) -> Gap:
        start = x.clone().requires_grad_()
        update = torch.nn.functional.gelu(start @ first.T) @ patterns
        return Gap(1 - symmetry(start, update, trial.generator).symmetry, 0.1)

    shares = [each.symmetry for each in found]
    return Evidence(
        printed=Gap(1 - statistics.median(shares), 0.1),
        conditional=gap(first),
        control=gap(trial.control(second, first)),
        table={
            "symmetric share": statistics.median(shares),
            "with shuffled outputs": statistics.median(each.control for each in found),
            "in the most symmetric layer": max(shares),
            "positive share": statistics.median(each.positive for each in found),
        },
        curve=Curve(range(len(shares)), {"symmetric share": shares}, "layer", "of the energy of the Jacobians"),
    )


def fully_connected(model: torch.nn.Module, tokens: Tensor, generator: torch.Generator) -> list[FieldTest]:
    """Return tests of the Jacobians of every fully connected layer that reads a norm, in that norm's output."""
    places = []
    for block in find_residual_stream(model, {"input_ids": tokens[:1]}).blocks:
        attention, mlp = block.find("attention"), block.find("mlp")
        entry = mlp and (mlp.entry or (attention and attention.stream_norm))
        if mlp and entry and block.number == entry.call == mlp.update.call == 0:
            places.append((f"{block.name}.{entry.path}", f"{block.name}.{mlp.update.path}"))
    if not places:
        raise UserError("no block of the model has a fully connected layer that reads a norm; choose another model")
    with torch.enable_grad():
        seen = through(model, tokens, {path for pair in places for path in pair})
    return [symmetry(seen[entry][1], seen[update][1], generator) for entry, update in places]


def symmetry(start: Tensor, update: Tensor, generator: torch.Generator) -> FieldTest:
    """Return the symmetry of the Jacobians of an update that was computed from each row of ``start`` alone."""
    zero = torch.zeros_like(update, requires_grad=True)
    (pulled,) = torch.autograd.grad(update, start, zero, create_graph=True)

    def derivative(output: Tensor, by: Tensor) -> Callable[[Tensor], Tensor]:
        def product(direction: Tensor) -> Tensor:
            (found,) = torch.autograd.grad(output, by, direction.view(output.shape).to(output), retain_graph=True)
            return found.flatten(0, -2).double()

        return product

    signs = torch.randint(2, (3, *update.flatten(0, -2).shape), generator=generator) * 2.0 - 1
    # The derivative of a vector-Jacobian product in its vector is the Jacobian-vector product.
    return field_test(derivative(pulled, zero), derivative(update, start), lambda number: signs[number].double())
