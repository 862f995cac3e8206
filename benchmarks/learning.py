"""A step of training on prompts, beside the same model through Hugging Face's GPT-2."""

from __future__ import annotations

import torch

from benchmarks.runner import Row, alternate, track
from massieu.context import SoftmaxModel, task_named
from massieu.context.models import balanced_loss
from massieu.context.optimizer import JointAdamW

SHAPES = [(64, 4, 2, 64), (64, 4, 2, 128), (128, 4, 4, 64)]
DIM = 5


def learning() -> list[Row]:
    """Data, forward, backward, the same loss, clipping and the optimizer.

    GPT-2 has its learned positions; ours has none, which pair tokens do without, ReLU, and an optimizer that sees all
    weights as one tensor. So GPT-2 comes first with its own activation and torch's fused AdamW, as a Trainer would have
    it, then with our optimizer, and then with ReLU too, so that only the models are compared.
    """
    rows = []
    for width, layers, heads, batch in track(SHAPES):
        ours = SoftmaxModel(DIM, width=width, layers=layers, heads=heads, generator=torch.Generator().manual_seed(0))
        step = _joint_step(ours, batch)
        for activation, its_step in (("gelu_new", _step), ("gelu_new", _joint_step), ("relu", _joint_step)):
            ways = {"massieu": step, "gpt2": its_step(GPT2(width, layers, heads, activation), batch)}
            taken = alternate(ways, baseline="gpt2", seconds=8)
            kind = {"of gpt2": activation, "its optimizer": "torch's" if its_step is _step else "ours"}
            rows.append({"shape": f"{width}x{layers}x{heads}", "batch": batch, **kind, **taken})
    return rows


class GPT2(torch.nn.Module):
    """GPT-2 of the same size on the same pair tokens."""

    def __init__(self, width: int, layers: int, heads: int, activation: str):
        super().__init__()
        from transformers import GPT2Config, GPT2Model

        self.layout = SoftmaxModel(DIM, width=width, layers=layers, heads=heads).layout
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        shape = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_inner": 2 * width}
        words = {"n_positions": 64, "vocab_size": 1, "bos_token_id": None, "eos_token_id": None, "use_cache": False}
        self.embedding = torch.nn.Linear(self.layout.width, width)
        self.body = GPT2Model(GPT2Config(**shape, **dropouts, **words, activation_function=activation))
        self.head = torch.nn.Linear(width, 1)

    def loss(self, prompts):  # type: ignore[no-untyped-def]
        hidden = self.body(inputs_embeds=self.embedding(self.layout.tokens(prompts))).last_hidden_state
        return balanced_loss(self.head(hidden)[..., 0], prompts.targets)


def _step(model, batch):  # type: ignore[no-untyped-def]
    draw, optimizer = _prompts(batch), torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss = model.loss(draw())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _joint_step(model, batch):  # type: ignore[no-untyped-def]
    draw, optimizer = _prompts(batch), JointAdamW(model)
    return lambda: optimizer.step(model.loss(draw()), 1e-4)


def _prompts(batch):  # type: ignore[no-untyped-def]
    task, generator = task_named("linear", dim=DIM, noise=0.5), torch.Generator().manual_seed(0)
    return lambda: task.draw(batch, 2 * DIM + 1, generator)
