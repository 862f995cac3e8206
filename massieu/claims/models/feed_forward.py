"""The fully connected layer as a memory: the field of a classical Hopfield network is a gradient."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from massieu.checks import UserError
from massieu.claims.claim import Curve, Evidence, Gap, Trial, Verdict
from massieu.claims.models.states import reader, through
from massieu.claims.registry import claim
from massieu.claims.sources import PAPER
from massieu.inspection.anatomy import read_anatomy
from massieu.inspection.jacobians import FieldTest, field_test


@claim(
    "X18",
    source=PAPER,
    place="appendix B",
    title="The fully connected layer is a classical Hopfield layer",
    wording="Perhaps the FC layer can be seen as an original Hopfield network layer.",
    reading=(
        "Our reading: a classical memory moves along W^T f(W x), which is the gradient of an energy. In the median"
        " layer of a trained model, at least nine tenths of the energy of the Jacobians of the fully connected layer,"
        " by what it reads, at the tokens of two passages (full: eight) are symmetric."
    ),
    reference="the layer W^T f(W x) of random patterns, and a layer W' f(W x) whose matrices are independent",
    formula="J = J^T",
    correction=(
        "It is if its second matrix is the transpose of the first. Training does not tie them: about as much of their"
        " Jacobians is symmetric as of independent matrices."
    ),
    expected=Verdict.FAILS,
    trials=1,
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
        instead=gap(first),
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
    """Tests of the Jacobians of every fully connected layer that reads a norm, from that norm's output."""
    places = []
    for block in read_anatomy(model, {"input_ids": tokens[:1]}).blocks:
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
    """Symmetry of the Jacobians of an update that was computed from each row of ``start`` alone."""
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
