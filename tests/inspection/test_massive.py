from dataclasses import replace

import numpy
import pytest
import torch
from taps.families import build
from torch.testing import assert_close

from massieu.accumulators.serialization import pack, unpack
from massieu.inspection import inspect_model
from massieu.inspection.layer_statistics import LayerStatistics, States
from massieu.inspection.layers import LayerObserver
from massieu.inspection.massive import MASSIVE, TokenFilter, norm_ratio
from massieu.inspection.merging import merge_runs
from massieu.inspection.quantities import ALL_TOKENS
from massieu.inspection.tokens import Tokens

pandas = pytest.importorskip("pandas")
DIM, LENGTHS = 12, (9, 2, 30, 17, 25, 40, 12, 33, 21, 28, 35, 19)
KEYS = [f"passage {number}" for number in range(len(LENGTHS))]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def block_states(x, seed, first, size):
    """States of one block; the MLP multiplies the first token of every passage by a size."""
    attention, mlp = x @ draw(DIM, DIM, seed=seed) / DIM, x.tanh() @ draw(DIM, DIM, seed=seed + 1) / DIM
    after = x + attention
    mlp = torch.where(first[:, None], size * after, mlp)
    output = after + mlp
    return States(x, x, attention, after, None, after, after, mlp, output, output)


def passages(numbers):
    """Content mask and tokens of some passages, padded to the longest."""
    lengths = [LENGTHS[number] for number in numbers]
    content = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rows = torch.cat([draw(LENGTHS[number], DIM, seed=100 + number) for number in numbers])
    return Tokens.of(content, [KEYS[number] for number in numbers]), rows


def read(batches, sizes=(0.0, 300.0, -0.9)):
    """Statistics of blocks that the batches have gone through; the second block makes first tokens massive."""
    found = [LayerStatistics(DIM) for _ in sizes]
    for numbers in batches:
        tokens, x = passages(numbers)
        counted, first = TokenFilter(tokens), tokens.position == 0
        for number, (statistics, size) in enumerate(zip(found, sizes, strict=True)):
            states = block_states(x, 10 * number, first, size)
            counted.look(states.streams)
            chosen = states if counted.order is None else states.select(counted.order)
            statistics.update(counted.tokens, chosen, counted.largest)
            x = states.output
    return found


def assert_equal_tables(first, second):
    tables = [pandas.DataFrame([statistics.finish() for statistics in found]) for found in (first, second)]
    pandas.testing.assert_frame_equal(*tables, rtol=1e-7, atol=1e-9)


def test_a_massive_token_is_found_from_its_passage_alone():
    assert read([range(12)])[1].massive.count == len(LENGTHS)
    assert_equal_tables(read([range(12)]), read([[5, 1, 9], [0], [2, 3, 4, 6], [11, 10], [8, 7]]))


def test_halves_of_a_text_with_massive_tokens_merge():
    whole, first, second = read([range(12)]), read([range(5)]), read([range(5, 12)])
    for mine, theirs in zip(first, second, strict=True):
        mine.merge(theirs)
    assert_equal_tables(whole, first)


def test_values_leave_massive_tokens_out_and_the_other_columns_have_them():
    # The same blocks, read without a filter, and with first tokens left out by hand from the second block on.
    found = [statistics.finish() for statistics in read([range(12)])]
    tokens, x = passages(range(12))
    first = tokens.position == 0
    for number, size in enumerate((0.0, 300.0, -0.9)):
        states = block_states(x, 10 * number, first, size)
        everything, rest = LayerStatistics(DIM), LayerStatistics(DIM)
        everything.update(tokens, states)
        kept = (~first | (number == 0)).nonzero()[:, 0]
        fewer = {name: getattr(tokens, name)[kept] for name in ("index", "row", "position")}
        rest.update(replace(tokens, num_content=len(kept), **fewer), states.select(kept))
        every, without, own = everything.finish(), rest.finish(), found[number]
        for name in ALL_TOKENS:
            assert_close(own[f"{name}_all_tokens"], every[name], rtol=1e-7, atol=1e-9, equal_nan=True)
        for name, value in without.items():
            if not name.startswith("massive") and not name.endswith("_all_tokens"):
                assert_close(own[name], value, rtol=1e-7, atol=1e-9, equal_nan=True)
        assert_close(own["fc_linear_r2_all_tokens"], every["fc_linear_r2"], rtol=1e-7, atol=1e-9)
        x = states.output
    assert found[1]["effective_rank_all_tokens"] < found[1]["effective_rank"] - 1
    assert [own["tokens"] for own in found] == [sum(LENGTHS), *[sum(LENGTHS) - 12] * 2]


def test_a_token_stays_apart_after_the_block_that_made_it_massive():
    # The third block makes the first tokens small again.
    first, second, third = (statistics.finish() for statistics in read([range(12)]))
    assert (first["massive_tokens"], second["massive_tokens"], third["massive_tokens"]) == (0, 12, 12)
    assert first["massive_norm"] < MASSIVE < second["massive_norm"]
    assert second["massive_first_share"] == 1
    assert numpy.isnan(first["massive_first_share"])


def test_the_only_token_of_a_passage_is_never_massive_and_of_two_the_larger_one_may_be():
    ratio = norm_ratio(torch.tensor([500.0, 30.0, 1.0]), torch.tensor([0, 1, 1]), 2)
    assert ratio.tolist() == [1.0, 30.0, 1.0]
    assert norm_ratio(torch.zeros(2), torch.zeros(2, dtype=torch.long), 1).isnan().all()
    assert norm_ratio(torch.zeros(0), torch.zeros(0, dtype=torch.long), 2).shape == (0,)


def test_states_that_were_one_tensor_are_still_one_after_selection():
    x = draw(5, DIM)
    states = States(x, x, 2 * x, 3 * x, (x, 2 * x), None, None, None, None, x)
    chosen = states.select(torch.tensor([0, 3]))
    assert chosen.before is chosen.output is chosen.normed[0]
    assert chosen.normed[1].shape == (2, DIM)
    assert chosen.mlp is None


def test_few_massive_tokens_take_little_room_in_a_part():
    tensors, others = {}, {}
    (_, massive, _), (_, ordinary, _) = read([range(12)]), read([range(12)], (0.0, 0.0, 0.0))
    packed = pack(massive, "part", tensors)
    pack(ordinary, "part", others)
    size, other = (sum(x.nbytes for x in found.values()) for found in (tensors, others))
    rows = 12 * DIM * 8
    assert size - other < 8 * rows  # the rows of six states and their means
    assert_equal_tables([massive], [unpack(packed, tensors)])


def test_the_observer_says_which_tokens_it_leaves_out():
    model, inputs = build("llama")
    embedding, first = model.get_input_embeddings(), inputs["input_ids"][0, 0]
    with torch.no_grad():
        embedding.weight[first] *= 1000
    observer = LayerObserver(model, inputs)
    content = torch.ones(2, 24, dtype=torch.bool)
    with torch.no_grad(), observer.batch(content, ["a", "b"]):
        model(**inputs)
    table = observer.table()
    marked = int((inputs["input_ids"] == first).sum())
    assert table["massive_tokens"].tolist() == [marked] * len(table)
    assert table["tokens"].tolist() == [48 - marked] * len(table)
    assert any("layer values leave out tokens with massive activations" in note for note in observer.notes)


def test_merged_runs_with_massive_tokens_say_what_one_run_says(tmp_path):
    model, inputs = build("llama")
    words = torch.randint(3, 60, (12, 24), generator=torch.Generator().manual_seed(5))
    words[:, 0] = inputs["input_ids"][0, 0]
    with torch.no_grad():
        model.get_input_embeddings().weight[words[0, 0]] *= 1000
    whole = inspect_model(model, inputs=[{"input_ids": words.flip(0)}])
    for name, rows in (("first", words[:5]), ("second", words[5:])):
        batches = [{"input_ids": row[None]} for row in rows]
        inspect_model(model, inputs=batches, source=name).save(tmp_path / name, figures=False, partial=True)
    found = merge_runs([tmp_path / "second", tmp_path / "first"], model=model)
    assert found.layers["massive_tokens"].ge(12).all()
    pandas.testing.assert_frame_equal(found.layers, whole.layers, rtol=1e-4, atol=1e-5)  # float32
    (finding,) = (own for own in found.findings if own.title == "Massive activations")
    assert "The values of the layers leave these tokens out" in finding.sentence
