from __future__ import annotations

from tools.goals import (
    class_names_of_several_modules,
    functions_with_many_parameters,
    import_cycles,
    long_files,
)


def test_a_public_class_name_means_one_class_in_all_modules(this_tree):
    assert class_names_of_several_modules(this_tree) == []


def test_no_two_modules_import_one_another_for_types_neither(this_tree):
    assert import_cycles(this_tree) == []


def test_files_hold_one_idea_each_and_are_short(this_tree):
    assert long_files(this_tree) == []


def test_functions_take_few_parameters(this_tree):
    """The exceptions are kernels' operators, whose arguments are tensors, and their cases."""
    assert len(functions_with_many_parameters(this_tree)) <= 10
