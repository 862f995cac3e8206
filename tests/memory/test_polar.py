"""Classical, polynomial and exponential memories: energies, flips, rules that descend and rules that do not."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.memory import Classical, Dense, Exponential

FEW = settings(max_examples=40, deadline=None)


def polar(seed, *shape):
    return 2.0 * torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1


def corners(dim):
    return torch.tensor(list(itertools.product([-1.0, 1.0], repeat=dim)), dtype=torch.float64)


def written_out(memory, state):
    """Energies by loops over patterns and coordinates."""
    found = []
    for xi in state.tolist():
        overlaps = [sum(a * b for a, b in zip(x, xi, strict=True)) for x in memory.patterns.tolist()]
        if isinstance(memory, Classical):
            hebb = sum(np.outer(x, x) for x in memory.patterns.numpy())
            hebb = hebb if memory.diagonal else hebb - np.diag(np.diag(hebb))
            found.append(-0.5 * np.array(xi) @ hebb @ np.array(xi) + memory.bias.numpy() @ np.array(xi))
        elif isinstance(memory, Dense):
            cut = [max(z, 0.0) if memory.rectified else z for z in overlaps]
            found.append(-sum(z**memory.power for z in cut))
        else:
            found.append(-np.log(sum(np.exp(z) for z in overlaps)))
    return torch.tensor(found, dtype=torch.float64)


MEMORIES = {
    "classical": lambda x: Classical(x),
    "classical, biased": lambda x: Classical(x, bias=torch.linspace(-3, 3, x.shape[-1], dtype=torch.float64)),
    "classical, diagonal": lambda x: Classical(x, diagonal=True),
    "square": lambda x: Dense(x, 2, rectified=False),
    "cube": lambda x: Dense(x, 3, rectified=False),
    "rectified cube": lambda x: Dense(x, 3),
    "fourth": lambda x: Dense(x, 4, rectified=False),
    "exponential": lambda x: Exponential(x),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_energies_are_the_sums_written_out(name):
    memory, state = MEMORIES[name](polar(0, 5, 7)), polar(1, 9, 7)
    assert_close(memory.energy(state), written_out(memory, state), rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("name", MEMORIES)
def test_the_cost_of_a_flip_is_the_difference_of_two_energies(name):
    memory, state = MEMORIES[name](polar(0, 5, 7)), polar(1, 9, 7)
    cost = memory.flip_cost(state)
    for coordinate in range(7):
        flipped = state.clone()
        flipped[:, coordinate] *= -1
        expected = written_out(memory, flipped) - written_out(memory, state)
        assert_close(cost[:, coordinate], expected, rtol=1e-10, atol=1e-9)


def sweep_by_loops(memory, xi, order):
    """The rule of the asynchronous memories, one coordinate after the other, by energies alone."""
    xi = xi.clone()
    for coordinate in order:
        flipped = xi.clone()
        flipped[coordinate] *= -1
        here, there = written_out(memory, torch.stack([xi, flipped])).tolist()
        if there < here - 1e-9:
            xi = flipped
    return xi


@pytest.mark.parametrize("name", [name for name in MEMORIES if "diagonal" not in name])
def test_a_sweep_offers_every_coordinate_one_flip_in_turn(name):
    memory, state = MEMORIES[name](polar(0, 5, 7)), polar(1, 9, 7)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0)).tolist()
    assert_close(memory.update(state), torch.stack([sweep_by_loops(memory, xi, order) for xi in state]))


@FEW
@given(
    seed=st.integers(0, 2**32), dim=st.integers(1, 12), atoms=st.integers(1, 20), name=st.sampled_from(list(MEMORIES))
)
def test_asynchronous_sweeps_never_raise_the_energy_and_come_to_rest(seed, dim, atoms, name):
    memory, state = MEMORIES[name](polar(seed, atoms, dim)), polar(seed + 1, 6, dim)
    assert bool((memory.energy(memory.update(state)) <= memory.energy(state) + 1e-9).all())
    found = memory.retrieve(state)
    assert bool(found.converged.all())
    assert set(found.kind) <= (
        {"minimum", "metastable"} if "diagonal" not in name else {"minimum", "metastable", "saddle"}
    )


CONVEX = {
    "square": lambda x: Dense(x, 2, rectified=False, rule="gradient"),
    "fourth": lambda x: Dense(x, 4, rectified=False, rule="gradient"),
    "rectified cube": lambda x: Dense(x, 3, rule="gradient"),
    "exponential": lambda x: Exponential(x, rule="gradient"),
    "classical, diagonal": lambda x: Classical(x, "sync", diagonal=True),
}


def rises(make, step, draws=150, dim=8):
    """In how many steps from random states the energy rises."""
    count = 0
    for seed in range(draws):
        memory, state = make(polar(seed, 12, dim)), polar(1000 + seed, 40, dim)
        moved = step(memory, state)
        count += int((memory.energy(moved) > memory.energy(state) + 1e-9 * memory.energy(state).abs()).sum())
    return count


@pytest.mark.parametrize("name", CONVEX)
def test_the_gradient_rule_of_a_convex_potential_never_raises_the_energy(name):
    assert rises(CONVEX[name], lambda memory, state: memory.update(state)) == 0


def test_the_gradient_rule_of_the_cube_raises_the_energy():
    """The control: z^3 is not convex."""
    assert (
        rises(lambda x: Dense(x, 3, rectified=False, rule="gradient"), lambda memory, state: memory.update(state)) > 0
    )


@pytest.mark.parametrize("name", ["square", "fourth", "exponential"])
def test_the_flip_rule_on_all_coordinates_at_once_raises_the_energy(name):
    """The control of the asynchronous rule, which moves one coordinate at a time."""
    make = MEMORIES[name]
    assert rises(make, lambda memory, state: torch.where(memory.flip_cost(state) < 0, -state, state)) > 10
    assert rises(make, lambda memory, state: memory.update(state)) == 0


def test_a_synchronous_memory_may_alternate_for_ever():
    memory = Classical(torch.tensor([[1.0, -1.0]]), "sync")
    found = memory.retrieve(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    assert found.kind.tolist() == ["cycle", "minimum"]
    assert found.converged.tolist() == [False, True]
    # By single flips the same memory comes to rest, at the pattern or at its negative.
    found = Classical(torch.tensor([[1.0, -1.0]])).retrieve(torch.tensor([[1.0, 1.0]]))
    assert found.converged.all()
    assert float(found.state.sum()) == 0.0


def test_synchronous_memories_end_at_rest_or_in_a_cycle_of_two():
    for seed in range(50):
        memory = Classical(polar(seed, 6, 9), "sync")
        found = memory.retrieve(corners(9))
        assert set(found.kind) <= {"minimum", "metastable", "saddle", "cycle"}
        cycles = torch.from_numpy(found.kind == "cycle")
        twice = memory.update(memory.update(found.state[cycles]))
        assert torch.equal(twice, found.state[cycles])
        assert not bool((memory.update(found.state[cycles]) == found.state[cycles]).all(-1).any())


def test_a_tie_keeps_the_coordinate():
    # Two patterns that disagree in the second coordinate pull it both ways.
    memory = Classical(torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, 1.0]]))
    state = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, 1.0]])
    found = memory.retrieve(state)
    assert_close(found.state, state.double())
    assert found.kind.tolist() == ["metastable", "metastable"]
    assert found.steps.tolist() == [0, 0]


def test_not_every_stored_pattern_is_a_fixed_point():
    patterns = torch.tensor([[-1.0, -1, -1, -1], [-1, -1, -1, 1], [-1, -1, 1, -1]])
    fixed = (Classical(patterns, "sync").update(patterns) == patterns).all(-1)
    assert fixed.tolist() == [True, False, False]


def test_with_the_diagonal_random_states_are_as_fixed_as_the_stored_ones():
    """d = 64, N = 1024: every pattern and 99 % of random states are fixed, and nothing is recovered from six flips."""
    patterns, others = polar(0, 1024, 64), polar(1, 500, 64)
    cue = patterns[:50].clone()
    cue[:, :6] *= -1
    for diagonal, stored, random in ((True, 1.0, 0.99), (False, 0.0, 0.0)):
        memory = Classical(patterns, diagonal=diagonal)
        assert float((memory.update(patterns[:200]) == patterns[:200]).all(-1).double().mean()) == stored
        assert float((memory.update(others) == others).all(-1).double().mean()) == pytest.approx(random, abs=0.02)
        assert not bool((memory.retrieve(cue).state == patterns[:50]).all(-1).any())
    # The gradient rule of a polynomial has the same trap: coordinates pull on themselves.
    memory = Dense(polar(2, 2101, 64), 4, rectified=False, rule="gradient")
    assert float((memory.update(others) == others).all(-1).double().mean()) > 0.9


def test_the_overlap_falls_at_the_transition_of_amit_gutfreund_and_sompolinsky():
    """d = 1000 gave 0.997, 0.931, 0.614, 0.366 at 0.1, 0.138, 0.17, 0.2 patterns per dimension; d = 500 is less sharp."""
    overlaps = []
    for atoms in (50, 69, 85, 100):
        found = []
        for draw in range(3):
            patterns = polar(draw, atoms, 500)
            found.append((Classical(patterns).retrieve(patterns[:20], steps=30).state * patterns[:20]).mean(-1))
        overlaps.append(float(torch.cat(found).mean()))
    assert overlaps[0] > 0.98
    assert 0.85 < overlaps[1] < 0.99
    assert overlaps[2] < 0.9
    assert overlaps[3] < 0.75
    assert overlaps == sorted(overlaps, reverse=True)


def test_one_step_of_the_exponential_memory_recovers_the_measured_share():
    """d = 20, N = 1024: 99.5, 85, 27 and 0 % come back in one step of all coordinates from 0, 1, 2 and 4 flips."""
    generator, rates = torch.Generator().manual_seed(0), []
    for flips in (0, 1, 2, 4):
        rate = []
        for draw in range(2):
            patterns = polar(draw, 1024, 20)
            cue = patterns.clone()
            chosen = torch.rand(1024, 20, generator=generator).argsort(-1)[:, :flips]
            cue.scatter_(1, chosen, -patterns.gather(1, chosen))
            step = torch.where(Exponential(patterns).flip_cost(cue) < 0, -cue, cue)
            rate.append((step == patterns).all(-1).double().mean())
        rates.append(float(torch.stack(rate).mean()))
    # Two draws of 1024 correlated patterns: 3 % is about four standard errors.
    assert rates == pytest.approx([0.99, 0.855, 0.28, 0.0], abs=0.03)


def test_fixed_patterns_of_polynomial_memories():
    """d = 64 at the error-free number: 94 and 87 % for z^n and above 99 % rectified."""
    for power, atoms, draws, plain in ((2, 8, 40, 0.94), (3, 164, 30, 0.87)):
        for rectified in (False, True):
            rate = []
            for draw in range(draws):
                patterns = polar(draw, atoms, 64)
                cost = Dense(patterns, power, rectified=rectified).flip_cost(patterns)
                rate.append((cost >= 0).all(-1).double().mean())
            assert float(torch.stack(rate).mean()) == pytest.approx(0.995 if rectified else plain, abs=0.035)


def test_large_powers_and_dimensions_do_not_overflow():
    patterns = polar(0, 5, 2000)
    cue = patterns.clone()
    cue[:, :300] *= -1
    for memory in (Exponential(patterns), Dense(patterns, 120), Exponential(patterns, rule="gradient")):
        found = memory.retrieve(cue)
        assert_close(found.state, patterns)
        assert found.index.tolist() == [0, 1, 2, 3, 4]
    assert_close(Exponential(patterns).energy(patterns), torch.full((5,), -2000.0, dtype=torch.float64))


def test_duplicates_weigh_twice_and_a_single_pattern_is_found_from_everywhere():
    single = Exponential(polar(0, 1, 8))
    assert_close(single.retrieve(corners(8)).state, single.patterns.expand(256, 8))
    pair = torch.tensor([[1.0, 1.0, 1.0, -1.0], [-1.0, -1.0, -1.0, -1.0]])
    twice = Dense(torch.cat([pair, pair[:1]]), 3)
    assert_close(twice.energy(pair[:1]), 2 * Dense(pair[:1], 3).energy(pair[:1]))


def test_clamped_coordinates_stay_and_others_see_them_as_they_are():
    patterns = polar(0, 3, 30)
    state = polar(1, 5, 30)
    clamp = torch.zeros(30, dtype=torch.bool)
    clamp[:7] = True
    for memory in (Classical(patterns), Exponential(patterns), Classical(patterns, "sync"), Dense(patterns, 3)):
        found = memory.retrieve(state, clamp=clamp)
        assert_close(found.state[:, :7], state[:, :7])
        free = memory.flip_cost(found.state)[:, 7:]
        resting = found.converged & torch.from_numpy(np.isin(found.kind, ["minimum", "metastable"]))
        assert bool((free[resting] >= -1e-9).all())
        assert memory.patterns.shape[0] == 3


@pytest.mark.parametrize("name", MEMORIES)
def test_the_answer_does_not_depend_on_the_batch(name):
    memory, state = MEMORIES[name](polar(0, 9, 12)), polar(1, 30, 12)
    together = memory.retrieve(state)
    for row in range(30):
        alone = memory.retrieve(state[row : row + 1])
        assert torch.equal(alone.state[0], together.state[row])
        assert (alone.steps[0], alone.kind[0], alone.index[0]) == (
            together.steps[row],
            together.kind[row],
            together.index[row],
        )


@pytest.mark.parametrize("name", MEMORIES)
def test_patterns_may_come_in_any_order(name):
    patterns, state, order = (
        polar(0, 9, 12),
        polar(1, 30, 12),
        torch.randperm(9, generator=torch.Generator().manual_seed(5)),
    )
    plain, mixed = MEMORIES[name](patterns).retrieve(state), MEMORIES[name](patterns[order]).retrieve(state)
    assert_close(plain.state, mixed.state)
    assert_close(plain.energy, mixed.energy)


def test_leading_axes_are_a_batch_and_nothing_is_nothing():
    memory, state = Exponential(polar(0, 4, 6)), polar(1, 2, 3, 5, 6)
    found = memory.retrieve(state)
    assert found.state.shape == state.shape
    assert found.kind.shape == (2, 3, 5) == tuple(found.energy.shape)
    assert_close(found.state[1, 2], memory.retrieve(state[1, 2]).state)
    empty = memory.retrieve(state[:, :0])
    assert empty.state.shape == (2, 0, 5, 6)
    assert empty.kind.shape == (2, 0, 5)


def test_the_seed_decides_the_order():
    patterns, state = polar(0, 40, 30), polar(1, 30, 30)
    first, again, other = (Classical(patterns, generator=seed).retrieve(state).state for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Classical(torch.zeros(2, 3)), "patterns"),
        (lambda: Classical([1.0]), "patterns"),
        (lambda: Exponential(torch.ones(3, dtype=torch.bool)), "bits"),
        (lambda: Dense(torch.ones(3), 2), "patterns"),
        (lambda: Classical(torch.ones(0, 3)), "patterns"),
        (lambda: Classical(torch.ones(2, 3), "both"), "rule"),
        (lambda: Classical(torch.ones(2, 3), bias=torch.ones(2)), "bias"),
        (lambda: Dense(torch.ones(2, 3), 1), "power"),
        (lambda: Exponential(torch.ones(2, 3), rule="sync"), "rule"),
        (lambda: Classical(torch.ones(2, 3), generator=-1), "generator"),
        (lambda: Classical(torch.ones(2, 3)).update(torch.zeros(1, 3)), "state"),
        (lambda: Classical(torch.ones(2, 3)).update(torch.ones(3)), "state"),
        (lambda: Classical(torch.ones(2, 3)).energy(torch.ones(1, 4)), "state"),
        (lambda: Classical(torch.ones(2, 3)).retrieve(torch.ones(1, 3), steps=-1), "steps"),
    ],
)
def test_bad_input_gets_a_sentence(call, message):
    with pytest.raises(UserError, match=message):
        call()
