import torch

from massieu.geometry.jacobians import field_test, positive_mass, shuffling

TOKENS, DIM = 40, 24


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def signs(salt):
    return draw(TOKENS, DIM, seed=100 + salt).sign()


def outcome(jacobians):
    return field_test(
        lambda g: torch.einsum("tij,tj->ti", jacobians, g), lambda g: torch.einsum("tji,tj->ti", jacobians, g), signs
    )


def test_symmetric_jacobians_have_symmetry_one_and_their_control_one_half():
    root = draw(TOKENS, DIM, 5)
    found = outcome(root @ root.mT)
    assert abs(found.symmetry - 1) < 1e-12
    assert abs(found.control - 0.5) < 0.05
    assert abs(found.positive - 1) < 1e-9


def test_the_estimates_agree_with_the_matrices():
    jacobians = draw(TOKENS, DIM, 3) @ draw(TOKENS, 3, DIM, seed=1) + 0.5 * draw(TOKENS, DIM, DIM, seed=2)
    jacobians = jacobians + 3 * torch.eye(DIM)
    symmetric = (jacobians + jacobians.mT) / 2
    expected = float(symmetric.square().sum() / jacobians.square().sum())
    eigenvalues = torch.linalg.eigvalsh(symmetric)
    found = outcome(jacobians)
    assert abs(found.symmetry - expected) < 0.05
    assert abs(found.positive - float(eigenvalues.clamp_min(0).sum() / eigenvalues.abs().sum())) < 0.05


def test_the_control_is_the_symmetry_after_the_shuffle():
    shuffle, flip = shuffling(DIM)
    root = draw(TOKENS, DIM, 5)
    shuffled = torch.zeros(TOKENS, DIM, DIM, dtype=torch.float64)
    shuffled[:, shuffle] = (root @ root.mT) * flip[:, None]
    found = outcome(shuffled)
    assert abs(found.control - 1) < 0.01  # energies are estimated with other probes
    assert found.symmetry < 0.9


def test_random_jacobians_have_symmetry_and_sign_one_half():
    found = outcome(draw(TOKENS, DIM, DIM))
    assert abs(found.symmetry - 0.5 - 0.5 / DIM) < 0.05
    assert abs(found.positive - 0.5) < 0.05


def test_a_matrix_of_small_rank_is_exhausted_without_noise():
    vector = draw(1, DIM)
    matrix = -vector.T @ vector
    assert positive_mass(lambda g: g @ matrix, signs(0)) < 1e-9
