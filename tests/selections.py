"""Random problems of token selection, and their constraints written out."""

import torch

from massieu.margin import TokenSelection


def draw(n, length, dim, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(n, length, dim, generator=generator, dtype=torch.float64)
    queries = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    scores = torch.randn(n, length, generator=generator, dtype=torch.float64)
    return TokenSelection(tokens, queries, **({"scores": scores} | options))


def tied(seed, *, lengths=True):
    """Five ragged sequences with three, one and twice two best tokens."""
    scores = torch.zeros(5, 6)
    scores[:, :2] = 1
    scores[0, 2], scores[1, 1] = 1, 0
    return draw(5, 6, 8, seed, scores=scores, **({"lengths": torch.tensor([6, 4, 5, 6, 4])} if lengths else {}))


def dense(problem, selection, rivals):
    """Constraints as rows of length dim * query_dim."""
    products = torch.einsum("ntd,nq->ntdq", problem.differences(selection), problem.queries)
    return products[rivals].flatten(1).numpy()


def nearly_twins(by):
    """Two sequences that differ by little and are to select different tokens: the largest margin is about ``by``."""
    generator = torch.Generator().manual_seed(0)
    tokens, query = torch.randn(4, 5, generator=generator).double(), torch.randn(5, generator=generator).double()
    moved = torch.randn(4, 5, generator=generator).double()
    pair = torch.stack([tokens, tokens + by * moved])
    return TokenSelection(pair, query.expand(2, -1), scores=torch.eye(4)[:2])
