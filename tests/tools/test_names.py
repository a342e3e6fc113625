from __future__ import annotations

from tools.goals import class_names_of_several_modules, import_cycles


def test_a_public_class_name_means_one_class_in_all_modules(this_tree):
    assert class_names_of_several_modules(this_tree) == []


def test_no_two_modules_import_one_another_for_types_neither(this_tree):
    assert import_cycles(this_tree) == []
