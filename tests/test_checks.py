"""Validators return what is right and say in one sentence what is wrong; call sites are tested by the class alone."""

import pytest
import torch

from massieu.checks import (
    MissingPackageError,
    UserError,
    check_choice,
    check_count,
    check_floating,
    check_number,
    check_shape,
    optional_package,
)


def test_what_is_right_comes_back():
    assert check_count(3, "steps") == 3
    assert check_count(0, "steps", least=0) == 0
    assert check_number(2, "beta", above=0) == 2.0
    check_choice(None, "method", (None, "gd"))
    check_shape(torch.zeros(2, 5, 3), "keys", "...", "atoms", 3)
    check_shape(torch.zeros(5, 3), "keys", 5, 3)
    check_floating(torch.zeros(2), "keys")
    assert optional_package("torch", "this", "dev") is torch


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_count(True, "steps"), "steps must be a whole number of at least 1, got True; correct it"),
        (lambda: check_count(2.0, "steps", remedy="use int"), "steps must be a whole number of at least 1, got 2.0; use int"),
        (lambda: check_count(1, "steps", least=2), "steps must be a whole number of at least 2, got 1; correct it"),
        (lambda: check_number(torch.ones(()), "beta"), "beta must be a Python number, got Tensor; convert a tensor with .item()"),
        (lambda: check_number(True, "beta"), "beta must be a Python number, got bool; convert a tensor with .item()"),
        (lambda: check_number(float("nan"), "beta"), "beta must be finite, got nan; correct it"),
        (lambda: check_number(0, "beta", above=0), "beta must be finite and larger than 0, got 0; correct it"),
        (lambda: check_number(-1, "noise", least=0), "noise must be finite and at least 0, got -1; correct it"),
        (lambda: check_number(1, "error", above=0, below=0.5), "error must be finite and larger than 0 and below 0.5, got 1; correct it"),
        (lambda: check_floating(torch.tensor([1.0, torch.nan]), "keys", finite=True), "keys must be finite, got nan or infinity; remove or replace those entries"),
        (lambda: check_choice("polyac", "method", ("gd", "polyak")), "method must be one of 'gd', 'polyak', got 'polyac' (did you mean polyak?)"),
        (lambda: check_choice(1, "flag", (True, None)), "flag must be one of True, None, got 1"),
        (lambda: check_floating([1.0], "keys"), "keys must be a floating-point tensor, got list; convert it with torch.as_tensor"),
        (lambda: check_floating(torch.ones(2).int(), "keys"), "keys must be a floating-point tensor, got torch.int32; convert it with .double()"),
        (lambda: check_floating(torch.ones(2) * 1j, "keys"), "keys must be a floating-point tensor, got torch.complex64; attention weights are exponentials of real scores: pass the real and the imaginary part side by side"),
        (lambda: check_shape(torch.zeros(3), "keys", "...", "atoms", 3), "keys must have shape (..., atoms, 3), got (3,); for a single one pass keys[None]"),
        (lambda: check_shape(torch.zeros(4, 2), "keys", "...", "atoms", 3), "keys must have shape (..., atoms, 3), got (4, 2); check its axes"),
        (lambda: check_shape(torch.zeros(1, 4, 3), "keys", "atoms", 3), "keys must have shape (atoms, 3), got (1, 4, 3); check its axes"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(call, message):
    with pytest.raises(UserError) as error:
        call()
    assert str(error.value) == message


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it():
    with pytest.raises(
        MissingPackageError, match=r"this needs no_such_package, which is not installed; pip install .*dev"
    ):
        optional_package("no_such_package.part", "this", "dev")
