"""Functions that are not linear in their parameters: decision trees, two-layer networks, sine waves."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_number
from massieu.context.tasks.task import Parameters, Task, normal, uniform

__all__ = ["DecisionTree", "Sine", "TwoLayer"]


class DecisionTree(Task):
    r"""Full binary trees that split by the sign of one coordinate at each node, with standard normal leaves.

    :math:`E f^2 = 1` in any dimension.

    Args:
        dim: of the inputs, which are standard normal.
        noise: standard deviation of the noise.
        depth: splits on the way to a leaf; :math:`2^{depth}` leaves. The coordinate of each node is drawn anew, so
            that one may occur twice.

    Source:
        Garg et al. 2022, section 5.

    Example:
        >>> task = DecisionTree(20)
        >>> prompts = task.draw(2, 9, torch.Generator().manual_seed(0))
        >>> prompts.parameters["coordinates"].shape, prompts.parameters["leaves"].shape
        (torch.Size([2, 15]), torch.Size([2, 16]))
    """

    def __init__(self, dim: int, noise: float = 0.0, *, depth: int = 4):
        super().__init__(dim, noise)
        self.depth = check_count(depth, "depth", least=0)
        self._check_noise()

    @property
    def signal(self) -> float:
        return 1.0

    def draw_parameters(self, count: int, generator: torch.Generator, dtype: torch.dtype) -> Parameters:
        shape = (count, 2**self.depth - 1)
        coordinates = torch.randint(self.dim, shape, generator=generator, device=generator.device)
        return {"coordinates": coordinates, "leaves": normal((count, 2**self.depth), generator, dtype)}

    def values(self, inputs: Tensor, parameters: Parameters) -> Tensor:
        coordinates, leaves = parameters["coordinates"], parameters["leaves"]
        node = torch.zeros(inputs.shape[:2], dtype=torch.long, device=inputs.device)
        for _ in range(self.depth):
            value = inputs.gather(-1, coordinates.gather(1, node)[..., None])[..., 0]
            node = 2 * node + 1 + (value > 0)  # the nodes of a level follow those of the level above
        return leaves.gather(1, node - (2**self.depth - 1))


class TwoLayer(Task):
    r"""Two-layer ReLU networks :math:`f(x) = \sqrt{2/h} \sum_k a_k \max(0, \langle b_k, x \rangle)`.

    Weights and inputs are standard normal, so that :math:`E f^2 = d` for any number of hidden units.

    Args:
        dim: d.
        hidden: h.

    Source:
        Garg et al. 2022, section 5.

    Example:
        >>> TwoLayer(20, hidden=4).signal
        20.0
    """

    def __init__(self, dim: int, noise: float = 0.0, *, hidden: int = 100):
        super().__init__(dim, noise)
        self.hidden = check_count(hidden, "hidden")
        self._check_noise()

    @property
    def signal(self) -> float:
        return float(self.dim)

    def draw_parameters(self, count: int, generator: torch.Generator, dtype: torch.dtype) -> Parameters:
        first = normal((count, self.dim, self.hidden), generator, dtype)
        return {"first": first, "second": normal((count, self.hidden), generator, dtype)}

    def values(self, inputs: Tensor, parameters: Parameters) -> Tensor:
        units = torch.relu(inputs @ parameters["first"])
        return math.sqrt(2 / self.hidden) * torch.einsum("tnh,th->tn", units, parameters["second"])


class Sine(Task):
    r"""Sine waves along a direction, :math:`f(x) = a \sin(\langle u, x \rangle + \varphi)`.

    The direction u is uniform on the sphere (a sign in one dimension), the phase on the circle, the amplitude a between
    two bounds and each coordinate of an input on ``[-width, width]``, so that :math:`E f^2 = E a^2 / 2`.

    Args:
        dim: of the inputs.
        amplitudes: least and largest amplitude.
        width: of the inputs.

    Source:
        Finn, Abbeel and Levine 2017, section 5.1, with phases on the whole circle, and more than one dimension.

    Example:
        >>> round(Sine(1, amplitudes=(1.0, 1.0)).signal, 3)
        0.5
    """

    def __init__(
        self, dim: int = 1, noise: float = 0.0, *, amplitudes: tuple[float, float] = (0.1, 5.0), width: float = 5.0
    ):
        super().__init__(dim, noise)
        low, high = amplitudes
        if not 0 <= low <= high < math.inf or high == 0:
            raise UserError(f"amplitudes must be two numbers from low to high, got {amplitudes}; (0.1, 5.0) is common")
        self.amplitudes, self.width = (float(low), float(high)), check_number(width, "width", above=0)
        self._check_noise()

    @property
    def signal(self) -> float:
        low, high = self.amplitudes
        return (low**2 + low * high + high**2) / 6

    def draw_inputs(self, count: int, examples: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        return self.width * (2 * uniform((count, examples, self.dim), generator, dtype) - 1)

    def draw_parameters(self, count: int, generator: torch.Generator, dtype: torch.dtype) -> Parameters:
        low, high = self.amplitudes
        direction = torch.nn.functional.normalize(normal((count, self.dim), generator, dtype), dim=-1)
        amplitude = low + (high - low) * uniform((count,), generator, dtype)
        phase = 2 * math.pi * uniform((count,), generator, dtype)
        return {"direction": direction, "amplitude": amplitude, "phase": phase}

    def values(self, inputs: Tensor, parameters: Parameters) -> Tensor:
        angle = torch.einsum("tnd,td->tn", inputs, parameters["direction"]) + parameters["phase"][:, None]
        return parameters["amplitude"][:, None] * torch.sin(angle)
