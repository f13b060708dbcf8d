"""The table of `field_mutants` is whole and fits the code. Some of it is run; all of it by its script."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from field_mutants import MUTANTS, TESTS, Mutant, Unheeded

NUMBERS = {"A": 7, "B": 9, "C": 7, "D": 7, "E": 4, "F": 4, "G": 5, "H": 4, "I": 4, "J": 4, "K": 4}
"""Cases by letter, from 1 on."""
QUICK = ("A3", "E1", "K1")


def test_every_case_has_a_mutant() -> None:
    cases = {f"{letter}{number}" for letter, most in NUMBERS.items() for number in range(1, most + 1)}
    assert {mutant.case for mutant in MUTANTS} == cases


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.case} {mutant.what}")
def test_a_mutant_fits_the_code_and_its_test_is_there(mutant: Mutant | Unheeded) -> None:
    mutant.fit()
    file, _, name = mutant.test.partition("::")
    tests = [node.name for node in ast.walk(ast.parse((TESTS / file).read_text())) if hasattr(node, "name")]
    assert not name or re.sub(r"\[.*", "", name) in tests


@pytest.mark.parametrize("case", QUICK)
def test_a_test_fails_without_the_mechanism_that_it_is_about(case: str, tmp_path: Path) -> None:
    (mutant,) = (mutant for mutant in MUTANTS if mutant.case == case)
    ran = mutant.run(tmp_path)
    assert ran.returncode == 1, ran.stdout + ran.stderr
