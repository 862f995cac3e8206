"""Choice of the kernel: the selected one, and never one with wrong numbers."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from agreement import NOT_BUILT, built
from torch.testing import assert_close

from massieu import attend, kernels
from massieu.checks import UserError
from massieu.kernels import compiled, dispatch
from massieu.kernels.compiled import LIBRARY, Library

needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason=NOT_BUILT)


@pytest.fixture(autouse=True)
def _chosen_anew(monkeypatch):
    """Choose the kernel anew in every test and after it."""
    monkeypatch.delenv("MASSIEU_KERNEL", raising=False)
    dispatch.loaded.cache_clear()
    yield
    monkeypatch.undo()
    dispatch.loaded.cache_clear()


def attend_a_little() -> torch.Tensor:
    states = torch.arange(24.0).sin().view(1, 6, 4)
    return attend(states, states, states, causal=True).output


def expected_output() -> torch.Tensor:
    states = torch.arange(24.0, dtype=torch.float32).sin().view(1, 6, 4)
    return torch.nn.functional.scaled_dot_product_attention(states, states, states, is_causal=True)


def refused(match: str) -> None:
    """The compiled kernel is refused with one warning, however many calls follow, and torch serves."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert_close(attend_a_little(), expected_output())
            assert kernels.backend() == "torch"
    assert [str(x.message) for x in caught if match in str(x.message)] == [str(x.message) for x in caught]
    assert len(caught) == 1
    assert str(caught[0].message).startswith("the compiled kernel is not used: ")
    assert str(caught[0].message).endswith("; the torch kernel serves instead")


@needs_library
def test_a_first_call_in_half_precision_does_not_spoil_the_choice():
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
        warnings.simplefilter("error")
        found = attend_a_little()
    assert_close(found, expected_output())
    assert kernels.backend() != "torch"


def test_torch_serves_when_it_is_selected(monkeypatch):
    monkeypatch.setenv("MASSIEU_KERNEL", "torch")
    monkeypatch.setattr(dispatch, "Library", None)  # the library is not loaded
    assert kernels.backend() == "torch"
    assert kernels.reason() == "MASSIEU_KERNEL=torch switches the compiled kernel off"
    assert_close(attend_a_little(), expected_output())


@needs_library
@pytest.mark.parametrize("build", dispatch.BUILDS)
def test_the_selected_build_serves(monkeypatch, build):
    if built(build) is None:
        pytest.skip(f"this processor does not run the {build} build")
    monkeypatch.setenv("MASSIEU_KERNEL", build)
    assert kernels.backend() == f"compiled {build}"
    assert_close(attend_a_little(), expected_output())


@needs_library
def test_the_fastest_build_serves_when_none_is_selected():
    fastest = next(name for name in dispatch.BUILDS if built(name) is not None)
    assert kernels.backend() == f"compiled {fastest}"
    assert kernels.reason() == "the compiled kernel was built and agrees with the torch kernel"


@pytest.mark.parametrize("name", ["nonsense", "AVX2", "compiled", "torch "])
def test_a_kernel_that_does_not_exist_is_an_error_that_names_those_that_do(monkeypatch, name):
    monkeypatch.setenv("MASSIEU_KERNEL", name)
    with pytest.raises(UserError, match="MASSIEU_KERNEL must"):
        kernels.backend()
    with pytest.raises(UserError, match="MASSIEU_KERNEL must"):
        attend_a_little()


def test_without_a_library_torch_serves_in_silence(monkeypatch, tmp_path):
    monkeypatch.setattr(dispatch, "LIBRARY", tmp_path / "libmassieu.so")
    assert kernels.backend() == "torch"
    assert kernels.reason().startswith("the compiled kernel was not built: ")
    assert_close(attend_a_little(), expected_output())


def test_a_selected_build_that_is_not_there_is_refused_with_one_warning(monkeypatch, tmp_path):
    use_library(monkeypatch, tmp_path / "libmassieu.so")
    monkeypatch.setenv("MASSIEU_KERNEL", "portable")
    refused("No such file")


def use_library(monkeypatch, path) -> None:
    monkeypatch.setattr(dispatch, "LIBRARY", path)
    monkeypatch.setattr(dispatch, "Library", functools.partial(Library, path=path))


@pytest.mark.parametrize(
    "content", [b"", b"not a library at all", b"\x7fELF" + bytes(4000)], ids=["empty", "text", "elf"]
)
def test_a_library_that_cannot_be_loaded_is_refused_with_one_warning(monkeypatch, tmp_path, content):
    path = tmp_path / "libmassieu.so"
    path.write_bytes(content)
    use_library(monkeypatch, path)
    refused(str(path))


def test_a_library_of_something_else_is_refused_with_one_warning(monkeypatch):
    def other(*arguments):
        raise AttributeError("undefined symbol: massieu_build")

    monkeypatch.setattr(dispatch, "LIBRARY", dispatch.LIBRARY.parent)  # something that exists
    monkeypatch.setattr(dispatch, "Library", other)
    refused("undefined symbol: massieu_build")


@needs_library
def test_a_build_that_the_processor_does_not_run_is_refused_with_one_warning(monkeypatch):
    monkeypatch.setenv("MASSIEU_KERNEL", "avx512")
    monkeypatch.setattr(dispatch, "Library", lambda *_: Library("of the future"))
    refused("this processor does not run the of the future build")


@needs_library
def test_a_library_built_from_another_version_is_refused_with_one_warning(monkeypatch):
    monkeypatch.setattr(compiled, "_Forward", compiled._Backward)
    refused("libmassieu.so was built from another version of the source; build it again")


FIELDS = range(6)


class Wrong(Library):
    """A library whose answers are off by one part in a hundred, in one place."""

    place: str | int = "output"

    def forward(self, *arguments, **options):
        found = super().forward(*arguments, **options)
        if self.place == "output":
            found.output[0, 0, -1] += 1e-2
        if self.place in FIELDS:
            found.statistics[self.place][1, 0, -1] *= 1.01
        if self.place == "nan":
            found.output[0] = torch.nan
        few, half = found.output.shape[-2] == 1, found.output.dtype == torch.bfloat16
        wrong = {"retrieve": options.get("split_atoms"), "few rows": few, "half": half}.get(self.place)
        if wrong:
            found.statistics[0].mul_(1.01)
        if self.place == "best" and found.best is not None:
            found.best.score[0, 0, -1, 1] += 1e-2
        return found

    def mass_count(self, *arguments):
        return super().mass_count(*arguments) + 2 * (self.place == "count")

    def backward(self, *arguments, **options):
        found = super().backward(*arguments, **options)
        if isinstance(self.place, tuple):
            found[self.place[1]].view(-1)[5] += 1e-2
        return found


@needs_library
@pytest.mark.parametrize(
    "place",
    ["output", "nan", "retrieve", "few rows", "half", "count", "best", *FIELDS, *(("gradient", i) for i in range(4))],
    ids=str,
)
def test_a_library_that_gives_wrong_numbers_is_refused_with_one_warning(monkeypatch, place):
    monkeypatch.setattr(Wrong, "place", place)
    monkeypatch.setattr(dispatch, "Library", Wrong)
    refused("disagrees with the torch kernel on a small case")


@needs_library
def test_a_library_that_refuses_the_small_case_is_refused_with_one_warning(monkeypatch):
    def call(self, name, structure):
        raise MemoryError("not enough memory for the tiles of one call")

    monkeypatch.setattr(Library, "_call", call)
    refused("not enough memory for the tiles of one call")
    assert kernels.reason().startswith("the compiled kernel was built, but failed when it was loaded")


@needs_library
def test_the_right_library_is_not_refused(monkeypatch):
    monkeypatch.setattr(Wrong, "place", "nowhere")
    monkeypatch.setattr(dispatch, "Library", Wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.backend().startswith("compiled ")


@needs_library
def test_what_the_compiled_kernel_cannot_read_goes_to_the_torch_kernel():
    class Sub(torch.Tensor):
        pass

    def served(query, key, value):
        return compiled.serves(kernels.Inputs(query, key, value, None, None, None))

    plain = torch.ones(2, 3)
    assert served(plain, plain, plain)
    assert served(plain, plain, None)
    assert served(torch.nn.Parameter(plain), plain, plain)
    assert not served(plain.as_subclass(Sub), plain, plain)
    assert not served(plain[:0], plain, plain)
    assert not served(plain, plain, plain[..., :0])
    assert not served(plain.to("meta"), plain, plain)
    long = torch.ones(1, 1).expand(2**31, 1)
    assert not served(plain[:, :1], long, long)
