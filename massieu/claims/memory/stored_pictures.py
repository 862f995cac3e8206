"""Pictures and digits: one stored alone, several, gray ones, the rule that lowers the energy, and similarities."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from massieu.claims.claim import Evidence, Gap, Source, Trial
from massieu.claims.experiment import normals, widest
from massieu.claims.memory.polar_memories import digits, flipped, lost, moved, signs, unstable
from massieu.claims.registry import claim
from massieu.memory import Classical, Continuous, Dense, Exponential, Kernel, drawings
from massieu.memory.polar import Polar


def pictures() -> Tensor:
    """Return the drawings as states, shape ``(10, 64)``."""
    return torch.stack(list(drawings().values()))


def painted_over(images: Tensor, rows: int) -> Tensor:
    """Return the pictures with some of their 8 lower rows white."""
    return torch.where(torch.arange(64) < 64 - 8 * rows, images, -1.0)


@claim(
    "M14",
    source=Source.SLIDES,
    place="memorization, pictures, W = x_Homer x_Homer^T, of which the text has only the formulas",
    title="A picture stored alone is recovered",
    wording=(
        "A picture x_Homer ∈ {−1, 1}^64 is stored by W = x_Homer x_Homer^T, after the sentence that local minima are"
        " recovered."
    ),
    reading=(
        "Our reading: it is recovered from a part of it. A drawing of a face, 8 by 8 pixels, comes back exactly from a"
        " white lower half and from 1 to 31 wrong pixels, 10 (full: 50) draws of each number. Its negative comes back"
        " from 33 to 63."
    ),
    reference="the stored picture; the sign of its product with the cue decides",
    formula="sgn(x x^T ξ) = x for x·ξ > 0",
)
def one_picture(trial: Trial) -> Evidence:
    """Pictures that do not come back from less than half of wrong pixels; the control has more than half."""
    face = drawings()["face"][None]
    draws = trial.size(10, 50)
    few = torch.cat([flipped(trial, face.repeat(draws, 1), count) for count in range(1, 32)])
    memory = Classical(face)

    def gap(cues: Tensor) -> Gap:
        found = memory.retrieve(cues).state
        by_sign = torch.sign(cues @ face.T) * face
        return Gap(float(((found != face) | (found != by_sign)).any(-1).double().mean()), 1e-9)

    half, negatives = painted_over(face, 4), memory.retrieve(-few).state
    return Evidence(
        printed=widest(gap(half), gap(few), Gap(float((negatives != -face).any(-1).double().mean()), 1e-9)),
        control=widest(gap(half), gap(trial.control(-few, few))),
        table={"wrong pixels under the mask": float((half != face).sum()), "cues": float(len(few))},
    )


@claim(
    "M17",
    source=Source.SLIDES,
    place="memorization, new energy function, update rule (Krotov and Hopfield 2016)",
    title="The flip rule decreases the energy",
    wording=(
        "The update sets an element to sgn[−E(ξ^{(l+)}) + E(ξ^{(l−)})], the difference in energy with component l"
        " flipped, to decrease E(ξ) = −Σ_i F(x_i^T ξ)."
    ),
    reading=(
        "For F of z^2, z^3, z^4 and exp, 12 (full: 40) random patterns in 12 (full: 24) dimensions and 100 random"
        " states: offered one component after the other, the memory takes the sign of the rule, and no step raises the"
        " energy. All components at once do raise it."
    ),
    reference="energies in exact integers for powers, in extended precision for the exponential",
    formula="E(ξ) = −Σ_i F(x_i·ξ), F(z) = z^a or e^z",
)
def flip_rule(trial: Trial) -> Evidence:
    """Steps that raise the energy or are not those of the rule; the control moves all components at once."""
    dim, number = trial.size(12, 24), trial.size(12, 40)
    patterns, states = signs(trial, number, dim), signs(trial, 100, dim)
    stored = patterns.numpy().astype(np.int64)

    def below(power: int, first: Tensor, second: Tensor) -> Tensor:
        """Return True where the energy of the first is less; a difference in the last digits is a tie."""
        overlaps = [each.numpy().astype(np.int64) @ stored.T for each in (first, second)]
        terms = [each**power if power else np.exp(each.astype(np.longdouble)) for each in overlaps]
        less, more = (each.sum(-1) for each in terms[::-1])
        return torch.from_numpy(more > less + (0 if power else 1e-12 * less))

    def wrong(power: int, at_once: bool) -> Tensor:
        memory = Dense(patterns, power, rectified=False) if power else Exponential(patterns)
        found, state = [], states
        for places in (torch.arange(dim),) if at_once else torch.arange(dim)[:, None]:
            held = torch.ones(dim, dtype=torch.bool).index_fill_(0, places, value=False)
            after, by_rule = state.clone(), state.clone()
            for place in places.tolist():
                sign = torch.eye(dim, dtype=torch.float64)[place] * -2 + 1
                by_rule[below(power, state * sign, state), place] *= -1
            if at_once:
                after = torch.where(memory.flip_cost(state) < 0, -state, state)
            else:
                after = memory.retrieve(state, steps=1, clamp=held).state
            found.append(below(power, state, after) | (after != by_rule).any(-1))
            state = after
        return torch.stack(found).double().mean()

    def gap(at_once: bool) -> Gap:
        return Gap(max(float(wrong(power, at_once)) for power in (2, 3, 4, 0)), 1e-9)

    return Evidence(printed=gap(False), control=gap(trial.control(True, False)))


@claim(
    "M18",
    source=Source.SLIDES,
    place="memorization, pictures with several stored, of which the text has only 'masked test image'",
    title="Several pictures need a modern network",
    wording="After the capacities of classical and modern networks, the slides show a masked test image.",
    reading=(
        "Our reading: of several stored pictures a masked one is not recovered by a classical network, but by a modern"
        " one. Ten drawings of 8 by 8 pixels, masked by three white rows or, in 2 draws (full: 30), with 8 pixels wrong"
        " at random. The exponential interaction and the continuous network at β = 1, by its signs, recover at least 9"
        " of 10 exactly, a classical network at most half, and it keeps at most half even of the stored ones."
    ),
    reference="the stored drawings; signs of W ξ with W written out as a matrix",
    formula="ξ = x_i from a part of x_i, E = −Σ_i exp(x_i·ξ) against −½ Σ_i (x_i·ξ)^2",
)
def several_pictures(trial: Trial) -> Evidence:
    """Drawings that are lost from masks and noise by either network; in the control the modern one is quadratic."""
    images = pictures()
    repeats = trial.size(2, 30)
    masked = painted_over(images, 3)
    noisy = [flipped(trial, images, 8) for _ in range(repeats)]

    def by_signs(cues: Tensor) -> float:
        state = Continuous(images, beta=1.0).retrieve(cues).state
        return float((state.sign() != images).any(-1).double().mean())

    def gap(modern: Callable[[Tensor], Polar]) -> Gap:
        classical, new = Classical(images), modern(images)
        kept = 1 - moved(classical, images)
        gaps = [Gap(kept, 0.5), Gap(abs(kept - 1 + unstable(images, images, False)), 1e-9)]
        for cues in (masked, *noisy):
            gaps += [Gap(1 - lost(classical, cues, images), 0.5)]
            gaps += [Gap(lost(new, cues, images), 0.1), Gap(by_signs(cues), 0.1)]
        return widest(*gaps)

    half = painted_over(images, 4)
    return Evidence(
        printed=gap(Exponential),
        control=gap(trial.control(Classical, Exponential)),
        table={
            "lost from a white half, classical": lost(Classical(images), half, images),
            "lost from a white half, exponential": lost(Exponential(images), half, images),
            "mean overlap": float((images @ images.T / 64).fill_diagonal_(0).sum() / 90),
        },
    )


@claim(
    "M19",
    source=Source.SLIDES,
    place="memorization, summary, item 3",
    title="Modern networks extend to a continuous domain",
    wording="Modern Hopfield networks can be extended to a continuous domain.",
    reading=(
        "Our reading: ten gray pictures, drawings with each pixel averaged with its neighbors, without their mean and"
        " of length 8, come back by one update of the continuous network at β = 2 to 1e-3 of their length, from normal"
        " noise of 0.5 for each of 64 pixels; 20 (full: 200) draws."
    ),
    reference="the stored pictures; the update as softmax in numpy",
    formula="ξ = X softmax(β X^T ξ)",
)
def gray_pictures(trial: Trial) -> Evidence:
    """Errors of gray pictures after one update from noise; the control is too warm."""
    smooth = torch.nn.functional.avg_pool2d(pictures().reshape(10, 1, 8, 8), 3, 1, 1).reshape(10, 64)
    images = 8 * torch.nn.functional.normalize(smooth - smooth.mean(0), dim=-1)
    truth = images.repeat(trial.size(20, 200), 1)
    cues = truth + 0.5 * normals(trial)(*truth.shape)

    def gap(beta: float) -> Gap:
        found = Continuous(images, beta).update(cues)
        scores = 2.0 * (cues @ images.T).numpy()
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        update = torch.from_numpy(weight / weight.sum(-1, keepdims=True) @ images.numpy())
        error = (found - truth).norm(dim=-1).max() / 8
        return widest(Gap(float(error), 1e-3), Gap(float((found - update).abs().max()), 1e-9))

    return Evidence(
        printed=gap(2.0),
        control=gap(trial.control(0.02, 2.0)),
        table={"length of the noise over that of a picture": float((cues - truth).norm(dim=-1).mean()) / 8},
    )


@claim(
    "P5",
    source=Source.MILLIDGE,
    place="abstract, from memory",
    title="Distances retrieve more than inner products",
    wording="Euclidean or Manhattan distance as similarity performs substantially better in practice on many tasks.",
    reading=(
        "Our reading: of 150 random digits (full: 500), the lower half filled with zeros or all under normal noise of"
        " 0.5, the inner product finds at most three quarters of what the better of the two distances finds. Both"
        " distances find what is nearest, to 2 % of the digits. In the control the mean is subtracted, all lengths are"
        " equal, and the noise is 0.2."
    ),
    reference="the nearest image by torch.cdist",
    formula="argmax_i −‖ξ − x_i‖_1 or −‖ξ − x_i‖_2 against argmax_i ξ·x_i",
)
def similarities(trial: Trial) -> Evidence:
    """Digits found by the most similar one, half hidden or noisy; the control compares digits of one length."""
    number, cold = trial.size(150, 500), 1e4
    raw = digits()[torch.randperm(1797, generator=trial.generator)[:number]]
    centered = torch.nn.functional.normalize(raw - raw.mean(0), dim=-1)
    known = (torch.arange(64) < 32).expand(number, 64)
    noise = normals(trial)(number, 64)

    def right(state: Tensor, images: Tensor) -> float:
        return float(((state - images).abs().amax(-1) < 1e-3).double().mean())

    def gap(images: Tensor, level: float) -> Gap:
        gaps = []
        for cue in (torch.where(known, images, 0.0), images + level * noise):
            inner = right(Continuous(images, cold).update(cue), images)
            found = {1: right(Kernel(images, "l1", cold).update(cue), images)}
            found[2] = right(Kernel(images, "l2", cold).update(cue), images)
            nearest = {order: strictly_nearest(cue, images, order) for order in found}
            gaps += [Gap(abs(found[order] - nearest[order]), 0.02) for order in found]
            gaps.append(Gap(inner, 0.75 * max(found.values())))
        return widest(*gaps)

    half = torch.where(known, raw, 0.0)
    aware = right(Kernel(raw, "l2", cold).update(half, observed=known), raw)
    plain = right(raw[torch.cdist(half, raw).argmin(-1)], raw)
    return Evidence(
        printed=gap(raw, 0.5),
        control=gap(trial.control(centered, raw), trial.control(0.2, 0.5)),
        table={"observed pixels alone": aware, "zeros for the others": plain},
    )


@claim(
    "P6",
    source=Source.SLIDES,
    place="memorization, summary, item 2",
    title="Modern networks increase capacity",
    wording="Modern Hopfield networks increase capacity.",
    reading=(
        "Our reading: of 32 random patterns in 64 dimensions, and of 20 random black and white digits, the quadratic"
        " energy keeps at most half as fixed points, the exponential one at least 90 %. Single flips agree with sums of"
        " powers and exponentials written out. The page of `massieu verify --out` shows rectified third and tenth"
        " powers beside them, which decide nothing."
    ),
    reference="energies of all single flips as sums written out in numpy, with extended precision",
    formula="E(ξ) = −Σ_i F(x_i·ξ), F(z) = z^2 against e^z",
)
def black_and_white(trial: Trial) -> Evidence:
    """Shares of fixed patterns with a quadratic and an exponential energy; the control is quadratic twice."""
    images = torch.where(digits()[torch.randperm(1797, generator=trial.generator)[:20]] >= 0.5, 1.0, -1.0)
    sets = {"random": signs(trial, 32, 64), "digits": images}

    def kept(memory: Polar) -> float:
        return float((memory.flip_cost(memory.patterns) >= 0).all(-1).double().mean())

    def written_out(patterns: Tensor, quadratic: bool) -> float:
        stored = patterns.numpy().astype(np.longdouble)
        overlap = stored @ stored.T
        flipped_overlap = overlap[:, :, None] - 2 * stored[:, None, :] * stored[None, :, :]
        energy = np.square if quadratic else np.exp
        rise = energy(overlap).sum(1)[:, None] - energy(flipped_overlap).sum(1)
        return float((rise >= 0).all(-1).mean())

    def gap(modern: Callable[[Tensor], Polar], quadratic: bool) -> Gap:
        gaps = []
        for patterns in sets.values():
            old, new = kept(Classical(patterns)), kept(modern(patterns))
            gaps += [Gap(old, 0.5), Gap(1 - new, 0.1)]
            gaps += [Gap(abs(old - written_out(patterns, True)), 1e-9)]
            gaps += [Gap(abs(new - written_out(patterns, quadratic)), 1e-9)]
        return widest(*gaps)

    return Evidence(
        printed=gap(Exponential, False),
        control=gap(trial.control(Classical, Exponential), trial.control(True, False)),
        table={f"{name}, quadratic": kept(Classical(each)) for name, each in sets.items()}
        | {f"{name}, power {power}": kept(Dense(each, power)) for name, each in sets.items() for power in (3, 10)}
        | {f"{name}, exponential": kept(Exponential(each)) for name, each in sets.items()},
    )


def strictly_nearest(cues: Tensor, images: Tensor, order: int) -> float:
    """Return the share of cues closer to their own image than to all others; ties of a soft minimum are shared."""
    distance = torch.cdist(cues, images, p=order)
    own = distance.diagonal().clone()
    return float((own < distance.fill_diagonal_(torch.inf).amin(-1) - 1e-6).double().mean())
