"""AdamW on one tensor is AdamW on every weight."""

import copy

import torch
from torch.testing import assert_close

from massieu.context.optimizer import JointAdamW


def net():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2)).double()
    layers.unused = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    return layers


def losses(model):
    inputs = torch.randn(6, 20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return (model(each).square().sum() for each in inputs)


def test_steps_are_those_of_adamw_on_every_weight_with_their_common_norm_clipped():
    ours = net()
    theirs, rates = copy.deepcopy(ours), [0.1, 0.03, 0.01, 0.2, 0.1, 0.05]
    joint = JointAdamW(ours)
    plain = torch.optim.AdamW(theirs.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    norms = []
    for rate, own, other in zip(rates, losses(ours), losses(theirs), strict=True):
        joint.step(own, rate)
        plain.zero_grad()
        other.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)))
        plain.param_groups[0]["lr"] = rate
        plain.step()
    assert max(norms) > 1  # else nothing was clipped
    # Norms are summed in another order, which the first steps of AdamW do not damp.
    assert_close(dict(ours.named_parameters()), dict(theirs.named_parameters()), rtol=1e-12, atol=1e-12)
    assert not torch.equal(ours[0].weight, net()[0].weight)
    assert torch.equal(ours.unused, net().unused)


def test_a_state_goes_on_where_it_was():
    whole, first = net(), net()
    optimizer = JointAdamW(whole)
    for loss in losses(whole):
        optimizer.step(loss, 0.1)
    begun = JointAdamW(first)
    for _, loss in zip(range(3), losses(first), strict=False):
        begun.step(loss, 0.1)
    second = net()
    resumed = JointAdamW(second)
    second.load_state_dict(first.state_dict())
    resumed.restore(copy.deepcopy(begun.state()))
    for number, loss in enumerate(losses(second)):
        if number >= 3:
            resumed.step(loss, 0.1)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(second.parameters(), whole.parameters(), strict=True))


def test_a_copy_of_the_model_has_weights_of_its_own():
    model = net()
    optimizer, before = JointAdamW(model), copy.deepcopy(model)
    optimizer.step(next(losses(model)), 0.1)
    assert torch.equal(before[0].weight, net()[0].weight)
    assert not torch.equal(model[0].weight, before[0].weight)
